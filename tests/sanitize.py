"""Every op once on every edge and layout, for compute-sanitizer (`make gpu-sanitize`).

    compute-sanitizer --tool memcheck python tests/sanitize.py            every kernel
    compute-sanitizer --tool racecheck python tests/sanitize.py stage9    these: racecheck is slow

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

import torch_sgemm

# Around 1, and around tiles of 16 to 256 rows and columns that are 8 to 32 deep.
EDGES = [
    *[(4, 132, 260), (132, 8, 40), (7, 300, 129)],
    *[(1, 1, 1), (1, 33, 17), (33, 1, 9), (17, 31, 1), (63, 65, 7), (65, 129, 8)],
    *[(127, 128, 15), (129, 127, 16), (257, 255, 33)],
]
# Whole tiles of stages with small tiles, and of all: these take the kernels that check no bounds.
TILES = [(64, 64, 64), (256, 256, 32), (256, 512, 64)]


def operands(M: int, N: int, K: int):
    """(a, b, c, out) as whole tensors, and as slices that end where their buffer does; for tiles
    also such with rows that begin at multiples of 16 bytes, and turned."""

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda")

    yield made(M, K), made(K, N), None, made(M, N)
    yield made(K, M).t(), made(N, K).t(), None, made(N, M).t()
    yield made(M, 2 * K)[:, ::2], made(N, K + 1)[:, 1:].t(), made(M, 1), made(M, 2 * N)[:, ::2]
    yield made(M, K + 3)[:, 3:], made(K, N + 1)[:, 1:], made(N), made(M, N + 5)[:, 5:]
    if (M, N, K) in TILES:
        yield made(M, K + 4)[:, 4:], made(K, N + 8)[:, 8:], made(M, N), made(M, N + 4)[:, 4:]
        yield made(K, M).t(), made(N, K).t(), made(M, 1), made(N, M).t()


def by_kernel(kernel: str):
    """The product ops' kernel, with K whole or, where c is given, in three parts."""

    def op(a, b, c=None, *, alpha, beta, out):
        gemm = torch.ops.sgemm._gemm_by
        out.copy_(gemm(a, b, c, beta, alpha, kernel, 1 if c is None else 3))

    return op


def product(a, b, c=None, *, alpha, beta, out):
    """Whatever select() takes."""
    if c is None:
        c, beta = a.new_zeros(()), 0.0
    torch_sgemm.addmm(c, a, b, alpha=alpha, beta=beta, out=out)


TILED = ("128x256", "64x128", "64x64", "32x128", "128x32", "32x32")
RINGS = tuple(
    f"ring{tile}{k}" for tile in ("256x128", "128x128", "128x64", "64x64") for k in ("", "k")
)
PRODUCTS = {kernel: by_kernel(kernel) for kernel in (*TILED, *RINGS, "dot", "axpy")}


def main() -> None:
    calls = 0
    known = {**report.KERNELS, **PRODUCTS, "product": product}
    wanted = sys.argv[1:] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"no kernel is called '{unknown[0]}'; there are {', '.join(known)}")
    for name in wanted:
        op = known[name]
        print(name, file=sys.stderr, flush=True)
        for M, N, K in EDGES + TILES:
            for a, b, c, out in operands(M, N, K):
                out.fill_(float("nan"))
                try:
                    op(a, b, c, alpha=1.5, beta=0.5, out=out)
                except RuntimeError as error:
                    if name in PRODUCTS and "cannot compute" in str(error):
                        continue  # a kernel of few rows, or of aligned operands
                    raise
                expected = check.reference(a, b, c, 1.5, 0.5)
                check.require(out, expected, f"{name} at {M} x {N} x {K}")
                calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls, all right")


if __name__ == "__main__":
    main()
