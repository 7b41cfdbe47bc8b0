"""The ladder's ops: typed wrappers, fakes, derivatives."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from torch_sgemm import _autograd, _library


class StageOp(Protocol):
    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor: ...


_DOC = """alpha * (a @ b) + beta * c, computed by {kernel}. Equivalent to torch.addmm(c, a, b).

Args:
    a: (M, K), float32. Rows whose elements are adjacent are used in place, whatever lies between
        two rows (a slice, a padded matrix); any other layout, a transposed view for one, is copied
        first.
    b: (K, N), float32, on a's device; as a.
    c: broadcastable to (M, N), float32, any strides; read in place, and not at all where beta is 0.
    alpha, beta: where alpha is 0, or K is 0, the result is beta * c, whatever a and b hold.
    out: (M, N), float32, any strides that do not overlap; it may be c itself. Written through a
        copy where its rows' elements are not adjacent. Not differentiable.

Returns:
    out, or a new contiguous (M, N) tensor. Differentiable in a, b and c, any number of times, in
    reverse and forward mode.

Raises:
    RuntimeError: for other dtypes, dimensions, shapes or devices; where out overlaps a or b, or
        lies between their elements; where out is given and a gradient is wanted; where M, N or K
        is over 2,147,482,623, or alpha or beta beyond float32. On CUDA also where this build has
        no kernels for the device.
"""


def _fake(a, b, c=None, *, alpha=1.0, beta=0.0):
    _library.check_devices(a=a, b=b, c=c)
    torch._check(
        a.dim() == 2 and b.dim() == 2,
        lambda: f"a and b must be matrices, got {a.dim()}-D and {b.dim()}-D",
    )
    torch._check(
        a.shape[1] == b.shape[0],
        lambda: (
            f"a and b shapes cannot be multiplied: a is {tuple(a.shape)} and b is {tuple(b.shape)}"
        ),
    )
    return a.new_empty(a.shape[0], b.shape[1])


def _fake_out(a, b, c=None, *, alpha=1.0, beta=0.0, out):
    expected = _fake(a, b, c).shape
    _library.check_devices(a=a, out=out)
    torch._check(
        out.shape == expected,
        lambda: f"out must have shape {tuple(expected)}, got {tuple(out.shape)}",
    )


def _wrapper(name: str, kernel: str) -> StageOp:
    packet = getattr(torch.ops.sgemm, name)

    def call(a, b, c, alpha, beta, out):
        if out is None:
            return packet.default(a, b, c, alpha=alpha, beta=beta)
        packet.out(a, b, c, alpha=alpha, beta=beta, out=out)
        return out

    def op(a, b, c=None, *, alpha=1.0, beta=0.0, out=None):
        if torch.compiler.is_compiling():  # whose error texts are better without a handler
            return call(a, b, c, alpha, beta, out)
        try:
            return call(a, b, c, alpha, beta, out)
        except RuntimeError:
            _autograd.let_signal_handlers_run()  # inference tensors pass by the Autograd key
            raise

    op.__name__ = op.__qualname__ = name
    op.__doc__ = _DOC.format(kernel=kernel)
    return op


_lib = torch.library.Library("sgemm", "FRAGMENT")
for _name in (*_library.STAGES, "cublas"):
    torch.library.register_fake(f"sgemm::{_name}", _fake, lib=_lib)
    torch.library.register_fake(f"sgemm::{_name}.out", _fake_out, lib=_lib)
    _autograd.register_stage(_lib, _name)

#: The stages in the order of the ladder, by name. ``STAGES["stage3"](a, b)`` is
#: ``torch.ops.sgemm.stage3(a, b)`` with an ``out`` argument, a type and a docstring.
STAGES: Mapping[str, StageOp] = MappingProxyType(
    {name: _wrapper(name, f"the ladder's {name}") for name in _library.STAGES}
)

#: The reference: the same signature, computed by cublasSgemm in FP32, whatever torch's TF32
#: settings. CUDA only.
cublas: StageOp = _wrapper("cublas", "cublasSgemm")
