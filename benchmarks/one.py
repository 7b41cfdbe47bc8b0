"""Launches each kernel once, for a profiler.

ncu --set full --kernel-name kernel python benchmarks/one.py stage3 4096
python benchmarks/one.py stage2 stage3 N | M N K [--device cpu|cuda]
"""

import argparse
import itertools

import report
import timing
import torch


def launch(kernel: str, M: int, N: int, K: int, device: str) -> None:
    """One launch on random normal data; nothing else runs on the device meanwhile."""
    op = report.KERNELS[kernel]
    a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
    out = torch.empty(M, N, device=device)
    timing.synchronize(device)
    op(a, b, out=out)
    timing.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(report.KERNELS)
    parser.add_argument("what", nargs="+", metavar="KERNEL... N | M N K", help=names)
    report.add_device_argument(parser)
    args = parser.parse_args()
    device = report.pick_device(parser, args.device)
    kernels = list(itertools.takewhile(lambda word: not word.lstrip("-").isdigit(), args.what))
    for kernel in kernels:
        report.check_kernel(parser, kernel)
    if not kernels:
        parser.error(f"name a kernel: {names}")
    try:
        size = [int(word) for word in args.what[len(kernels) :]]
    except ValueError:
        parser.error(f"kernels come first, then N or M N K; got {' '.join(args.what)}")
    M, N, K = report.sizes(parser, size)
    if "cublas" in kernels and device == "cpu":
        parser.error("cublas: there is no cuBLAS on the CPU; name a stage")
    needed, free = 4 * (M * K + K * N + M * N), report.memory_free(device)
    if needed > free:
        parser.error(f"{needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free")
    for kernel in kernels:
        launch(kernel, M, N, K, device)
        print(f"{kernel}, M = {M}, N = {N}, K = {K}, on {report.device_name(device)}")


if __name__ == "__main__":
    main()
