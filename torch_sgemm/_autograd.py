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
- ``_are_functorch_transforms_active``, ``_any_requires_grad``, ``_current_level``: is there
  anything to do?
- ``_set_fwd_grad_enabled``: while a jvp is computed forward mode is off; the next level's needs it
  on.
- ``aten._fw_primal``: a tensor without this level's tangent. Else forward over forward recurses
  without end.
"""

import torch
from torch._C import (
    _after_ADInplaceOrView_keyset,
    _after_autograd_keyset,
    _any_requires_grad,
    _are_functorch_transforms_active,
    _AutoDispatchBelowADInplaceOrView,
    _AutoDispatchBelowAutograd,
)
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction


def _forward_mode() -> bool:
    return forward_ad._current_level >= 0


def let_signal_handlers_run() -> None:
    """Python runs them where a function begins: Ctrl-C, which made an op stop with a RuntimeError,
    is a KeyboardInterrupt from here on."""


def _below(op, keys, *args, **kwargs):
    """Calls what stands below the Autograd key: C++, a fake, the next level of torch.func."""
    try:
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keys & _after_autograd_keyset, *args, **kwargs)
    except RuntimeError:
        let_signal_handlers_run()
        raise


class _Gemm(_SingleLevelFunction):
    """c is None or has the shape of the result."""

    @staticmethod
    def forward(ctx, op, keys, a, b, c, alpha, beta):
        _, _, needs_a, needs_b, _, _, _ = ctx.needs_input_grad
        keep_both = _are_functorch_transforms_active() or _forward_mode()
        ctx.op, ctx.alpha, ctx.beta = op, alpha, beta
        ctx.save_for_backward(
            a if needs_b or keep_both else None, b if needs_a or keep_both else None
        )
        if keep_both:
            ctx.save_for_forward(a, b)
        if not _are_functorch_transforms_active():
            return _below(op, keys, a, b, c, alpha=alpha, beta=beta)
        # The next level sees what this one computes, so it has to find its own modes on.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return _below(op, keys, a, b, c, alpha=alpha, beta=beta)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        _, _, needs_a, needs_b, needs_c, _, _ = ctx.needs_input_grad
        return (
            None,
            None,
            ctx.op(grad, b.t(), alpha=ctx.alpha) if needs_a else None,
            ctx.op(a.t(), grad, alpha=ctx.alpha) if needs_b else None,
            ctx.beta * grad if needs_c else None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx, _op, _keys, a_tangent, b_tangent, c_tangent, _alpha, _beta):
        a, b = (torch.ops.aten._fw_primal(t, 0) for t in ctx.saved_tensors)
        terms = []
        with forward_ad._set_fwd_grad_enabled(True):
            if a_tangent is not None:
                terms.append(ctx.op(a_tangent, b, alpha=ctx.alpha))
            if b_tangent is not None:
                terms.append(ctx.op(a, b_tangent, alpha=ctx.alpha))
            if c_tangent is not None:
                terms.append(ctx.beta * c_tangent)
            return sum(terms[1:], start=terms[0])


def _differentiable(op):
    def kernel(keys, a, b, c=None, *, alpha=1.0, beta=0.0):
        transformed = _are_functorch_transforms_active()
        if not (
            transformed
            or _forward_mode()
            or (torch.is_grad_enabled() and _any_requires_grad(a, b, c))
        ):
            return _below(op, keys, a, b, c, alpha=alpha, beta=beta)
        if c is not None and a.dim() == b.dim() == 2:
            shape = (a.shape[0], b.shape[1])
            if _broadcasts(c.shape, shape):  # else the op says so
                c = c.expand(shape)  # torch's own derivative sums over what was expanded
        if not transformed:
            return _Gemm.apply(op, keys, a, b, c, alpha, beta)
        with enable_single_level_autograd_function():
            return _Gemm.apply(op, keys, a, b, c, alpha, beta)

    return kernel


def _broadcasts(shape, wanted) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, want) for size, want in sizes)


def _not_differentiable(op):
    def kernel(keys, a, b, c=None, *, alpha=1.0, beta=0.0, out):
        tensors = [t for t in (a, b, c, out) if t is not None]
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
        _below(op, keys, a, b, c, alpha=alpha, beta=beta, out=out)

    return kernel


def _bumps_version(op):
    """A tensor that was saved for backward and then used as out= must not pass unnoticed."""

    def kernel(keys, a, b, c=None, *, alpha=1.0, beta=0.0, out):
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{op}: Inplace update to inference tensor outside InferenceMode is not allowed; "
                "pass out.clone() or another tensor as out"
            )
        with _AutoDispatchBelowADInplaceOrView():
            op.redispatch(
                keys & _after_ADInplaceOrView_keyset, a, b, c, alpha=alpha, beta=beta, out=out
            )
        torch.autograd.graph.increment_version(out)

    return kernel


def _resolves_negation(op):
    """torch's own fallback for lazily negated tensors corrupts memory where an argument is written
    and nothing returned."""

    def kernel(a, b, c=None, *, alpha=1.0, beta=0.0, out):
        if out.is_neg():
            raise RuntimeError(f"{op}: out must not be a negated view; pass another tensor as out")
        a, b, c = (t if t is None else t.resolve_neg() for t in (a, b, c))
        op(a, b, c, alpha=alpha, beta=beta, out=out)

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


def register(library: torch.library.Library, name: str) -> None:
    """Gives sgemm::<name> derivatives and a batching rule, and sgemm::<name>.out a refusal."""
    packet = getattr(torch.ops.sgemm, name)
    library.impl(name, _differentiable(packet.default), "Autograd", with_keyset=True)
    library.impl(f"{name}.out", _not_differentiable(packet.out), "Autograd", with_keyset=True)
    library.impl(f"{name}.out", _bumps_version(packet.out), "ADInplaceOrView", with_keyset=True)
    library.impl(f"{name}.out", _resolves_negation(packet.out), "Negative")
    torch.library.register_vmap(f"sgemm::{name}", _batched(packet.default), lib=library)
