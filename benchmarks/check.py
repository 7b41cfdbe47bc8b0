"""Is a result right, and is a figure believable? For tests and benchmarks alike.

The error rule. With C64 the float64 result of the same inputs and D = |alpha| |A| |B| + |beta| |c|,
every entry must hold ``|C - C64| <= (K + 2) 2^-24 D`` (K + 4 where alpha, beta and c take part):
the rigorous bound of an FP32 sum in any order, plus what underflow costs. NaN and infinities must
stand where float64 arithmetic, rounded to float32, has them; only where a running sum can overflow
on its way, within that bound, may it. Nothing here is relative to a rival's error, and a NaN fails
by construction.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max

#: No tensor core of today does so many times what the CUDA cores beside it do.
TENSOR_CORES = 40

#: Multiply-adds up to which a benchmark compares a whole result with float64.
WHOLE = 10**11
SAMPLED = 64  # rows and columns, beyond that


@dataclass(frozen=True)
class Precision:
    """What the product ops' argument `precision` may do beyond what is asked of any FP32 sum."""

    peak: float = 1  # times the multiply-adds' measured peak: no speed is above it
    cw: float = 0.0  # component-wise and
    rms: float = 0.0  # rms errors that are right even where the rule allows less


#: The precisions that benchmarks and tests know.
PRECISIONS = {
    "ieee": Precision(),
    "auto": Precision(peak=TENSOR_CORES, cw=2.0**-21, rms=2.0**-22),
}


class CheckError(Exception):
    """A result that is wrong, or a figure that cannot be true."""


class Failures:
    """What went wrong in a run whose other rows are worth having."""

    def __init__(self):
        self.texts: list[str] = []

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """A block whose failure is put down, and not raised."""
        try:
            yield
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            kind = "" if isinstance(error, CheckError) else f"{type(error).__name__}: "
            self.texts.append(f"{what}: {kind}{text}")


@dataclass(frozen=True)
class Reference:
    """The exact result of alpha * (a @ b) + beta * c, and how large an error it may have."""

    shape: tuple[int, ...]  # of the result
    rows: Tensor | None  # which of its rows and columns the others are; None: all
    columns: Tensor | None
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
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> Reference:
    """Float64 arithmetic. As in BLAS, what a zero alpha or beta multiplies is not read.

    Of a batch too; of some rows or columns only, where they are given.
    """
    whole = (*a.shape[:-1], b.shape[-1])
    c = None if c is None or beta == 0 else _pick(c.expand(whole), rows, columns)
    a, b = _pick(a, rows, None), _pick(b, None, columns)
    shape = (*a.shape[:-1], b.shape[-1])
    K = a.shape[-1]
    if alpha == 0 or K == 0:
        exact = torch.zeros(shape, dtype=torch.float64, device=a.device)
        product = scale = exact
    else:
        a64, b64 = a.double(), b.double()
        exact = alpha * (a64 @ b64)
        product = a64.abs() @ b64.abs()
        scale = abs(alpha) * product
    if c is not None:
        exact = exact + beta * c.double()
        scale = scale + abs(beta) * c.double().abs()
    plain = alpha == 1 and c is None
    steps = K + (2 if plain else 4)
    allowed = steps * 2.0**-24 * scale + steps * 2.0**-150 * max(1.0, abs(alpha))
    return Reference(whole, rows, columns, exact, scale, product, allowed)


def references(a: Tensor, b: Tensor) -> list[Reference]:
    """Of all of a @ b, or of SAMPLED rows and columns of it where float64 takes too long.

    The first and the last are among them, for edges are where kernels go wrong.
    """
    M, N = a.shape[-2], b.shape[-1]
    if a.numel() * N <= WHOLE:
        return [reference(a, b)]
    rows, columns = (
        torch.cat([torch.tensor([0, n - 1]), torch.randint(n, (SAMPLED - 2,))])
        .unique()
        .to(a.device)
        for n in (M, N)
    )
    return [reference(a, b, rows=rows), reference(a, b, columns=columns)]


def errors(result: Tensor, ref: Reference, cw: float = 0.0) -> Errors:
    """How far a float32 result is from the reference, and in how many entries it is wrong.

    cw: a component-wise error that is right even where the rule allows less.
    """
    if result.shape != ref.shape or result.dtype != torch.float32:
        raise CheckError(
            f"expected a float32 result of shape {tuple(ref.shape)}, "
            f"got {result.dtype} of {tuple(result.shape)}"
        )
    result = _pick(result, ref.rows, ref.columns)
    allowed = torch.maximum(ref.allowed, cw * ref.scale) if cw else ref.allowed
    rounded = ref.exact.float()
    largest = torch.maximum(ref.scale, ref.product)  # NaN where either is
    # An FP32 running sum may overflow where the exact one does not, and inf - inf is NaN.
    overflows = largest.isfinite() & (largest + allowed >= FLT_MAX)
    measured = rounded.isfinite() & (largest + allowed < FLT_MAX)
    difference = (result.double() - ref.exact).abs()
    good = torch.where(
        largest.isfinite(),
        (difference <= allowed) | (overflows & ~result.isfinite()),
        _same_class(result, rounded),
    )
    wrong = int((~good).sum())
    example = ""
    if wrong:
        at = tuple((~good).nonzero()[0].tolist())
        example = (
            f"C{_place(at, ref)} is {result[at].item()}, exactly {ref.exact[at].item()}, "
            f"allowed error {allowed[at].item():.3g}"
        )
    difference, exact = difference[measured], ref.exact[measured]
    ratio = difference / ref.scale[measured]
    ratio = torch.where(difference == 0, 0.0, ratio)  # 0 / 0 is 0
    return Errors(_norm_ratio(difference, exact), _max(ratio), wrong, example)


def require(result: Tensor, ref: Reference, what: str = "the result", cw: float = 0.0) -> Errors:
    """errors(), or CheckError where any entry breaks the rule."""
    found = errors(result, ref, cw)
    if found.wrong:
        raise CheckError(
            f"{what} is wrong in {found.wrong} of {ref.exact.numel()} entries: {found.example}"
        )
    return found


def require_all(
    result: Tensor, refs: Sequence[Reference], what: str = "the result", cw: float = 0.0
) -> Errors:
    """require() for each of these, and the largest of their errors."""
    found = [require(result, ref, what, cw) for ref in refs]
    return Errors(max(e.rms for e in found), max(e.cw for e in found), 0, "")


def max_relative_difference(result: Tensor, other: Tensor) -> float:
    """max |result - other| / max |other|: the column that optimized-GEMM has, against cuBLAS."""
    return _norm_ratio(result.double() - other.double(), other.double(), ord=math.inf)


def _pick(t: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    t = t if rows is None else t[..., rows, :]
    return t if columns is None else t[..., columns]


def _place(at: tuple[int, ...], ref: Reference) -> list[int]:
    """Where in the whole result an entry of the reference is."""
    *batch, i, j = at
    i = i if ref.rows is None else ref.rows[i].item()
    return [*batch, i, j if ref.columns is None else ref.columns[j].item()]


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
