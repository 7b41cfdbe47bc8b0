"""Derivatives, batching rules, fakes and modes of mm, addmm, bmm, baddbmm, linear and matmul, by
the functions and by torch.ops.sgemm alike, against torch's own. On whole numbers both are exact.

tests/test_derivatives.py puts the functions through what the stages go through too. Ids like B77
are rows of the bug list: faults of this kind that users of other packages reported.
"""

import copy
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from arena import integers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_sgemm as ts
from torch_sgemm import products

B, M, K, N = 3, 2, 4, 5
SCALED = {"beta": -1.0, "alpha": 2.0}


def op(name, wanted, *shapes, **scalars):
    return SimpleNamespace(name=name, wanted=wanted, shapes=shapes, scalars=scalars)


#: Operands that differ in how gradients are summed and in how batches are laid out.
OPS = {
    "mm": op("mm", torch.mm, (M, K), (K, N)),
    "bmm": op("bmm", torch.bmm, (B, M, K), (B, K, N)),
    "linear": op("linear", F.linear, (M, K), (N, K)),
    "linear with a bias": op("linear", F.linear, (M, K), (N, K), (N,)),
    "linear of one row": op("linear", F.linear, (K,), (N, K), (N,)),
    "linear of three dimensions": op("linear", F.linear, (3, M, K), (N, K), (N,)),
    "linear of four": op("linear", F.linear, (3, 1, M, K), (N, K)),
    **{
        f"addmm {c}": op("addmm", torch.addmm, c, (M, K), (K, N), **SCALED)
        for c in ((), (1,), (N,), (1, N), (M, 1), (M, N))
    },
    **{
        f"baddbmm {c}": op("baddbmm", torch.baddbmm, c, (B, M, K), (B, K, N), **SCALED)
        for c in ((), (N,), (1, N), (M, 1), (M, N), (B, 1, 1), (1, M, N), (B, M, N))
    },
}
each_op = pytest.mark.parametrize("case", OPS.values(), ids=OPS)
some_ops = pytest.mark.parametrize(
    "case",
    [OPS[name] for name in ("mm", "addmm (5,)", "bmm", "baddbmm (2, 1)", "linear with a bias")],
    ids=lambda case: case.name,
)


def steps(*shape, device="cpu"):
    wide = integers(*(2 * size for size in shape), device=device)
    return wide[(slice(None, None, 2),) * len(shape)]


VIEWS = {
    "contiguous": integers,
    "transposed": lambda *s, **on: integers(*reversed(s), **on).permute(
        tuple(reversed(range(len(s))))
    ),
    "expanded": lambda *s, **on: integers(*s[:-1], *s[-1:] and (1,), **on).expand(s),
    "steps": steps,
    "offset": lambda *s, **on: integers(torch.Size(s).numel() + 1, **on)[1:].view(s),
}


@pytest.fixture(autouse=True)
def _twins_without_derivatives(monkeypatch):
    """As on CUDA; on the CPU those of torch's own would stand in unseen."""
    for name in ("_raw_gemm", "_raw_linear"):
        monkeypatch.setattr(products, name, torch.no_grad()(getattr(products, name)))


@pytest.fixture(params=["function", "op"])
def call(request):
    """call(case, *tensors, **kwargs): torch_sgemm's function or torch.ops.sgemm's op."""

    def function(case, *tensors, **kwargs):
        of = ts if request.param == "function" else torch.ops.sgemm
        return getattr(of, case.name)(*tensors, **case.scalars, **kwargs)

    return function


def wanted(case, *tensors):
    return case.wanted(*tensors, **case.scalars)


def operands(case, requires=True, device="cpu"):
    return [integers(*s, device=device, limit=3).requires_grad_(requires) for s in case.shapes]


def assert_equal(got, want):
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


# ---- reverse and forward mode --------------------------------------------------------------------


@each_op
def test_gradients_of_each_subset(case, call, device):
    """B76: a gradient is dropped; B45: it is summed along the wrong axis; B33: the gradient that
    comes in is transposed or expanded."""
    x = operands(case, False, device)
    shape = wanted(case, *x).shape
    upstreams = (
        integers(*shape, device=device),
        integers(*reversed(shape), device=device).permute(*reversed(range(len(shape)))),
        integers(*shape[:-1], 1, device=device).expand(shape),
        integers(1, device=device)[0].expand(shape),
    )
    for needs in itertools.product((False, True), repeat=len(x)):
        if not any(needs):
            continue
        inputs = [t.clone().requires_grad_(need) for t, need in zip(x, needs, strict=True)]
        of = [t for t in inputs if t.requires_grad]
        for upstream in upstreams:
            got = torch.autograd.grad(call(case, *inputs), of, upstream)
            want = torch.autograd.grad(wanted(case, *inputs), of, upstream)
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), needs


@each_op
@pytest.mark.parametrize("view", VIEWS)
def test_gradients_of_views(case, view, call, device):
    """B27, B31, B32, B33: operands and an incoming gradient that no address, leading dimension or
    view() fits."""
    x = [VIEWS[view](*s, device=device).requires_grad_() for s in case.shapes]
    got, want = call(case, *x), wanted(case, *x)
    upstream = VIEWS[view](*want.shape, device=device)
    got, want = (torch.autograd.grad(y, x, upstream) for y in (got, want))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@each_op
def test_second_derivatives(case, call):
    """B77: the derivative of a gradient's norm is silently wrong."""
    inputs = operands(case)

    def penalty(result):
        gradients = torch.autograd.grad(result.pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), inputs)

    assert_equal(penalty(call(case, *inputs)), penalty(wanted(case, *inputs)))


@each_op
def test_forward_mode_of_each_subset(case, call):
    """It was silently zero with torch.library's own register_autograd."""
    x = operands(case, False)
    for needs in itertools.product((False, True), repeat=len(x)):
        with forward_ad.dual_level():
            dual = [
                forward_ad.make_dual(t, t + 1) if need else t
                for t, need in zip(x, needs, strict=True)
            ]
            got, want = (forward_ad.unpack_dual(f(case, *dual)) for f in (call, wanted))
            assert torch.equal(got.primal, want.primal)
            assert (got.tangent is None) == (not any(needs))
            assert got.tangent is None or torch.equal(got.tangent, want.tangent)


TRANSFORMS = {
    "grad": lambda f, x, n: grad(f, n)(*x),
    "vjp": lambda f, x, n: vjp(f, *x)[1](torch.tensor(2.0)),
    "jvp": lambda f, x, n: jvp(f, x, tuple(t + 1 for t in x)),
    "jacrev": lambda f, x, n: jacrev(f, n)(*x),
    "jacfwd": lambda f, x, n: jacfwd(f, n)(*x),
    "hessian": lambda f, x, n: hessian(f, n)(*x),
    "jacfwd of jacfwd": lambda f, x, n: jacfwd(jacfwd(f, n), n)(*x),
    "grad of jvp": lambda f, x, n: grad(lambda *y: jvp(f, y, x)[1], n)(*x),
}


@each_op
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(case, transform):
    """B92: torch.func raises, or drops terms."""
    x = tuple(operands(case, False))

    def results(f):
        return TRANSFORMS[transform](f, x, tuple(range(len(x))))

    function = getattr(ts, case.name)
    got = results(lambda *y: (function(*y, **case.scalars) ** 3).sum())
    want = results(lambda *y: (wanted(case, *y) ** 3).sum())
    assert any(t.count_nonzero() for t in tree_leaves(want))
    assert_equal(got, want)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((K,), (K,)),
        ((M, K), (K,)),
        ((K,), (K, N)),
        ((3, M, K), (K,)),
        ((3, M, K), (K, N)),
        ((2, 3, M, K), (K, N)),
        ((K,), (3, K, N)),
        ((M, K), (3, K, N)),
        ((6, 1, M, K), (3, K, N)),
        ((0, M, K), (K, N)),
    ],
)
def test_derivatives_of_matmul(a, b, device):
    a, b = (integers(*s, device=device, limit=3).requires_grad_() for s in (a, b))
    results = ts.matmul(a, b), torch.matmul(a, b)
    upstream = integers(*results[0].shape, device=device)
    got, want = (torch.autograd.grad(r, (a, b), upstream) for r in results)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    if device == "cpu":
        x = a.detach(), b.detach()
        for f in (grad, jacfwd):
            of = [f(lambda *y, m=m: (m(*y) ** 3).sum(), (0, 1)) for m in (ts.matmul, torch.matmul)]
            assert_equal(*(g(*x) for g in of))


@pytest.mark.parametrize("shape", [(0, K), (3, 0, K), (3, 0), (0, 0), (2, 3, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_an_empty_linear(shape, bias, call, device):
    """B14, B15, B16, B18: the backward throws where the forward was fine."""
    case = OPS["linear"]
    inputs = [
        torch.ones(shape, device=device, requires_grad=True),
        torch.ones(N, shape[-1], device=device, requires_grad=True),
        *([torch.ones(N, device=device, requires_grad=True)] if bias else []),
    ]
    results = call(case, *inputs), F.linear(*inputs)
    got, want = (torch.autograd.grad(r.sum(), inputs) for r in results)
    assert [g.shape for g in got] == [t.shape for t in inputs]
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def recorded(monkeypatch):
    """The twins' calls in plain eager mode."""
    calls = []
    for name in ("_raw_gemm", "_raw_linear"):
        twin = getattr(products, name)
        monkeypatch.setattr(
            products, name, lambda *args, twin=twin, name=name: calls.append(name) or twin(*args)
        )
    return calls


@some_ops
def test_backward_computes_and_saves_what_is_needed(case, monkeypatch, device):
    """B79: a frozen weight still costs its GEMM, and keeps the input alive."""
    calls = recorded(monkeypatch)
    first = len(case.shapes) - 2 if "add" in case.name else 0  # of the two that are multiplied
    for needs in itertools.product((False, True), repeat=len(case.shapes)):
        x = [
            t.requires_grad_(need)
            for t, need in zip(operands(case, False, device), needs, strict=True)
        ]
        a, b = x[first : first + 2]
        saved = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.add(t.data_ptr()) or t, lambda t: t
        ):
            result = getattr(ts, case.name)(*x, **case.scalars)
        assert saved == {t.data_ptr() for t, of in ((a, b), (b, a)) if of.requires_grad}
        calls.clear()
        if any(needs):
            result.backward(torch.ones_like(result))
        assert calls == ["_raw_gemm"] * (a.requires_grad + b.requires_grad)
        assert [t.grad is not None for t in x] == list(needs)


def test_gradients_come_in_the_layout_of_what_they_are_of(call, device):
    """Or what accumulates them copies each: 2 * N * K * 4 bytes a step for a weight."""

    def strides(f, *shapes):
        found, x = [], []
        for shape, turned in shapes:
            t = integers(*shape, device=device)
            x.append((t.mT.contiguous().mT if turned else t).requires_grad_())
            x[-1].register_hook(lambda g, t=x[-1]: found.append((g.stride(), t.stride())))
        f(*x).sum().backward()
        assert len(found) == len(x)
        return found

    for turned in itertools.product((False, True), repeat=2):
        for name in ("mm", "bmm"):
            sizes = zip(OPS[name].shapes, turned, strict=True)
            for got, want in strides(lambda *x, n=name: call(OPS[n], *x), *sizes):
                assert got == want
    for x in ((M, K), (3, M, K)):
        shapes = (x, False), ((N, K), False)
        assert all(g == w for g, w in strides(lambda *x: call(OPS["linear"], *x), *shapes))
        shapes = (x, False), ((K, N), False)
        assert all(g == w for g, w in strides(ts.matmul, *shapes))


def test_the_precision_of_a_backward_is_the_forwards():
    """Backward runs in other threads, and after the `with` that set it."""

    class Precisions(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "sgemm":
                seen.append(kwargs.get("precision", "auto"))
            return func(*args, **(kwargs or {}))

    seen = []
    for case in OPS.values():
        with Precisions():
            with ts.precision("ieee"):
                result = getattr(ts, case.name)(*operands(case), **case.scalars)
            result.sum().backward()
        assert len(seen) == 3, case.name
        assert set(seen) == {"ieee"}, case.name
        seen.clear()


# ---- vmap ----------------------------------------------------------------------------------------


def _in_dims(case):
    for dims in itertools.product(*((None, *range(len(s) + 1)) for s in case.shapes)):
        if any(d is not None for d in dims):
            yield dims


def _batched(shape, dim, size):
    return integers(*shape) if dim is None else integers(*shape[:dim], size, *shape[dim:])


@each_op
@pytest.mark.parametrize("size", [3, 1, 0])
def test_vmap_over_any_dimensions(case, size):
    """B92: a batching rule for each way to batch."""
    function = getattr(ts, case.name)
    for dims in _in_dims(case):
        x = [_batched(s, d, size) for s, d in zip(case.shapes, dims, strict=True)]
        got = vmap(lambda *y: function(*y, **case.scalars), dims)(*x)
        slices = [
            [t if d is None else t.select(d, i) for t, d in zip(x, dims, strict=True)]
            for i in range(size)
        ]
        if slices:
            assert torch.equal(got, torch.stack([wanted(case, *y) for y in slices])), dims
        else:
            assert got.shape == (0, *wanted(case, *operands(case, False)).shape), dims


@each_op
def test_vmap_of_vmap(case):
    """The operands batched twice, the first, and the second, by either of the two."""
    function = getattr(ts, case.name)
    for which in itertools.product(range(4), repeat=len(case.shapes)):
        outer = tuple(0 if w & 1 else None for w in which)
        inner = tuple(0 if w & 2 else None for w in which)
        if {None} in (set(outer), set(inner)):
            continue
        x = [
            integers(*((2,) if o == 0 else ()), *((3,) if i == 0 else ()), *s)
            for s, o, i in zip(case.shapes, outer, inner, strict=True)
        ]
        got, want = (
            vmap(vmap(lambda *y, f=f: f(*y, **case.scalars), inner), outer)(*x)
            for f in (function, case.wanted)
        )
        assert torch.equal(got, want), (outer, inner)


@some_ops
def test_gradients_per_sample(case):
    function = getattr(ts, case.name)
    x = operands(case, False)
    samples = torch.stack([x[0], x[0] + 1, 2 * x[0]])

    def per_sample(f):
        def loss(*y):
            return f(*y, **case.scalars).square().sum()

        n = tuple(range(len(x)))
        return vmap(grad(loss, n), (0, *(None,) * (len(x) - 1)))(samples, *x[1:])

    assert_equal(per_sample(function), per_sample(case.wanted))


def test_an_ensemble_of_models():
    """Stacked weights, as torch.func has it."""

    class Layer(torch.nn.Linear):
        def forward(self, x):
            return ts.linear(x, self.weight, self.bias).relu()

    layers = [Layer(K, N) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(layers)
    x = torch.randn(M, K)
    got = vmap(lambda p, x: functional_call(layers[0], p, (x,)), (0, None))(stacked, x)
    assert_equal(got, torch.stack([layer(x) for layer in layers]))


def test_rows_of_one_matrix_are_no_batch_of_products():
    """vmap of a model over samples of one row each: a GEMM, not as many as there are samples."""
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x, w, bias = integers(7, K), integers(K, N), integers(N)
    with Names():
        got = (
            vmap(lambda row: ts.addmm(bias, row[None], w))(x),
            vmap(lambda row: ts.mm(row[None], w))(x),
        )
    assert {name for name in names if "mm" in name or "linear" in name} == {"linear"}
    assert torch.equal(got[0].squeeze(1), x @ w + bias)
    assert torch.equal(got[1].squeeze(1), x @ w)


def test_batching_makes_no_shape_right_that_is_wrong():
    """A batch of vectors is no matrix."""
    row, a, b, bias = integers(7, K), integers(M, K), integers(K, N), integers(N)
    for f in (
        lambda x: ts.mm(x, b),
        lambda x: ts.mm(a, x),
        lambda x: ts.addmm(bias, x, b),
        lambda x: ts.bmm(x, b.expand(B, K, N)),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            vmap(f)(row)


# ---- out= ----------------------------------------------------------------------------------------

REFUSAL = "functions with out=... arguments don't support automatic differentiation"


@some_ops
def test_out_refuses_derivatives_and_counts_as_a_change(case):
    """B83: silently no gradient; or a tensor that was saved changes unnoticed."""
    into = getattr(torch.ops.sgemm, case.name).out
    x = operands(case, False)
    want = wanted(case, *x)

    def run(*tensors, out):
        into(*tensors, **case.scalars, out=out)
        return out

    for which in range(len(x) + 1):
        tensors = [t.clone() for t in (*x, torch.full_like(want, 7.0))]
        tensors[which].requires_grad_()
        with pytest.raises(RuntimeError, match=REFUSAL):
            run(*tensors[:-1], out=tensors[-1])
        assert (tensors[-1] == 7).all()
        with torch.no_grad():
            assert torch.equal(run(*tensors[:-1], out=tensors[-1]), want)
        with forward_ad.dual_level():
            tensors = [t.detach() for t in tensors]
            tensors[which] = forward_ad.make_dual(tensors[which], torch.ones_like(tensors[which]))
            with pytest.raises(RuntimeError, match=REFUSAL):
                run(*tensors[:-1], out=tensors[-1])
    with pytest.raises(RuntimeError, match=r"out=|\.out"):
        grad(lambda y: run(y, *x[1:], out=torch.empty_like(want)).sum())(x[0])
    saved = torch.ones_like(want)
    loss = (saved * torch.ones_like(want, requires_grad=True)).sum()
    run(*x, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="out must not be a negated view"):
        run(*x, out=torch._neg_view(torch.zeros_like(want)))
    negated = [torch._neg_view(-t) for t in x]
    assert torch.equal(run(*negated, out=torch.empty_like(want)), want)


WRONG_OUTS = {
    "shape": lambda: torch.empty(M, 3, N),
    "dtype": lambda: torch.empty(3, M, N, dtype=torch.float64),
    "device": lambda: torch.empty(3, M, N, device="meta"),
}


@pytest.mark.parametrize("what", WRONG_OUTS)
def test_an_out_of_matmul_that_does_not_fit(what):
    """It was filled in another dtype."""
    with pytest.raises(RuntimeError, match=f"out must have {what} "):
        ts.matmul(integers(3, M, K), integers(K, N), out=WRONG_OUTS[what]())


def test_an_out_of_matmul_refuses_gradients():
    a, b = integers(3, M, K).requires_grad_(), integers(K, N)
    with pytest.raises(RuntimeError, match=REFUSAL):
        ts.matmul(a, b, out=torch.empty(3, M, N))


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (1, 1), (2, 1), (1, 3), (2, 3)])
def test_an_out_that_overlaps_itself(strides, device):
    """B47: elements of out share memory, all of them or some; torch's own copy, by which matmul
    fills an out of three dimensions, does not notice all of it."""
    out = torch.zeros(80, device=device).as_strided((4, 4), strides)
    batches = torch.zeros(80, device=device).as_strided((3, 4, 4), (16, *strides))
    a, b = integers(3, 4, 3, device=device), integers(3, 4, device=device)
    for call_ in (
        lambda: ts.mm(a[0], b, out=out),
        lambda: ts.bmm(a, b.expand(3, 3, 4), out=batches),
        lambda: ts.matmul(a, b, out=batches),
        lambda: torch.ops.sgemm.linear.out(a, b.t(), out=batches),
    ):
        with pytest.raises(RuntimeError, match="single memory location"):
            call_()
    assert not out.any()
    assert not batches.any()


# ---- fakes ---------------------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize("view", VIEWS)
def test_fakes_have_the_real_strides(case, view, call):
    """B85: compiled code asserts, or reads the result in the wrong order."""
    x = [VIEWS[view](*s) for s in case.shapes]
    real = call(case, *x)
    assert real.is_contiguous()
    with FakeTensorMode() as mode:
        fake = call(case, *(mode.from_tensor(t) for t in x))
    meta = call(case, *(t.to("meta") for t in x))
    for result in (fake, meta):
        assert (result.shape, result.stride(), result.dtype, result.storage_offset()) == (
            (real.shape, real.stride(), real.dtype, real.storage_offset())
        )
    assert fake.device == real.device


@each_op
@pytest.mark.parametrize("view", ["contiguous", "transposed"])
def test_opcheck(case, view):
    packet = getattr(torch.ops.sgemm, case.name)
    x = [VIEWS[view](*s) for s in case.shapes]
    out = torch.empty_like(wanted(case, *x))
    torch.library.opcheck(packet.out, x, {**case.scalars, "out": out})
    torch.library.opcheck(packet.default, [t.requires_grad_() for t in x], case.scalars)


MISFITS = {
    "mm": [((2, 3), (4, 5)), ((2,), (2, 5)), ((2, 3, 4), (4, 5))],
    "addmm": [((7,), (2, 3), (3, 5)), ((5, 2), (2, 3), (3, 5)), ((5,), (2, 3), (4, 5))],
    "bmm": [((2, 3, 4), (3, 4, 5)), ((2, 3, 4), (2, 5, 4)), ((3, 4), (2, 4, 5))],
    "baddbmm": [((7,), (2, 3, 4), (2, 4, 5)), ((3, 1, 1), (2, 3, 4), (2, 4, 5))],
    "linear": [((2, 7, 3), (5, 4)), ((2, 3), (5, 3), (4,)), ((2, 3), (5, 3), (1, 5)), ((), (1, 1))],
}


@pytest.mark.parametrize("name", MISFITS)
def test_fakes_refuse_what_the_ops_refuse(name):
    """Or the mistake shows in the middle of a compiled graph, or never."""
    for shapes in MISFITS[name]:
        for make in (torch.ones, lambda *s: torch.ones(*s, device="meta")):
            with pytest.raises(RuntimeError):
                getattr(ts, name)(*(make(s) for s in shapes))


# ---- modes ---------------------------------------------------------------------------------------


@some_ops
def test_plain_eager_mode_takes_the_short_way_and_no_other_does(case, monkeypatch):
    """Python kernels at the Autograd key cost microseconds, and see what the twins do not."""
    calls = recorded(monkeypatch)
    function, x = getattr(ts, case.name), operands(case, False)
    function(*x, **case.scalars)
    function(*(torch.nn.Parameter(t) for t in x), **case.scalars)
    with torch.inference_mode():
        function(*x, **case.scalars)
    assert len(calls) == 3
    calls.clear()

    class Tagged(torch.Tensor):
        pass

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    function(x[0].as_subclass(Tagged), *x[1:], **case.scalars)
    function(*(t.to("meta") for t in x), **case.scalars)
    vmap(lambda y: function(y, *x[1:], **case.scalars))(x[0][None])
    grad(lambda y: function(y, *x[1:], **case.scalars).sum())(x[0])
    for mode in (torch.autocast("cpu"), Nothing(), forward_ad.dual_level()):
        with mode:
            if case.name != "linear" or not isinstance(mode, torch.autocast):
                function(*x, **case.scalars)
    assert calls.count("_raw_gemm") + calls.count("_raw_linear") == len(calls) <= 1  # meta asks


def test_errors_name_the_arguments_of_the_function(device):
    """The twins' own names are others."""

    def ones(*shape):
        return torch.ones(*shape, device=device)

    for call_, text in (
        (lambda: ts.addmm(ones(5), ones(2), ones(3, 5)), "mat1"),
        (lambda: ts.addmm(ones(4), ones(2, 3), ones(3, 5)), "input|expand"),
        (lambda: ts.baddbmm(ones(5), ones(2, 3), ones(2, 3, 5)), "batch1"),
        (lambda: ts.mm(ones(2, 3).double(), ones(3, 5)), "input must be float32"),
        (lambda: ts.mm(ones(2, 3), ones(3, 5).half()), "mat2 must be float32"),
        (lambda: ts.addmm(ones(5), ones(2, 3), ones(3, 5).half()), "mat2 must be float32"),
        (lambda: ts.baddbmm(ones(5).double(), ones(2, 3, 4), ones(2, 4, 5)), "input must be float"),
        (lambda: ts.mm(ones(2, 3).to_sparse(), ones(3, 5)), "sgemm::mm"),
    ):
        for grads in (False, True):
            with torch.set_grad_enabled(grads), pytest.raises(RuntimeError, match=text) as caught:
                call_()
            assert not re.search(r"_gemm|\.cpp|::_", str(caught.value).split("\n")[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_precision_stays_in_fp32(dtype, device):
    """B90: half precision from an earlier layer meets float32 weights: cast up, as asked for."""
    x, w, bias = (integers(*s, device=device) for s in ((3, M, K), (N, K), (N,)))
    expected = x @ w.mT + bias
    w.requires_grad_()
    with torch.autocast(device, dtype):
        for low in (x, x.to(dtype)):
            for result in (
                ts.linear(low, w, bias, precision="ieee"),
                ts.linear(low, w, bias.to(dtype), precision="auto"),
                ts.matmul(low, w.mT, precision="ieee") + bias,
                ts.matmul(low, w.to(dtype).mT, precision="ieee") + bias,
            ):
                assert result.dtype == torch.float32
                assert torch.equal(result, expected)
                (gradient,) = torch.autograd.grad(result.sum(), w)
                assert gradient.dtype == torch.float32
                assert torch.equal(gradient, x.sum((0, 1)).expand(N, K))


@some_ops
def test_autocast_casts_operands_of_ops_up(case, device):
    x = operands(case, True, device)
    low = [t.detach().bfloat16().requires_grad_() for t in x]
    with torch.autocast(device, torch.bfloat16):
        result = getattr(torch.ops.sgemm, case.name)(*low, **case.scalars)
    assert result.dtype == torch.float32
    assert torch.equal(result, getattr(ts, case.name)(*x, **case.scalars))
    gradients = torch.autograd.grad(result.sum(), low)
    assert {g.dtype for g in gradients} == {torch.bfloat16}


def test_precision_nests_even_in_itself():
    """One object entered twice left its precision behind."""
    ieee = ts.precision("ieee")
    with ieee, ts.precision("auto"):
        with ieee, ieee:
            assert ts._precision.resolved(None) == "ieee"
        assert ts._precision.resolved(None) == "auto"
    with ieee, ieee:
        pass
    assert ts._precision.resolved(None) == "auto"
    for wrong in ("fp16x3", "tf32", "", 32, ["ieee"]):
        with pytest.raises(ValueError, match='precision must be "auto" or "ieee", got'):
            ts.precision(wrong)
    with pytest.raises(ValueError, match="not available yet"):
        ts.mm(torch.ones(2, 2), torch.ones(2, 2), precision="fp16x3")


@pytest.mark.parametrize("alpha", [0.0, 1e-50])
@pytest.mark.parametrize("beta", [0.0, 1e-50])
def test_what_zero_multiplies_is_not_read(alpha, beta, device):
    """B50, B51: and is checked all the same."""
    nan = float("nan")
    a, b = (torch.full(s, nan, device=device) for s in ((B, M, K), (B, K, N)))
    for c in ((), (N,), (B, M, N)):
        c = torch.full(c, nan, device=device)
        assert not ts.baddbmm(c, a, b, beta=beta, alpha=alpha).any()
    wrong = torch.zeros(N + 1, device=device)
    with pytest.raises(RuntimeError, match="expand"):
        ts.baddbmm(wrong, a, b, beta=beta, alpha=alpha)
    with pytest.raises(RuntimeError, match="expand"):
        ts.addmm(wrong, a[0], b[0], beta=beta, alpha=alpha)


def test_results_are_new_tensors():
    """B82: a shortcut returns one of its arguments."""
    c = integers(M, N)
    for result in (
        ts.addmm(c, torch.ones(M, 0), torch.ones(0, N)),
        ts.addmm(c, integers(M, K), integers(K, N), alpha=0.0),
        ts.baddbmm(c[None], torch.ones(1, M, 0), torch.ones(1, 0, N)),
    ):
        assert result.data_ptr() != c.data_ptr()
        assert torch.equal(result.reshape(M, N), c)


def test_a_model_is_copied_and_pickled(tmp_path):
    """B94."""
    weight = torch.nn.Parameter(integers(N, K))
    x = integers(M, K)
    twin = copy.deepcopy(weight)
    torch.save(weight, tmp_path / "weight")
    again = torch.load(tmp_path / "weight", weights_only=False)
    for w in (weight, twin, again):
        ts.linear(x, w).sum().backward()
        assert torch.equal(w.grad, x.sum(0).expand(N, K))
