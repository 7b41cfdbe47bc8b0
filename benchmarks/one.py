"""Launches one kernel once, for a profiler.

ncu --set full --kernel-name kernel python benchmarks/one.py stage3 4096
python benchmarks/one.py stage2 N | M N K [--device cpu|cuda]
"""

import argparse

import report
import timing
import torch

import torch_sgemm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*torch_sgemm.STAGES, "cublas"]
    parser.add_argument("kernel", choices=names, metavar="KERNEL", help=", ".join(names))
    parser.add_argument("size", nargs="+", type=int, metavar="N | M N K")
    report.add_device_argument(parser)
    args = parser.parse_args()
    device = report.pick_device(parser, args.device)
    M, N, K = report.sizes(parser, args.size)
    if args.kernel == "cublas" and device == "cpu":
        parser.error("cublas: there is no cuBLAS on the CPU; name a stage")
    op = {**torch_sgemm.STAGES, "cublas": torch_sgemm.cublas}[args.kernel]
    a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
    out = torch.empty(M, N, device=device)
    timing.synchronize(device)
    op(a, b, out=out)
    timing.synchronize(device)
    print(f"{args.kernel}, M = {M}, N = {N}, K = {K}, on {report.device_name(device)}")


if __name__ == "__main__":
    main()
