"""The matrices of the accuracy suite: every kind of data that FP32 products have to be right for.

A case draws its inputs from a seed of its own, so that it is the same alone and among the others.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import check
import torch
from torch import Tensor
from torch.nn import functional

Pair = tuple[Tensor, Tensor]

INF, NAN = float("inf"), float("nan")
DEPTHS = (1, 2, 3, 7, 12, 31, 64, 256, 1024, 4096, 16384, 65536)  # K of the cases over K
SPRINKLED = 8  # entries that are made infinite or NaN


class Draw:
    """Random tensors from one seed."""

    def __init__(self, name: str, device: str):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))

    def randn(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def rand(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, device=self.device)

    def integers(self, bound: int, *size: int) -> Tensor:
        """From -bound to bound."""
        shape = {"size": size, "generator": self.generator, "device": self.device}
        return torch.randint(-bound, bound + 1, **shape).float()

    def powers(self, exponent: float, *size: int) -> Tensor:
        """2^U[-exponent, exponent]."""
        return torch.exp2(exponent * (2 * self.rand(*size) - 1))

    def sprinkled(self, t: Tensor, value: float, sign: bool = True) -> Tensor:
        """t with a few entries that are this value, half of them with a minus."""
        places = torch.randint(
            t.numel(), (SPRINKLED,), generator=self.generator, device=self.device
        )
        values = torch.full((SPRINKLED,), value, device=self.device)
        values[::2] *= -1
        return t.contiguous().flatten().index_put((places,), values).view(t.shape)


@dataclass(frozen=True)
class Case:
    name: str
    M: int
    N: int
    K: int
    make: Callable[[Draw, int, int, int], Pair]
    exact: bool = False  # every sum is an integer below 2^24, whatever its order

    def inputs(self, device: str) -> Pair:
        return self.make(Draw(self.name, device), self.M, self.N, self.K)


def cases(size: int) -> list[Case]:
    """All of them, with M = N = K = size where K is not what a case is about."""
    found = [Case(name, size, size, size, make) for name, make in MAKERS.items()]
    found += [Case(n, size, size, size, make, exact=True) for n, make in INTEGERS.items()]
    found += [Case("11-bit integers", size, size, 4, integers(2047, 2047), exact=True)]
    for K in DEPTHS:
        side = size if 8 * size >= K else size // 4
        found.append(Case(f"randn, K = {K}", side, side, K, randn))
    return found


# ---- distributions -------------------------------------------------------------------------------


def randn(draw: Draw, M: int, N: int, K: int) -> Pair:
    return draw.randn(M, K), draw.randn(K, N)


def uniform(draw: Draw, M: int, N: int, K: int) -> Pair:
    return draw.rand(M, K), draw.rand(K, N)


def centred(draw: Draw, M: int, N: int, K: int) -> Pair:
    return 2 * draw.rand(M, K) - 1, 2 * draw.rand(K, N) - 1


def phi(exponent: float) -> Callable[[Draw, int, int, int], Pair]:
    """(U - 0.5) exp(phi randn): the wider, the larger phi."""

    def one(draw: Draw, *size: int) -> Tensor:
        return (draw.rand(*size) - 0.5) * torch.exp(exponent * draw.randn(*size))

    return lambda draw, M, N, K: (one(draw, M, K), one(draw, K, N))


def integers(of_a: int, of_b: int) -> Callable[[Draw, int, int, int], Pair]:
    return lambda draw, M, N, K: (draw.integers(of_a, M, K), draw.integers(of_b, K, N))


# ---- scales --------------------------------------------------------------------------------------


def scaled(draw: Draw, M: int, N: int, K: int) -> Pair:
    return draw.randn(M, K) * draw.powers(60, M, 1), draw.randn(K, N) * draw.powers(60, 1, N)


def wide(draw: Draw, M: int, N: int, K: int) -> Pair:
    return draw.randn(M, K) * draw.powers(120, M, K), draw.randn(K, N)


def wide_for_nothing(draw: Draw, M: int, N: int, K: int) -> Pair:
    """A's columns and B's rows undo one another: all products count, however small the factor."""
    scale = torch.exp2((240 * draw.rand(K) - 120).round())
    return draw.randn(M, K) * scale, draw.randn(K, N) / scale[:, None]


def slope(count: int, device: str) -> Tensor:
    """1 down to 2^-40."""
    return torch.exp2(torch.linspace(0, -40, count, device=device))


def graded_outside(draw: Draw, M: int, N: int, K: int) -> Pair:
    rows, columns = slope(M, draw.device), slope(N, draw.device)
    return draw.randn(M, K) * rows[:, None], draw.randn(K, N) * columns


def graded_inside(draw: Draw, M: int, N: int, K: int) -> Pair:
    along = slope(K, draw.device)
    return draw.randn(M, K) * along, draw.randn(K, N) * along[:, None]


def few_huge(draw: Draw, M: int, N: int, K: int) -> Pair:
    """About two entries in each row of A and column of B are 2^20 times the others."""

    def one(*size: int) -> Tensor:
        return draw.randn(*size) * torch.where(draw.rand(*size) < 2 / K, 2.0**20, 1.0)

    return one(M, K), one(K, N)


def cancelling(draw: Draw, M: int, N: int, K: int) -> Pair:
    """The second half of each sum takes away the first but for 2^-12 of it."""
    half = (K + 1) // 2
    a, b = draw.randn(M, half), draw.randn(half, N)
    back = -b * (1 + 2.0**-12 * draw.randn(half, N))
    return torch.cat([a, a], 1)[:, :K].contiguous(), torch.cat([b, back])[:K]


# ---- the ends of the range -----------------------------------------------------------------------


def subnormal_inputs(draw: Draw, M: int, N: int, K: int) -> Pair:
    return draw.randn(M, K) * 2.0**-130, draw.randn(K, N) * 2.0**10


def subnormal_results(draw: Draw, M: int, N: int, K: int) -> Pair:
    return draw.randn(M, K) * 2.0**-70, draw.randn(K, N) * 2.0**-75


def near_max(positive: bool) -> Callable[[Draw, int, int, int], Pair]:
    """Half of the entries of |A| |B| are above FLT_MAX."""

    def make(draw: Draw, M: int, N: int, K: int) -> Pair:
        a, b = draw.rand(M, K), draw.rand(K, N)
        if not positive:
            a, b = 2 * a - 1, 2 * b - 1
        return a * 2.0**64, b * (4 * check.FLT_MAX / K / 2.0**64)

    return make


def products_over_max(draw: Draw, M: int, N: int, K: int) -> Pair:
    return draw.randn(M, K) * 2.0**66, draw.randn(K, N) * 2.0**66


def non_finite(
    value: float, in_a: bool, in_b: bool, base: Callable = randn
) -> Callable[[Draw, int, int, int], Pair]:
    def make(draw: Draw, M: int, N: int, K: int) -> Pair:
        a, b = base(draw, M, N, K)
        return (
            draw.sprinkled(a, value) if in_a else a,
            draw.sprinkled(b, value) if in_b else b,
        )

    return make


def zeros_in_b(draw: Draw, M: int, N: int, K: int) -> Pair:
    return draw.randn(M, K), draw.randn(K, N).relu()


# ---- as they come up -----------------------------------------------------------------------------


def weights(draw: Draw, K: int, N: int) -> Tensor:
    return draw.randn(K, N) / K**0.5


def softmax(draw: Draw, M: int, N: int, K: int) -> Pair:
    """Attention: probabilities times values."""
    return functional.softmax(3 * draw.randn(M, K), dim=-1), draw.randn(K, N)


def gelu(draw: Draw, M: int, N: int, K: int) -> Pair:
    """The second half of an MLP."""
    return functional.gelu(draw.randn(M, K)), weights(draw, K, N)


def layer_norm(draw: Draw, M: int, N: int, K: int) -> Pair:
    """Some channels are larger than the others."""
    channels = torch.exp(draw.randn(K))
    return functional.layer_norm(channels * draw.randn(M, K), (K,)), weights(draw, K, N)


def gradients(draw: Draw, M: int, N: int, K: int) -> Pair:
    """Those of a weight: small, and of another size in each token."""
    tokens = 1e-5 * torch.exp(2 * draw.randn(K))
    return draw.randn(M, K) * tokens, functional.gelu(draw.randn(K, N))


def bf16_weights(draw: Draw, M: int, N: int, K: int) -> Pair:
    return draw.randn(M, K), weights(draw, K, N).bfloat16().float()


def embeddings(draw: Draw, M: int, N: int, K: int) -> Pair:
    """Hidden states times a table of embeddings, turned; some tokens are padding."""
    table = 0.02 * draw.randn(N, K) * (draw.rand(N, 1) > 0.05)
    return functional.layer_norm(draw.randn(M, K), (K,)), table.mT


MAKERS = {
    "randn": randn,
    "U[0, 1)": uniform,
    "U[-1, 1)": centred,
    **{f"phi = {exponent:g}": phi(exponent) for exponent in (0, 0.5, 1, 2, 4)},
    "rows of A, columns of B by 2^U[-60, 60]": scaled,
    "entries of A by 2^U[-120, 120]": wide,
    "columns of A by 2^U[-120, 120], rows of B back": wide_for_nothing,
    "graded rows of A, columns of B": graded_outside,
    "graded columns of A, rows of B": graded_inside,
    "few huge entries": few_huge,
    "cancelling sums": cancelling,
    "subnormal inputs": subnormal_inputs,
    "subnormal results": subnormal_results,
    "near FLT_MAX": near_max(positive=False),
    "near FLT_MAX, all positive": near_max(positive=True),
    "products over FLT_MAX": products_over_max,
    "Inf in A": non_finite(INF, True, False),
    "Inf in B": non_finite(INF, False, True),
    "Inf in A and B": non_finite(INF, True, True),
    "NaN in A": non_finite(NAN, True, False),
    "NaN in B": non_finite(NAN, False, True),
    "NaN in A and B": non_finite(NAN, True, True),
    "Inf in A, zeros in B": non_finite(INF, True, False, zeros_in_b),
    "Inf in B, entries of A by 2^U[-120, 120]": non_finite(INF, False, True, wide),
    "softmax probabilities": softmax,
    "GELU outputs": gelu,
    "LayerNorm outputs": layer_norm,
    "gradients": gradients,
    "weights rounded to BF16": bf16_weights,
    "embeddings": embeddings,
}
INTEGERS = {
    "11-bit integers, and -1, 0, 1": integers(2047, 1),
    "-1, 0, 1, and 11-bit integers": integers(1, 2047),
    "7-bit integers": integers(64, 64),
}
