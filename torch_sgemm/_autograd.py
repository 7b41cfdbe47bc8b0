"""Derivatives and batching rule of out = alpha * (a @ b) + beta * c, for ops of the stable ABI.

The stable ABI has no autograd, torch.library.register_autograd breaks torch.func and is silently
wrong in forward mode, and an autograd.Function around the op breaks torch.compile. What gives
reverse mode, double backward, forward mode, torch.func, vmap and torch.compile alike is a Python
kernel at the Autograd dispatch key, which is where torch itself differentiates. It takes some names
that torch keeps private; all of them are in this file:

- ``_SingleLevelFunction``: an autograd.Function for one level of torch.func's nesting. The
  dispatcher has already picked the level when the kernel runs, so the public Function, which picks
  it itself, would do so twice.
- ``_compiled_autograd_key``, ``_autograd_function_id``: what the public Function has, by which a
  compiled backward knows it.
- ``enable_single_level_autograd_function``: torch.func forbids the former unless told that this is
  on purpose.
- ``_AutoDispatchBelowAutograd`` and ``_after_autograd_keyset``, and the same pair for
  ADInplaceOrView: on to the dispatch keys below, as C++ does it.
- ``_are_functorch_transforms_active``, ``_any_requires_grad``, ``_current_level``,
  ``_is_any_autocast_enabled``, ``_len_torch_dispatch_stack``, ``_is_tracing``: is there anything
  to do?
- ``_set_fwd_grad_enabled``: while a jvp is computed forward mode is off; the next level's needs it
  on.
- ``aten._fw_primal``: a tensor without this level's tangent. Else forward over forward recurses
  without end.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _after_ADInplaceOrView_keyset,
    _after_autograd_keyset,
    _any_requires_grad,
    _are_functorch_transforms_active,
    _AutoDispatchBelowADInplaceOrView,
    _AutoDispatchBelowAutograd,
    _ExcludeDispatchKeyGuard,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction


class Function(_SingleLevelFunction):
    @staticmethod
    def _compiled_autograd_key(ctx):
        return (ctx._autograd_function_id,)


def is_intercepted() -> bool:
    """Whether torch.func, forward mode, autocast, torch.jit.trace or a dispatch mode is at work."""
    return (
        _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _is_any_autocast_enabled()
        or _len_torch_dispatch_stack() > 0
        or _is_tracing()
    )


def is_autocast(device: str) -> bool:
    return _is_any_autocast_enabled() and torch.is_autocast_enabled(device)


def _forward_mode() -> bool:
    return forward_ad._current_level >= 0


def let_signal_handlers_run() -> None:
    """Python runs them where a function begins: Ctrl-C, which made an op stop with a RuntimeError,
    is a KeyboardInterrupt from here on."""


def below(op, keys, *args, **kwargs):
    """Calls what stands below the Autograd key: C++, a fake, the next level of torch.func."""
    try:
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keys & _after_autograd_keyset, *args, **kwargs)
    except RuntimeError:
        let_signal_handlers_run()
        raise


class Form(NamedTuple):
    """How one op computes alpha * (a @ b) + beta * c, and what its derivatives are computed by."""

    #: (keys, a, b, c, beta, alpha, precision) -> the result
    compute: Callable[..., Tensor]
    #: (a, b, alpha, precision) -> alpha * (a @ b)
    product: Callable[..., Tensor]


class Gemm(Function):
    """Of matrices or batches of them. c is None or broadcasts to the result: autograd itself sums a
    gradient that is larger than its tensor. In forward mode c has the shape of the result.

    A gradient that nothing but torch.autograd.grad(inputs=) leaves out is computed all the same.
    """

    @staticmethod
    def forward(ctx, a, b, c, beta, alpha, precision, form, keys):
        transformed = _are_functorch_transforms_active()
        if transformed:
            # The next level sees what this one computes, so it has to find its own modes on.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                result = form.compute(keys, a, b, c, beta, alpha, precision)
        else:
            result = form.compute(keys, a, b, c, beta, alpha, precision)
        needs_a, needs_b, *_ = ctx.needs_input_grad
        keep_both = transformed or _forward_mode()
        turned = needs_a and has_columns(a), needs_b and has_columns(b)
        ctx.given = form.product, beta, alpha, precision, turned
        ctx.save_for_backward(
            a if needs_b or keep_both else None, b if needs_a or keep_both else None
        )
        if keep_both:
            ctx.save_for_forward(a, b)
        return result

    @staticmethod
    def backward(ctx, grad):
        grads = gradients(grad, *ctx.saved_tensors, ctx.needs_input_grad[:3], *ctx.given)
        return *grads, None, None, None, None, None

    @staticmethod
    def jvp(ctx, a_tangent, b_tangent, c_tangent, *_rest):
        a, b = (torch.ops.aten._fw_primal(t, 0) for t in ctx.saved_tensors)
        product, beta, *rest, _turned = ctx.given
        terms = []
        with forward_ad._set_fwd_grad_enabled(True):
            if a_tangent is not None:
                terms.append(product(a_tangent, b, *rest))
            if b_tangent is not None:
                terms.append(product(a, b_tangent, *rest))
            if c_tangent is not None:
                terms.append(beta * c_tangent)
            return sum(terms[1:], start=terms[0])


def gradients(grad, a, b, needed, product, beta, alpha, precision, turned):
    """Of a, b and c, each None where it is not needed. In the layout of a and b, of which turned
    says whether they have columns: what accumulates gradients would copy them into it."""
    needs_a, needs_b, needs_c = needed
    a_turned, b_turned = turned
    rest = alpha, precision
    grad_a = grad_b = grad_c = None
    if needs_a:
        grad_a = product(b, grad.mT, *rest).mT if a_turned else product(grad, b.mT, *rest)
    if needs_b:
        grad_b = product(grad.mT, a, *rest).mT if b_turned else product(a.mT, grad, *rest)
    if needs_c:
        grad_c = grad if beta == 1 else beta * grad
    return grad_a, grad_b, grad_c


def has_columns(t: Tensor) -> bool:
    """Whether a column's elements are adjacent, and not a row's."""
    if t.is_contiguous():  # the cheapest of these questions
        return False
    row, col = t.stride()[-2:]
    return row == 1 and col != 1


def wants_derivatives(*tensors: Tensor | None) -> bool:
    """Whether a kernel at the Autograd key has anything to do."""
    return (
        _are_functorch_transforms_active()
        or _forward_mode()
        or (torch.is_grad_enabled() and _any_requires_grad(*tensors))
    )


def differentiable(form: Form, keys, a, b, c, beta, alpha, precision=None) -> Tensor:
    """What an op's kernel at the Autograd key does."""
    if not wants_derivatives(a, b, c):
        return form.compute(keys, a, b, c, beta, alpha, precision)
    arguments = a, b, _expanded(c, a, b), beta, alpha, precision, form, keys
    if not _are_functorch_transforms_active():
        return Gemm.apply(*arguments)
    with enable_single_level_autograd_function():
        return Gemm.apply(*arguments)


def _expanded(c: Tensor | None, a: Tensor, b: Tensor) -> Tensor | None:
    """c in the shape of a @ b. As it is where the shapes do not fit, which the op will say."""
    if c is None or a.dim() != b.dim() or a.dim() not in (2, 3):
        return c
    size = (*a.shape[:-1], b.shape[-1])
    return c.expand(size) if broadcasts(c.shape, size) else c


def broadcasts(size, to) -> bool:
    pairs = zip(reversed(size), reversed(to), strict=False)
    return len(size) <= len(to) and all(have == want or have == 1 for have, want in pairs)


def _not_differentiable(op):
    def kernel(keys, *args, out, **kwargs):
        tensors = [t for t in (*args, out) if isinstance(t, Tensor)]
        wants_grad = torch.is_grad_enabled() and _any_requires_grad(*tensors)
        if wants_grad or any(forward_ad.unpack_dual(t).tangent is not None for t in _dual(tensors)):
            raise RuntimeError(
                f"{op}: functions with out=... arguments don't support automatic differentiation, "
                "but one of the arguments requires grad; leave out= away, or call under "
                "torch.no_grad()"
            )
        if _are_functorch_transforms_active():
            raise RuntimeError(
                f"{op}: out= is not supported under torch.func transforms; leave it away"
            )
        below(op, keys, *args, **kwargs, out=out)

    return kernel


def _bumps_version(op):
    """A tensor that was saved for backward and then used as out= must not pass unnoticed."""

    def kernel(keys, *args, out, **kwargs):
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{op}: Inplace update to inference tensor outside InferenceMode is not allowed; "
                "pass out.clone() or another tensor as out"
            )
        with _AutoDispatchBelowADInplaceOrView():
            op.redispatch(keys & _after_ADInplaceOrView_keyset, *args, **kwargs, out=out)
        torch.autograd.graph.increment_version(out)

    return kernel


def _resolves_negation(op):
    """torch's own fallback for lazily negated tensors corrupts memory where an argument is written
    and nothing returned."""

    def kernel(*args, out, **kwargs):
        if out.is_neg():
            raise RuntimeError(f"{op}: out must not be a negated view; pass another tensor as out")
        resolved = (t.resolve_neg() if isinstance(t, Tensor) else t for t in args)
        op(*resolved, **kwargs, out=out)

    return kernel


def _dual(tensors):
    return tensors if _forward_mode() else ()


def _batched(op):
    def rule(info, in_dims, a, b, c=None, *, alpha=1.0, beta=0.0):
        dims = [*in_dims, None][:3]

        def slice_of(t, dim, i):
            return t if t is None or dim is None else t.select(dim, i)

        if info.batch_size == 0:  # one made-up slice gives the shape
            a, b, c = (
                t if t is None or d is None else t.new_empty(*t.shape[:d], 1, *t.shape[d + 1 :])
                for t, d in zip((a, b, c), dims, strict=True)
            )
        slices = [
            op(
                *(slice_of(t, d, i) for t, d in zip((a, b, c), dims, strict=True)),
                alpha=alpha,
                beta=beta,
            )
            for i in range(max(1, info.batch_size))
        ]
        return torch.stack(slices)[: info.batch_size], 0

    return rule


def register_out(library: torch.library.Library, name: str) -> None:
    """Gives sgemm::<name>.out a refusal where gradients are wanted, and torch's care otherwise."""
    op = getattr(torch.ops.sgemm, name).out
    library.impl(f"{name}.out", _not_differentiable(op), "Autograd", with_keyset=True)
    library.impl(f"{name}.out", _bumps_version(op), "ADInplaceOrView", with_keyset=True)
    library.impl(f"{name}.out", _resolves_negation(op), "Negative")


def register_autocast(library: torch.library.Library, name: str) -> None:
    """Under autocast sgemm::<name> casts its tensors up to float32.
    (torch.library.register_autocast takes no keyword arguments.)"""
    op = getattr(torch.ops.sgemm, name).default

    def kernel(*args, **kwargs):
        with _ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*(_up(t) if isinstance(t, Tensor) else t for t in args), **kwargs)

    for device in ("CPU", "CUDA"):
        library.impl(name, kernel, f"Autocast{device}")


def _up(t: Tensor) -> Tensor:
    return t.float() if is_low(t) else t


def is_low(t: Tensor) -> bool:
    """Whether autocast makes float32 of it where float32 is wanted."""
    return t.is_floating_point() and t.dtype.itemsize < 4


_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


def register_stage(library: torch.library.Library, name: str) -> None:
    """Gives the stage sgemm::<name> derivatives, computed by itself, and a batching rule."""
    op = getattr(torch.ops.sgemm, name).default

    def compute(keys, a, b, c, beta, alpha, _precision):
        return below(op, keys, a, b, c, alpha=alpha, beta=beta)

    def product(a, b, alpha, _precision):
        return op(a, b, alpha=alpha)

    form = Form(compute, product)

    def kernel(keys, a, b, c=None, *, alpha=1.0, beta=0.0):
        return differentiable(form, keys, a, b, c, beta, alpha)

    library.impl(name, kernel, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"sgemm::{name}", _batched(op), lib=library)
    register_out(library, name)
