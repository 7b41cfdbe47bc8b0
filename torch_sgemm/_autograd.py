"""Derivatives and batching rule of out = alpha * (a @ b) + beta * c, for ops of the stable ABI.

The stable ABI has no autograd, torch.library.register_autograd breaks torch.func and is silently
wrong in forward mode, and an autograd.Function around the op breaks torch.compile. What gives
reverse mode, double backward, forward mode, torch.func, vmap and torch.compile alike is a Python
kernel at the Autograd dispatch key, which is where torch itself differentiates. It takes some names
that torch keeps private; all of them are in this file:

- ``_SingleLevelFunction``: an autograd.Function for one level of torch.func's nesting. The
  dispatcher has already picked the level when the kernel runs, so the public Function, which picks
  it itself, would do so twice.
- ``enable_single_level_autograd_function``: torch.func forbids the former unless told that this is
  on purpose.
- ``_AutoDispatchBelowAutograd`` and ``_after_autograd_keyset``, and the same pair for
  ADInplaceOrView: on to the dispatch keys below, as C++ does it.
- ``_are_functorch_transforms_active``, ``_any_requires_grad``, ``_current_level``,
  ``_is_any_autocast_enabled``: is there anything to do?
- ``_set_fwd_grad_enabled``: while a jvp is computed forward mode is off; the next level's needs it
  on.
- ``aten._fw_primal``: a tensor without this level's tangent. Else forward over forward recurses
  without end.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
)
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

Function = _SingleLevelFunction


def is_transformed() -> bool:
    """Whether torch.func or forward mode is at work."""
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_autocast(device: str | None = None) -> bool:
    """On any device, or on this one."""
    return _is_any_autocast_enabled() and (device is None or torch.is_autocast_enabled(device))


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

    op: Any
    #: (a, b, c, alpha, beta, precision) -> the op's arguments
    arguments: Callable[..., tuple[tuple, dict]]
    #: (a, b, alpha, precision) -> alpha * (a @ b)
    product: Callable[..., Tensor]


class _Gemm(_SingleLevelFunction):
    """Of matrices or batches of them. c is None or has the shape of the result."""

    @staticmethod
    def forward(ctx, form, keys, a, b, c, alpha, beta, precision):
        _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        keep_both = _are_functorch_transforms_active() or _forward_mode()
        ctx.form, ctx.alpha, ctx.beta, ctx.precision = form, alpha, beta, precision
        ctx.save_for_backward(
            a if needs_b or keep_both else None, b if needs_a or keep_both else None
        )
        if keep_both:
            ctx.save_for_forward(a, b)
        args, kwargs = form.arguments(a, b, c, alpha, beta, precision)
        if not _are_functorch_transforms_active():
            return below(form.op, keys, *args, **kwargs)
        # The next level sees what this one computes, so it has to find its own modes on.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return below(form.op, keys, *args, **kwargs)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        _, _, needs_a, needs_b, needs_c, *_ = ctx.needs_input_grad
        product = partial(ctx.form.product, alpha=ctx.alpha, precision=ctx.precision)
        return (
            None,
            None,
            product(grad, b.mT) if needs_a else None,
            product(a.mT, grad) if needs_b else None,
            (grad if ctx.beta == 1 else ctx.beta * grad) if needs_c else None,
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx, _form, _keys, a_tangent, b_tangent, c_tangent, *_rest):
        a, b = (torch.ops.aten._fw_primal(t, 0) for t in ctx.saved_tensors)
        product = partial(ctx.form.product, alpha=ctx.alpha, precision=ctx.precision)
        terms = []
        with forward_ad._set_fwd_grad_enabled(True):
            if a_tangent is not None:
                terms.append(product(a_tangent, b))
            if b_tangent is not None:
                terms.append(product(a, b_tangent))
            if c_tangent is not None:
                terms.append(ctx.beta * c_tangent)
            return sum(terms[1:], start=terms[0])


def wants_derivatives(*tensors: Tensor | None) -> bool:
    """Whether a kernel at the Autograd key has anything to do."""
    return (
        _are_functorch_transforms_active()
        or _forward_mode()
        or (torch.is_grad_enabled() and _any_requires_grad(*tensors))
    )


def differentiable(form: Form, keys, a, b, c, alpha, beta, precision=None) -> Tensor:
    """What an op's kernel at the Autograd key does."""
    if not wants_derivatives(a, b, c):
        args, kwargs = form.arguments(a, b, c, alpha, beta, precision)
        return below(form.op, keys, *args, **kwargs)
    if c is not None and a.dim() == b.dim() and a.dim() in (2, 3):
        shape = (*a.shape[:-1], b.shape[-1])
        if _broadcasts(c.shape, shape):  # else the op says so
            c = c.expand(shape)  # torch's own derivative sums over what was expanded
    if not _are_functorch_transforms_active():
        return _Gemm.apply(form, keys, a, b, c, alpha, beta, precision)
    with enable_single_level_autograd_function():
        return _Gemm.apply(form, keys, a, b, c, alpha, beta, precision)


def _broadcasts(shape, wanted) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, want) for size, want in sizes)


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
    return t.float() if t.is_floating_point() and t.dtype.itemsize < 4 else t


_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


def register_stage(library: torch.library.Library, name: str) -> None:
    """Gives the stage sgemm::<name> derivatives, computed by itself, and a batching rule."""
    op = getattr(torch.ops.sgemm, name).default

    def arguments(a, b, c, alpha, beta, _precision):
        return (a, b, c), {"alpha": alpha, "beta": beta}

    def product(a, b, alpha, precision):
        return op(a, b, alpha=alpha)

    form = Form(op, arguments, product)

    def kernel(keys, a, b, c=None, *, alpha=1.0, beta=0.0):
        return differentiable(form, keys, a, b, c, alpha, beta)

    library.impl(name, kernel, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"sgemm::{name}", _batched(op), lib=library)
    register_out(library, name)
