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

_NOTHING = 2.0**-150  # the largest number that is 0 in float32


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
    _size(2, input=input, mat2=mat2)  # says what is wrong, here and below
    return torch.mm(input, mat2)


def _addmm_cpu(input, mat1, mat2, *, beta=1.0, alpha=1.0, precision="auto"):
    _checked(precision, input=input, mat1=mat1, mat2=mat2)
    _size(2, mat1=mat1, mat2=mat2, input=input)
    return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)


def _bmm_cpu(input, mat2, *, precision="auto"):
    _checked(precision, input=input, mat2=mat2)
    _size(3, input=input, mat2=mat2)
    return torch.bmm(input, mat2)


def _baddbmm_cpu(input, batch1, batch2, *, beta=1.0, alpha=1.0, precision="auto"):
    _checked(precision, input=input, batch1=batch1, batch2=batch2)
    _size(3, batch1=batch1, batch2=batch2, input=input)
    # What is not to be read torch's kernel multiplies by 0.
    if abs(alpha) <= _NOTHING:
        batch1, batch2 = batch1[..., :0], batch2[:, :0]
    if abs(beta) <= _NOTHING:
        input = input.new_zeros(())
    return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)


def _linear_cpu(input, weight, bias=None, *, precision="auto"):
    _checked(precision, input=input, weight=weight, bias=bias)
    _linear_size(input, weight, bias)
    return F.linear(input, weight, None if bias is None else bias.expand(weight.shape[0]))


def _gemm_cpu(a, b, c, beta, alpha, precision):
    if c is None and alpha == 1:
        return (_mm_cpu if a.dim() == 2 else _bmm_cpu)(a, b, precision=precision)
    if c is None:
        c, beta = a.new_zeros(()), 0.0
    compute = _addmm_cpu if a.dim() == 2 else _baddbmm_cpu
    return compute(c, a, b, beta=beta, alpha=alpha, precision=precision)


def _out_cpu(compute):
    def into(*args, out, **kwargs):
        _checked("auto", out=out)
        result = compute(*args, **kwargs)
        if out.shape != result.shape:
            raise RuntimeError(f"out must have shape {tuple(result.shape)}, got {tuple(out.shape)}")
        _sgemm._check_apart(out)
        out.copy_(result)  # computed apart, so that out may be any of the arguments

    return into


# ---- fakes ---------------------------------------------------------------------------------------


def _size(dim, **tensors):
    """Of a product of matrices (dim 2) or of batches of them (3), and what is added to it, all by
    name; or what does not fit."""
    _library.check_devices(**tensors)
    (a_name, a), (b_name, b), *addend = tensors.items()
    kind = "a matrix" if dim == 2 else "a 3D tensor"

    def misfit():
        if dim == 2:
            by = (f"{t.shape[0]}x{t.shape[1]}" for t in (a, b))
            return f"mat1 and mat2 shapes cannot be multiplied ({' and '.join(by)})"
        return (
            "Expected size for first two dimensions of batch2 tensor to be: "
            f"[{a.shape[0]}, {a.shape[2]}] but got: [{b.shape[0]}, {b.shape[1]}]."
        )

    for name, t in ((a_name, a), (b_name, b)):
        shape = tuple(t.shape)
        text = f"{name} must be {kind}, got {t.dim()}-D tensor of shape {shape}"
        torch._check(t.dim() == dim, lambda text=text: text)
    torch._check(a.shape[-1] == b.shape[-2], misfit)
    torch._check(dim == 2 or a.shape[0] == b.shape[0], misfit)
    size = (*a.shape[:-1], b.shape[-1])
    for name, c in addend:
        text = f"{name} must be expandable to {size}, got shape {tuple(c.shape)}"
        torch._check(_autograd.broadcasts(c.shape, size), lambda text=text: text)
    return size


def _mm_fake(input, mat2, *, precision="auto"):
    return input.new_empty(_size(2, input=input, mat2=mat2))


def _addmm_fake(input, mat1, mat2, *, beta=1.0, alpha=1.0, precision="auto"):
    return mat1.new_empty(_size(2, mat1=mat1, mat2=mat2, input=input))


def _bmm_fake(input, mat2, *, precision="auto"):
    return input.new_empty(_size(3, input=input, mat2=mat2))


def _baddbmm_fake(input, batch1, batch2, *, beta=1.0, alpha=1.0, precision="auto"):
    return batch1.new_empty(_size(3, batch1=batch1, batch2=batch2, input=input))


def _linear_size(input, weight, bias):
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
    return (*input.shape[:-1], weight.shape[0])


def _linear_fake(input, weight, bias=None, *, precision="auto"):
    return input.new_empty(_linear_size(input, weight, bias))


def _out_fake(fake):
    def into(*args, out, **kwargs):
        expected = fake(*args, **kwargs).shape
        torch._check(
            out.shape == expected,
            lambda: f"out must have shape {tuple(expected)}, got {tuple(out.shape)}",
        )
        _library.check_devices(input=args[0], out=out)

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
    def compute(keys, a, b, _c, _beta, _alpha, precision):
        return _autograd.below(op, keys, a, b, precision=precision)

    form = Form(compute, _product)

    def kernel(keys, input, mat2, *, precision="auto"):
        return _autograd.differentiable(form, keys, input, mat2, None, 0.0, 1.0, precision)

    return kernel


def _with_addend(op):
    def compute(keys, a, b, c, beta, alpha, precision):
        return _autograd.below(op, keys, c, a, b, beta=beta, alpha=alpha, precision=precision)

    form = Form(compute, _product)

    def kernel(keys, input, a, b, *, beta=1.0, alpha=1.0, precision="auto"):
        return _autograd.differentiable(form, keys, a, b, input, beta, alpha, precision)

    return kernel


def _rows(input):
    """All but the last dimension as one. With names for sizes: -1 is ambiguous where one is 0."""
    return input.reshape(math.prod(input.shape[:-1]), input.shape[-1])


def _linear_autograd(keys, input, weight, bias=None, *, precision="auto"):
    """By mm and addmm, which have derivatives; by linear itself where none are wanted."""
    if not _autograd.wants_derivatives(input, weight, bias):
        return _autograd.below(
            _sgemm.linear.default, keys, input, weight, bias, precision=precision
        )
    _linear_size(input, weight, bias)  # says what is wrong
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


def _addend(t, dim, result_dim):
    """c with the batch first and as many dimensions as the result, so that it broadcasts to it."""
    t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
    return t.reshape(t.shape[0], *(1,) * (result_dim + 1 - t.dim()), *t.shape[1:])


def _flat(t):
    """Two batch dimensions as one."""
    return t.reshape(t.shape[0] * t.shape[1], *t.shape[2:])


def _mm_batched(info, in_dims, input, mat2, *, precision="auto"):
    input_dim, mat2_dim, *_ = in_dims
    if mat2_dim is None and input.dim() == 3:  # all rows are rows of one matrix
        return _sgemm.linear.default(input.movedim(input_dim, 0), mat2.mT, precision=precision), 0
    if input_dim is None and mat2.dim() == 3:
        turned = mat2.movedim(mat2_dim, 0).mT
        return _sgemm.linear.default(turned, input, precision=precision).mT, 0
    a = _batch_first(input, input_dim, info.batch_size)
    b = _batch_first(mat2, mat2_dim, info.batch_size)
    return _sgemm.bmm.default(a, b, precision=precision), 0


def _addmm_batched(info, in_dims, input, mat1, mat2, *, beta=1.0, alpha=1.0, precision="auto"):
    input_dim, mat1_dim, mat2_dim, *_ = in_dims
    is_bias = input_dim is None and input.dim() < 2 and alpha == beta == 1
    if mat2_dim is None and is_bias and mat1.dim() == 3:
        rows = mat1.movedim(mat1_dim, 0)
        return _sgemm.linear.default(rows, mat2.mT, input, precision=precision), 0
    a = _batch_first(mat1, mat1_dim, info.batch_size)
    b = _batch_first(mat2, mat2_dim, info.batch_size)
    c = _addend(input, input_dim, 2)
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
    c = _addend(input, in_dims[0], 3)
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
        c = _addend(bias, bias_dim, 2)
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

torch.library.register_fake("sgemm::_check_apart", lambda out: None, lib=_lib)
_lib.impl("_gemm", _gemm_cpu, "CPU")
_lib.impl(
    "_linear",
    lambda input, weight, bias, precision: _linear_cpu(input, weight, bias, precision=precision),
    "CPU",
)

# ---- plain eager mode, without the dispatcher's detours ------------------------------------------

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_raw_gemm, _raw_linear = _sgemm._gemm.default, _sgemm._linear.default


def _is_plain(a: Tensor, b: Tensor, c: Tensor | None = None) -> bool:
    """Whether nothing but autograd may have an interest in a call of float32: no compiler,
    subclass, transform, autocast, dispatch mode."""
    # Written out, for a call of a function costs as much as two of these questions.
    return (
        not torch.compiler.is_compiling()
        and type(a) in _PLAIN
        and type(b) in _PLAIN
        and a.dtype is b.dtype is torch.float32
        and (c is None or (type(c) in _PLAIN and c.dtype is torch.float32))
        and not _autograd.is_intercepted()
    )


def _requires_grad(a: Tensor, b: Tensor, c: Tensor | None = None) -> bool:
    return torch.is_grad_enabled() and (
        a.requires_grad or b.requires_grad or (c is not None and c.requires_grad)
    )


def _eager_product(a, b, alpha, precision):
    if torch.is_grad_enabled() or not _is_plain(a, b):  # a second derivative, or a batch of them
        return _product(a, b, alpha, precision)
    return _raw_gemm(a, b, None, 0.0, alpha, precision)


class _EagerGemm(_autograd.Function):
    """What Gemm does. Each argument of a Function costs a call time: scalars (beta, alpha,
    precision) are one, and there is no c where nothing is added."""

    @staticmethod
    def forward(ctx, a, b, scalars, c=None):
        needs_a, needs_b, *_ = ctx.needs_input_grad
        turned = needs_a and _autograd.has_columns(a), needs_b and _autograd.has_columns(b)
        ctx.given = scalars, turned
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        return _raw_gemm(a, b, c, *scalars)

    @staticmethod
    def backward(ctx, grad):
        scalars, turned = ctx.given
        needs_a, needs_b, _, *needs_c = ctx.needs_input_grad
        needed = needs_a, needs_b, any(needs_c)
        grad_a, grad_b, grad_c = _autograd.gradients(
            grad, *ctx.saved_tensors, needed, _eager_product, *scalars, turned
        )
        return grad_a, grad_b, None, grad_c


class _EagerLinear(_autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, precision):
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.given = None if bias is None else bias.shape, precision
        ctx.turned = needs_weight and _autograd.has_columns(weight)
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        return _raw_linear(input, weight, bias, precision)

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
            if ctx.turned:  # into the layout of weight, as Gemm does
                grad_weight = _eager_product(of.t(), rows, 1.0, precision).t()
            else:
                grad_weight = _eager_product(rows.t(), of, 1.0, precision)
        if needs_bias:
            grad_bias = rows.sum_to_size(bias_shape)
        return grad_input, grad_weight, grad_bias, None


def _eager_gemm(dim, a, b, c, beta, alpha, precision) -> Tensor | None:
    """What mm, addmm, bmm and baddbmm do in plain eager mode. None where their op is to be called:
    in any other mode, and for an error, which it tells by the names of its arguments."""
    if not _is_plain(a, b, c) or a.dim() != dim:
        return None
    try:
        if not _requires_grad(a, b, c):
            return _raw_gemm(a, b, c, beta, alpha, precision)
        addend = () if c is None else (c,)
        return _EagerGemm.apply(a, b, (beta, alpha, precision), *addend)
    except RuntimeError:
        return None


def _eager_linear(input, weight, bias, precision) -> Tensor | None:
    """As _eager_gemm."""
    if not _is_plain(input, weight, bias) or weight.dim() != 2:
        return None
    try:
        if not _requires_grad(input, weight, bias):
            return _raw_linear(input, weight, bias, precision)
        return _EagerLinear.apply(input, weight, bias, precision)
    except RuntimeError:
        return None


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
    result = _eager_gemm(2, input, mat2, None, 0.0, 1.0, precision)
    return _sgemm.mm.default(input, mat2, precision=precision) if result is None else result


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
    result = _eager_gemm(2, mat1, mat2, input, beta, alpha, precision)
    if result is not None:
        return result
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
    result = _eager_gemm(3, input, mat2, None, 0.0, 1.0, precision)
    return _sgemm.bmm.default(input, mat2, precision=precision) if result is None else result


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
    result = _eager_gemm(3, batch1, batch2, input, beta, alpha, precision)
    if result is not None:
        return result
    return _sgemm.baddbmm.default(
        input, batch1, batch2, beta=beta, alpha=alpha, precision=precision
    )


def _not_ours(precision: str | None, *tensors: Tensor | None) -> bool:
    """Whether a drop-in function leaves a call to torch: another dtype, or autocast without a
    precision of the call's own."""
    given = [t for t in tensors if t is not None]
    if _autograd.is_autocast(given[0].device.type):
        if precision is None:
            return True
        given = [t for t in given if not _autograd.is_low(t)]  # which the ops cast up
    return any(t.dtype != torch.float32 for t in given)


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
    resolved = _precision.resolved(precision)
    result = _eager_linear(input, weight, bias, resolved)
    if result is not None:
        return result
    if _not_ours(precision, input, weight, bias):
        return F.linear(input, weight, bias)
    if weight.dim() == 1:
        product = matmul(input, weight, precision=precision)
        return product if bias is None else product + bias
    return _sgemm.linear.default(input, weight, bias, precision=resolved)


def _broadcast(a: torch.Size, b: torch.Size) -> torch.Size:
    for i in range(-1, -1 - min(len(a), len(b)), -1):
        if a[i] != b[i] and a[i] != 1 and b[i] != 1:
            raise RuntimeError(
                f"The size of tensor a ({a[i]}) must match the size of tensor b ({b[i]}) at "
                f"non-singleton dimension {max(len(a), len(b)) + i}"
            )
    return torch.broadcast_shapes(a, b)


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
    precision: then it stays in FP32. Where both have batches, one whose leading dimensions are no
    run of equal steps is copied, as by torch.

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
        for what in ("shape", "dtype", "device"):
            wanted, got = getattr(result, what), getattr(out, what)
            if got != wanted:
                raise RuntimeError(f"out must have {what} {wanted}, got {got}")
        _sgemm._check_apart(out)
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
    batch = _broadcast(input.shape[:-2], other.shape[:-2])
    a, b = (
        t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:])
        for t in (input, other)
    )
    return bmm(a, b, precision=precision).reshape(*batch, input.shape[-2], other.shape[-1])
