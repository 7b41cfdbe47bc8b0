"""The product ops: torch.mm, addmm, bmm, baddbmm, matmul and F.linear in FP32.

For each of torch.ops.sgemm's: what the CPU does, a fake, derivatives, a batching rule; then the
functions. On CUDA the ops are C++ (csrc/ops_matmul.cpp).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_sgemm import _autograd, _library, _precision
from torch_sgemm._autograd import Form

_sgemm = torch.ops.sgemm
_lib = torch.library.Library("sgemm", "FRAGMENT")

# ---- on the CPU: aten ----------------------------------------------------------------------------


def _checked(precision, **tensors):
    if precision not in _precision.CHOICES:
        _precision.checked(precision)
    for name, t in tensors.items():
        if t is not None and t.dtype != torch.float32:
            raise RuntimeError(f"{name} must be float32, got {str(t.dtype).removeprefix('torch.')}")
        if t is not None and t.device.type != "cpu":
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but another is on cpu and {name} "
                f"is on {t.device}"
            )


def _mm_cpu(input, mat2, *, precision="auto"):
    _checked(precision, input=input, mat2=mat2)
    return torch.mm(input, mat2)


def _addmm_cpu(input, mat1, mat2, *, beta=1.0, alpha=1.0, precision="auto"):
    _checked(precision, input=input, mat1=mat1, mat2=mat2)
    return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)


def _bmm_cpu(input, mat2, *, precision="auto"):
    _checked(precision, input=input, mat2=mat2)
    return torch.bmm(input, mat2)


def _baddbmm_cpu(input, batch1, batch2, *, beta=1.0, alpha=1.0, precision="auto"):
    _checked(precision, input=input, batch1=batch1, batch2=batch2)
    if beta == 0:
        input = torch.zeros((), dtype=input.dtype)  # torch's kernel multiplies it by beta
    return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)


def _linear_cpu(input, weight, bias=None, *, precision="auto"):
    _checked(precision, input=input, weight=weight, bias=bias)
    _linear_fake(input, weight, bias)  # says what is wrong
    return F.linear(input, weight, None if bias is None else bias.expand(weight.shape[0]))


def _out_cpu(compute):
    def into(*args, out, **kwargs):
        _checked("auto", out=out)
        result = compute(*args, **kwargs)
        if out.shape != result.shape:
            raise RuntimeError(f"out must have shape {tuple(result.shape)}, got {tuple(out.shape)}")
        if out.numel() and torch._debug_has_internal_overlap(out) == 1:
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a "
                "single memory location; pass out.clone() or a new tensor as out"
            )
        out.copy_(result)  # computed apart, so that out may be any of the arguments

    return into


# ---- fakes ---------------------------------------------------------------------------------------


def _mm_fake(input, mat2, *, precision="auto"):
    return _addmm_fake(None, input, mat2)


def _addmm_fake(input, mat1, mat2, *, beta=1.0, alpha=1.0, precision="auto"):
    _library.check_devices(mat1=mat1, mat2=mat2, input=input)
    torch._check(
        mat1.dim() == 2 and mat2.dim() == 2,
        lambda: f"mat1 and mat2 must be matrices, got {mat1.dim()}-D and {mat2.dim()}-D tensors",
    )
    torch._check(
        mat1.shape[1] == mat2.shape[0],
        lambda: (
            f"mat1 and mat2 shapes cannot be multiplied ({mat1.shape[0]}x{mat1.shape[1]} and "
            f"{mat2.shape[0]}x{mat2.shape[1]})"
        ),
    )
    return mat1.new_empty(mat1.shape[0], mat2.shape[1])


def _bmm_fake(input, mat2, *, precision="auto"):
    return _baddbmm_fake(None, input, mat2)


def _baddbmm_fake(input, batch1, batch2, *, beta=1.0, alpha=1.0, precision="auto"):
    _library.check_devices(batch1=batch1, batch2=batch2, input=input)
    torch._check(
        batch1.dim() == 3 and batch2.dim() == 3,
        lambda: f"batch1 and batch2 must be 3D tensors, got {batch1.dim()}-D and {batch2.dim()}-D",
    )
    torch._check(
        batch1.shape[0] == batch2.shape[0] and batch1.shape[2] == batch2.shape[1],
        lambda: (
            "Expected size for first two dimensions of batch2 tensor to be: "
            f"[{batch1.shape[0]}, {batch1.shape[2]}] but got: "
            f"[{batch2.shape[0]}, {batch2.shape[1]}]."
        ),
    )
    return batch1.new_empty(batch1.shape[0], batch1.shape[1], batch2.shape[2])


def _linear_fake(input, weight, bias=None, *, precision="auto"):
    _library.check_devices(input=input, weight=weight, bias=bias)
    torch._check(
        input.dim() >= 1, lambda: "input must have at least one dimension, got a 0-D tensor"
    )
    torch._check(
        weight.dim() == 2, lambda: f"weight must be a matrix, got a {weight.dim()}-D tensor"
    )
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: (
            f"mat1 and mat2 shapes cannot be multiplied ({math.prod(input.shape[:-1])}x"
            f"{input.shape[-1]} and {weight.shape[1]}x{weight.shape[0]})"
        ),
    )
    torch._check(
        bias is None
        or bias.dim() == 0
        or (bias.dim() == 1 and bias.shape[0] in (1, weight.shape[0])),
        lambda: f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}",
    )
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def _out_fake(fake):
    def into(*args, out, **kwargs):
        expected = fake(*args, **kwargs).shape
        torch._check(
            out.shape == expected,
            lambda: f"out must have shape {tuple(expected)}, got {tuple(out.shape)}",
        )
        _library.check_devices(input=args[-1], out=out)

    return into


# ---- derivatives ---------------------------------------------------------------------------------


def _product(a, b, alpha, precision):
    """alpha * (a @ b), of matrices or batches of them."""
    if alpha == 1:
        op = _sgemm.mm.default if a.dim() == 2 else _sgemm.bmm.default
        return op(a, b, precision=precision)
    op = _sgemm.addmm.default if a.dim() == 2 else _sgemm.baddbmm.default
    return op(a.new_empty(()), a, b, beta=0.0, alpha=alpha, precision=precision)


def _without_addend(op):
    def arguments(a, b, _c, _alpha, _beta, precision):
        return (a, b), {"precision": precision}

    form = Form(op, arguments, _product)

    def kernel(keys, input, mat2, *, precision="auto"):
        return _autograd.differentiable(form, keys, input, mat2, None, 1.0, 0.0, precision)

    return kernel


def _with_addend(op):
    def arguments(a, b, c, alpha, beta, precision):
        return (c, a, b), {"beta": beta, "alpha": alpha, "precision": precision}

    form = Form(op, arguments, _product)

    def kernel(keys, input, a, b, *, beta=1.0, alpha=1.0, precision="auto"):
        return _autograd.differentiable(form, keys, a, b, input, alpha, beta, precision)

    return kernel


def _rows(input):
    """All but the last dimension as one. With names for sizes: -1 is ambiguous where one is 0."""
    return input.reshape(math.prod(input.shape[:-1]), input.shape[-1])


def _linear_autograd(keys, input, weight, bias=None, *, precision="auto"):
    """By mm and addmm, which have derivatives; by linear itself where none are wanted."""
    if not _autograd.wants_derivatives(input, weight, bias) or input.dim() == 0:
        return _autograd.below(
            _sgemm.linear.default, keys, input, weight, bias, precision=precision
        )
    if weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        _linear_fake(input, weight, bias)  # says what is wrong
    rows = _rows(input)
    if bias is None:
        product = _sgemm.mm.default(rows, weight.t(), precision=precision)
    else:
        product = _sgemm.addmm.default(bias, rows, weight.t(), precision=precision)
    return product.reshape(*input.shape[:-1], weight.shape[0])


# ---- vmap ----------------------------------------------------------------------------------------


def _batch_first(t, dim, size):
    """Its batch dimension first; as many times the same where it has none."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _addend(t, dim, size, result_dim):
    """c with the batch first and as many dimensions as the result, so that it broadcasts to it."""
    t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
    return t.reshape(t.shape[0], *(1,) * (result_dim + 1 - t.dim()), *t.shape[1:])


def _flat(t):
    """Two batch dimensions as one."""
    return t.reshape(t.shape[0] * t.shape[1], *t.shape[2:])


def _mm_batched(info, in_dims, input, mat2, *, precision="auto"):
    a, b = (
        _batch_first(t, d, info.batch_size) for t, d in zip((input, mat2), in_dims[:2], strict=True)
    )
    return _sgemm.bmm.default(a, b, precision=precision), 0


def _addmm_batched(info, in_dims, input, mat1, mat2, *, beta=1.0, alpha=1.0, precision="auto"):
    a, b = (
        _batch_first(t, d, info.batch_size) for t, d in zip((mat1, mat2), in_dims[1:3], strict=True)
    )
    c = _addend(input, in_dims[0], info.batch_size, 2)
    return _sgemm.baddbmm.default(c, a, b, beta=beta, alpha=alpha, precision=precision), 0


def _bmm_batched(info, in_dims, input, mat2, *, precision="auto"):
    a, b = (
        _batch_first(t, d, info.batch_size) for t, d in zip((input, mat2), in_dims[:2], strict=True)
    )
    product = _sgemm.bmm.default(_flat(a), _flat(b), precision=precision)
    return product.reshape(*a.shape[:2], *product.shape[1:]), 0


def _baddbmm_batched(
    info, in_dims, input, batch1, batch2, *, beta=1.0, alpha=1.0, precision="auto"
):
    a, b = (
        _batch_first(t, d, info.batch_size)
        for t, d in zip((batch1, batch2), in_dims[1:3], strict=True)
    )
    c = _addend(input, in_dims[0], info.batch_size, 3)
    c = _flat(c.expand(*a.shape[:2], *c.shape[2:]))
    product = _sgemm.baddbmm.default(
        c, _flat(a), _flat(b), beta=beta, alpha=alpha, precision=precision
    )
    return product.reshape(*a.shape[:2], *product.shape[1:]), 0


def _linear_batched(info, in_dims, input, weight, bias=None, *, precision="auto"):
    input_dim, weight_dim, bias_dim = (*in_dims, None)[:3]
    if weight_dim is None and bias_dim is None:
        return _sgemm.linear.default(
            input.movedim(input_dim, 0), weight, bias, precision=precision
        ), 0
    x = _batch_first(input, input_dim, info.batch_size)
    w = _batch_first(weight, weight_dim, info.batch_size)
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    if bias is None:
        product = _sgemm.bmm.default(rows, w.mT, precision=precision)
    else:
        c = _addend(bias, bias_dim, info.batch_size, 2)
        product = _sgemm.baddbmm.default(c, rows, w.mT, precision=precision)
    return product.reshape(*x.shape[:-1], product.shape[-1]), 0


# ---- registration --------------------------------------------------------------------------------

for _name, _cpu, _fake, _kernel, _rule in (
    ("mm", _mm_cpu, _mm_fake, _without_addend(_sgemm.mm.default), _mm_batched),
    ("addmm", _addmm_cpu, _addmm_fake, _with_addend(_sgemm.addmm.default), _addmm_batched),
    ("bmm", _bmm_cpu, _bmm_fake, _without_addend(_sgemm.bmm.default), _bmm_batched),
    (
        "baddbmm",
        _baddbmm_cpu,
        _baddbmm_fake,
        _with_addend(_sgemm.baddbmm.default),
        _baddbmm_batched,
    ),
    ("linear", _linear_cpu, _linear_fake, _linear_autograd, _linear_batched),
):
    _lib.impl(_name, _cpu, "CPU")
    _lib.impl(f"{_name}.out", _out_cpu(_cpu), "CPU")
    torch.library.register_fake(f"sgemm::{_name}", _fake, lib=_lib)
    torch.library.register_fake(f"sgemm::{_name}.out", _out_fake(_fake), lib=_lib)
    _lib.impl(_name, _kernel, "Autograd", with_keyset=True)
    _autograd.register_out(_lib, _name)
    torch.library.register_vmap(f"sgemm::{_name}", _rule, lib=_lib)
    _autograd.register_autocast(_lib, _name)

# ---- eager CUDA, without the dispatcher's detours ------------------------------------------------

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _is_ours(t: Tensor) -> bool:
    return type(t) in _PLAIN and t.is_cuda and t.dtype is torch.float32


def _is_plain(a: Tensor, b: Tensor, c: Tensor | None = None) -> bool:
    """Whether nothing but autograd may have an interest in a call: no compiler, transform,
    autocast, subclass; and all is float32 on CUDA."""
    return not torch.compiler.is_compiling() and (
        _is_ours(a)
        and _is_ours(b)
        and (c is None or _is_ours(c))
        and not _autograd.is_transformed()
        and not _autograd.is_autocast()
    )


def _requires_grad(a: Tensor, b: Tensor, c: Tensor | None = None) -> bool:
    return torch.is_grad_enabled() and (
        a.requires_grad or b.requires_grad or (c is not None and c.requires_grad)
    )


class _EagerGemm(_autograd.Function):
    """As _autograd._Gemm, of c in the result's shape, in plain eager training."""

    @staticmethod
    def forward(ctx, a, b, c, beta, alpha, precision):
        needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.given = beta, alpha, precision
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        return _sgemm._gemm.default(a, b, c, beta, alpha, precision)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        beta, alpha, precision = ctx.given
        needs_a, needs_b, needs_c, *_ = ctx.needs_input_grad
        return (
            _eager_product(grad, b.mT, alpha, precision) if needs_a else None,
            _eager_product(a.mT, grad, alpha, precision) if needs_b else None,
            (grad if beta == 1 else beta * grad) if needs_c else None,
            None,
            None,
            None,
        )


class _EagerLinear(_autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, precision):
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.given = None if bias is None else bias.shape, precision
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        return _sgemm._linear.default(input, weight, bias, precision)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        bias_shape, precision = ctx.given
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        flat = grad.dim() == 2
        rows = grad if flat else _rows(grad)
        grad_input = grad_weight = grad_bias = None
        if needs_input:
            grad_input = _eager_product(rows, weight, 1.0, precision)
            if not flat:
                grad_input = grad_input.reshape(*grad.shape[:-1], weight.shape[1])
        if needs_weight:
            of = input if flat else _rows(input)
            grad_weight = _eager_product(rows.t(), of, 1.0, precision)
        if needs_bias:
            grad_bias = rows.sum_to_size(bias_shape)
        return grad_input, grad_weight, grad_bias, None


def _eager_product(a, b, alpha, precision):
    if torch.is_grad_enabled() or not _is_plain(a, b):  # a second derivative, or a batch of them
        return _product(a, b, alpha, precision)
    return _sgemm._gemm.default(a, b, None, 0.0, alpha, precision)


def _gemm(a, b, c, beta, alpha, precision):
    """What mm, addmm, bmm and baddbmm do in plain eager mode."""
    if not _requires_grad(a, b, c):
        return _sgemm._gemm.default(a, b, c, beta, alpha, precision)
    if c is not None and a.dim() == b.dim() and c.dim() <= a.dim():
        c = c.expand(*a.shape[:-1], b.shape[-1])
    return _EagerGemm.apply(a, b, c, beta, alpha, precision)


# ---- the functions -------------------------------------------------------------------------------


def mm(
    input: Tensor, mat2: Tensor, *, precision: str | None = None, out: Tensor | None = None
) -> Tensor:
    """input @ mat2. Equivalent to torch.mm.

    Args:
        input: (M, K), float32, any strides.
        mat2: (K, N), float32, on input's device, any strides.
        precision: "ieee", "auto", or None for what ``torch_sgemm.precision`` sets.
        out: (M, N), float32, any strides that do not overlap. Not differentiable.

    Returns:
        out, or a new contiguous (M, N) tensor, differentiable in both any number of times.

    Raises:
        RuntimeError: for other dtypes, dimensions, shapes or devices, in torch's words; where out
            overlaps itself, or is given and a gradient is wanted.
        ValueError: for another precision.
    """
    precision = _precision.resolved(precision)
    if out is not None:
        _sgemm.mm.out(input, mat2, precision=precision, out=out)
        return out
    if _is_plain(input, mat2) and input.dim() == 2:
        return _gemm(input, mat2, None, 0.0, 1.0, precision)
    return _sgemm.mm.default(input, mat2, precision=precision)


def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    precision: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """beta * input + alpha * (mat1 @ mat2). Equivalent to torch.addmm.

    Args:
        input: broadcastable to (M, N), float32, any strides; not read where beta is 0.
        mat1: (M, K), float32, any strides.
        mat2: (K, N), float32, on mat1's device, any strides.
        beta, alpha: where alpha is 0, or K is 0, neither mat1 nor mat2 is read.
        precision: "ieee", "auto", or None for what ``torch_sgemm.precision`` sets.
        out: (M, N), float32, any strides that do not overlap; it may be input. Not differentiable.

    Returns, raises: as mm.
    """
    precision = _precision.resolved(precision)
    if out is not None:
        _sgemm.addmm.out(input, mat1, mat2, beta=beta, alpha=alpha, precision=precision, out=out)
        return out
    if _is_plain(mat1, mat2, input) and mat1.dim() == 2:
        return _gemm(mat1, mat2, input, beta, alpha, precision)
    return _sgemm.addmm.default(input, mat1, mat2, beta=beta, alpha=alpha, precision=precision)


def bmm(
    input: Tensor, mat2: Tensor, *, precision: str | None = None, out: Tensor | None = None
) -> Tensor:
    """input @ mat2 of each of a batch. Equivalent to torch.bmm.

    Args:
        input: (B, M, K), float32, any strides, 0 among them.
        mat2: (B, K, N), float32, on input's device, any strides.
        precision: "ieee", "auto", or None for what ``torch_sgemm.precision`` sets.
        out: (B, M, N), float32, any strides that do not overlap. Not differentiable.

    Returns, raises: as mm.
    """
    precision = _precision.resolved(precision)
    if out is not None:
        _sgemm.bmm.out(input, mat2, precision=precision, out=out)
        return out
    if _is_plain(input, mat2) and input.dim() == 3:
        return _gemm(input, mat2, None, 0.0, 1.0, precision)
    return _sgemm.bmm.default(input, mat2, precision=precision)


def baddbmm(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    precision: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """beta * input + alpha * (batch1 @ batch2) of each of a batch. Equivalent to torch.baddbmm.

    Args:
        input: broadcastable to (B, M, N), float32, any strides; not read where beta is 0.
        batch1: (B, M, K), float32, any strides.
        batch2: (B, K, N), float32, on batch1's device, any strides.
        beta, alpha, precision, out: as addmm's.

    Returns, raises: as mm.
    """
    precision = _precision.resolved(precision)
    if out is not None:
        _sgemm.baddbmm.out(
            input, batch1, batch2, beta=beta, alpha=alpha, precision=precision, out=out
        )
        return out
    if _is_plain(batch1, batch2, input) and batch1.dim() == 3:
        return _gemm(batch1, batch2, input, beta, alpha, precision)
    return _sgemm.baddbmm.default(
        input, batch1, batch2, beta=beta, alpha=alpha, precision=precision
    )


def _not_ours(precision: str | None, *tensors: Tensor | None) -> bool:
    """Whether a drop-in function leaves a call to torch: another dtype, or autocast without a
    precision of the call's own."""
    if precision is None and _autograd.is_autocast(tensors[0].device.type):
        return True
    return any(t is not None and t.dtype != torch.float32 for t in tensors)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, precision: str | None = None
) -> Tensor:
    """input @ weight.T + bias. Equivalent to torch.nn.functional.linear.

    Args:
        input: (..., in_features), any strides.
        weight: (out_features, in_features), or (in_features,) for a result without the last
            dimension; any strides.
        bias: (out_features,) or ().
        precision: "ieee", "auto", or None for what ``torch_sgemm.precision`` sets.

    Other dtypes than float32 are torch's own linear; so is a call under autocast, unless it has a
    precision: then it stays in FP32.

    Returns:
        A new contiguous (..., out_features) tensor, differentiable in all three.

    Raises:
        RuntimeError: for shapes or devices that do not fit, in torch's words.
        ValueError: for another precision.
    """
    if _is_plain(input, weight, bias) and weight.dim() == 2:
        precision = _precision.resolved(precision)
        if _requires_grad(input, weight, bias):
            return _EagerLinear.apply(input, weight, bias, precision)
        return _sgemm._linear.default(input, weight, bias, precision)
    if _not_ours(precision, input, weight, bias):
        return F.linear(input, weight, bias)
    if weight.dim() == 1:
        product = matmul(input, weight, precision=precision)
        return product if bias is None else product + bias
    precision = _precision.resolved(precision)
    return _sgemm.linear.default(input, weight, bias, precision=precision)


def matmul(
    input: Tensor, other: Tensor, *, precision: str | None = None, out: Tensor | None = None
) -> Tensor:
    """input @ other with any number of dimensions. Equivalent to torch.matmul.

    Args:
        input: (K,) or (..., M, K), any strides.
        other: (K,) or (..., K, N), any strides. Leading dimensions broadcast.
        precision: "ieee", "auto", or None for what ``torch_sgemm.precision`` sets.
        out: of the result's shape. Not differentiable.

    Other dtypes than float32 are torch's own matmul; so is a call under autocast, unless it has a
    precision: then it stays in FP32. Nothing is copied but batches that broadcast over more than
    one dimension.

    Returns:
        out, or a new tensor, differentiable in both.

    Raises:
        RuntimeError: for shapes or devices that do not fit, in torch's words.
        ValueError: for another precision.
    """
    if _not_ours(precision, input, other) or 0 in (input.dim(), other.dim()):
        if out is None:
            return torch.matmul(input, other)
        return torch.matmul(input, other, out=out)
    if out is not None:
        if input.dim() == other.dim() == 2:
            return mm(input, other, precision=precision, out=out)
        if _requires_grad(input, other, out):
            raise RuntimeError(
                "matmul: functions with out=... arguments don't support automatic differentiation, "
                "but one of the arguments requires grad; leave out= away"
            )
        result = matmul(input, other, precision=precision)
        if out.shape != result.shape:
            raise RuntimeError(f"out must have shape {tuple(result.shape)}, got {tuple(out.shape)}")
        return out.copy_(result)
    if other.dim() == 1:
        if input.dim() == 1:
            return mm(input.unsqueeze(0), other.unsqueeze(1), precision=precision).reshape(())
        return linear(input, other.unsqueeze(0), precision=_precision.resolved(precision)).squeeze(
            -1
        )
    if other.dim() == 2:
        if input.dim() == 2:
            return mm(input, other, precision=precision)
        return linear(input, other.mT, precision=_precision.resolved(precision))
    if input.dim() == 1:
        return matmul(input.unsqueeze(0), other, precision=precision).squeeze(-2)
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    a, b = (
        t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:])
        for t in (input, other)
    )
    return bmm(a, b, precision=precision).reshape(*batch, input.shape[-2], other.shape[-1])
