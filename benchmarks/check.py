"""Is a result right, and is a figure believable? For tests and benchmarks alike.

The error rule. With C64 the float64 result of the same inputs and D = |alpha| |A| |B| + |beta| |c|,
every entry must hold ``|C - C64| <= (K + 2) 2^-24 D`` (K + 4 where alpha, beta and c take part):
the rigorous bound of an FP32 sum in any order, plus what underflow costs. NaN and infinities must
stand where float64 arithmetic, rounded to float32, has them. Nothing here is relative to a rival's
error, and a NaN fails by construction.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max


class CheckError(Exception):
    """A result that is wrong, or a figure that cannot be true."""


@dataclass(frozen=True)
class Reference:
    """The exact result of alpha * (a @ b) + beta * c, and how large an error it may have."""

    exact: Tensor  # float64
    scale: Tensor  # float64: D above
    product: Tensor  # float64: |A| |B|
    allowed: Tensor  # float64: the largest |error| of an entry


@dataclass(frozen=True)
class Errors:
    rms: float  # ||C - C64||_F / ||C64||_F
    cw: float  # max |C - C64| / D
    wrong: int  # entries that break the rule
    example: str  # the first of them, in words


def reference(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
) -> Reference:
    """Float64 arithmetic. As in BLAS, what a zero alpha or beta multiplies is not read."""
    shape = (a.shape[0], b.shape[1])
    K = a.shape[1]
    if alpha == 0 or K == 0:
        exact = torch.zeros(shape, dtype=torch.float64, device=a.device)
        product = scale = exact
    else:
        a64, b64 = a.double(), b.double()
        exact = alpha * (a64 @ b64)
        product = a64.abs() @ b64.abs()
        scale = abs(alpha) * product
    if c is not None and beta != 0:
        exact = exact + beta * c.double()
        scale = scale + abs(beta) * c.double().abs()
    plain = alpha == 1 and (c is None or beta == 0)
    steps = K + (2 if plain else 4)
    allowed = steps * 2.0**-24 * scale + steps * 2.0**-150 * max(1.0, abs(alpha))
    return Reference(exact, scale, product, allowed)


def errors(result: Tensor, ref: Reference) -> Errors:
    """How far a float32 result is from the reference, and in how many entries it is wrong."""
    if result.shape != ref.exact.shape or result.dtype != torch.float32:
        raise CheckError(
            f"expected a float32 result of shape {tuple(ref.exact.shape)}, "
            f"got {result.dtype} of {tuple(result.shape)}"
        )
    rounded = ref.exact.float()
    largest = torch.maximum(ref.scale, ref.product)  # NaN where either is
    measured = rounded.isfinite() & (largest < FLT_MAX)
    difference = (result.double() - ref.exact).abs()
    good = torch.where(
        measured,
        difference <= ref.allowed,
        _same_class(result, rounded)
        # An FP32 running sum may overflow where the exact one does not, and inf - inf is NaN.
        | (largest.isfinite() & (largest >= FLT_MAX) & ~result.isfinite()),
    )
    wrong = int((~good).sum())
    example = ""
    if wrong:
        i, j = (~good).nonzero()[0].tolist()
        example = (
            f"C[{i}, {j}] is {result[i, j].item()}, exactly {ref.exact[i, j].item()}, "
            f"allowed error {ref.allowed[i, j].item():.3g}"
        )
    difference, exact = difference[measured], ref.exact[measured]
    ratio = difference / ref.scale[measured]
    ratio = torch.where(difference == 0, 0.0, ratio)  # 0 / 0 is 0
    return Errors(_norm_ratio(difference, exact), _max(ratio), wrong, example)


def require(result: Tensor, ref: Reference, what: str = "the result") -> Errors:
    """errors(), or CheckError where any entry breaks the rule."""
    found = errors(result, ref)
    if found.wrong:
        raise CheckError(
            f"{what} is wrong in {found.wrong} of {result.numel()} entries: {found.example}"
        )
    return found


def max_relative_difference(result: Tensor, other: Tensor) -> float:
    """max |result - other| / max |other|: the column that optimized-GEMM has, against cuBLAS."""
    return _norm_ratio(result.double() - other.double(), other.double(), ord=math.inf)


def _same_class(result: Tensor, expected: Tensor) -> Tensor:
    return (
        (result.isnan() & expected.isnan())
        | (result.isinf() & (result == expected))
        | (result.isfinite() & expected.isfinite())
    )


def _norm_ratio(difference: Tensor, exact: Tensor, ord: float = 2) -> float:
    if difference.numel() == 0:
        return 0.0
    above = torch.linalg.vector_norm(difference, ord=ord).item()
    below = torch.linalg.vector_norm(exact, ord=ord).item()
    return 0.0 if above == 0 else above / below if below else math.inf


def _max(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0  # NaN where any is NaN


def require_fp32(matmul: Callable[[Tensor, Tensor], Tensor], device: str, what: str) -> None:
    """Proves that matmul multiplies in FP32: shorter formats have no bits for what it is given."""
    eye = torch.eye(256, device=device)
    for value in (1024.5, 1 + 2.0**-11):
        got = matmul(value * eye, eye)
        if not torch.equal(got, value * eye):
            raise CheckError(
                f"{what} does not multiply in FP32: {value} * 1 came out as {got[0, 0].item()}. "
                "Is TF32 switched on? See torch.backends.cuda.matmul.fp32_precision and the "
                "variables TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE"
            )


def require_half_precision(rms: float, what: str) -> None:
    """That a row which stands for TF32, FP16 or BF16 has their error: less is not what ran."""
    if not 2.0**-14 < rms < 2.0**-6:
        raise CheckError(
            f"{what}: an rms error of {rms:.2g} is not that of 8 to 11 significant bits; "
            "did it run, and at that precision?"
        )


def require_below_peak(rate: float, peak: float, what: str, unit: str = "TFLOP/s") -> None:
    """Refuses a figure that beats the measured peak of the unit it used by over 2 %."""
    if not 0 < rate <= 1.02 * peak:
        raise CheckError(
            f"{what}: {rate:.4g} {unit} cannot be true, the measured peak is {peak:.4g} {unit}. "
            "Was the device synchronised, and did the kernel run?"
        )
