"""Every op once on every edge and layout, for compute-sanitizer (`make gpu-sanitize`).

    compute-sanitizer --tool memcheck python tests/sanitize.py

A sanitizer knows of memory what the allocator tells it, so every tensor gets an allocation of its
own. Results are checked too: a kernel that does nothing is clean.
"""

import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import check
import report
import torch

SHAPES = [
    *[(1, 1, 1), (1, 33, 17), (33, 1, 17), (17, 33, 1), (2, 4, 3)],
    *[
        (15, 16, 17),
        (16, 16, 16),
        (31, 32, 33),
        (32, 32, 32),
        (63, 65, 64),
        (65, 63, 66),
        (64, 64, 64),
    ],
]


def layouts(M: int, N: int, K: int):
    """(a, b, c, out) as whole tensors, as slices that end where their buffer does, and turned."""
    made = torch.randn
    yield (
        made(M, K, device="cuda"),
        made(K, N, device="cuda"),
        None,
        torch.empty(M, N, device="cuda"),
    )
    padded = made(M, K + 3, device="cuda")[:, 3:], made(K, N + 1, device="cuda")[:, 1:]
    yield *padded, made(N, device="cuda"), torch.empty(M, N + 5, device="cuda")[:, 5:]
    turned = made(K, M, device="cuda").t(), made(N, K, device="cuda").t()
    yield *turned, made(M, 1, device="cuda"), torch.empty(N, M, device="cuda").t()


def main() -> None:
    calls = 0
    for name, op in report.KERNELS.items():
        for M, N, K in SHAPES:
            for a, b, c, out in layouts(M, N, K):
                out.fill_(float("nan"))
                op(a, b, c, alpha=1.5, beta=0.5, out=out)
                expected = check.reference(a, b, c, 1.5, 0.5)
                check.require(out, expected, f"{name} at {M} x {N} x {K}")
                calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls, all right")


if __name__ == "__main__":
    main()
