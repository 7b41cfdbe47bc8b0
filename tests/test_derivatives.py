"""Derivatives, transforms, compilation. Ids like B79 are rows of the bug list: faults of this kind
that users of other packages reported.

The op is linear in each of its tensors, so on whole numbers a difference quotient with a step of 1
is exact and gradcheck needs no float64.
"""

import copy
import itertools

import pytest
import torch
from arena import integers, require_right
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from torch_sgemm import STAGES

# The derivatives are one piece of code for all stages: the costly matrix takes two of them.
TWO = ["stage0", "stage3"]
two_stages = pytest.mark.parametrize("stage", TWO, indirect=True)
products_too = pytest.mark.parametrize("stage", [*TWO, "mm", "bmm", "linear"], indirect=True)
exactly = {"eps": 1.0, "atol": 1e-6, "rtol": 0.0}
pytestmark = pytest.mark.filterwarnings("ignore:.*not a double precision floating point")

M, K, N = 2, 3, 4
SUBSETS = [s for s in itertools.product((False, True), repeat=3) if any(s)]
C_SHAPES = [(), (1,), (N,), (1, N), (M, 1), (1, 1), (M, N)]


def addmm(a, b, c=None, *, alpha=1.0, beta=0.0):
    """What a stage must agree with."""
    return alpha * (a @ b) if c is None else torch.addmm(c, a, b, alpha=alpha, beta=beta)


def operands(*requires, c_shape=(M, N)):
    """Whole numbers a, b, c; requires tells of each whether it wants a gradient."""
    shapes = ((M, K), (K, N), c_shape)
    return [
        integers(*shape, limit=3).requires_grad_(wanted)
        for shape, wanted in zip(shapes, requires or (True,) * 3, strict=True)
    ]


def assert_equal(got, wanted):
    for x, y in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


class CountOps(TorchDispatchMode):
    """The sgemm ops that run inside, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sgemm":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# ---- reverse and forward mode --------------------------------------------------------------------


@products_too
@pytest.mark.parametrize("requires", SUBSETS)
def test_gradcheck_of_each_subset(stage, requires):
    """B76: a gradient is dropped; B77: the second derivative is wrong."""

    def op(a, b, c):
        return stage(a, b, c, alpha=2.0, beta=-3.0)

    inputs = operands(*requires)
    assert gradcheck(
        op,
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        **exactly,
    )
    upstream = integers(M, N, limit=3).requires_grad_()
    assert gradgradcheck(op, inputs, upstream, check_fwd_over_rev=True, **exactly)


@products_too
@pytest.mark.parametrize("alpha", [1.0, -2.0, 0.0])
def test_gradcheck_without_c(stage, alpha):
    inputs = operands(True, True, False)[:2]

    def op(a, b):
        return stage(a, b, alpha=alpha)

    assert gradcheck(op, inputs, check_forward_ad=True, check_batched_grad=True, **exactly)
    upstream = integers(M, N, limit=3).requires_grad_()
    assert gradgradcheck(op, inputs, upstream, check_fwd_over_rev=True, **exactly)


@products_too
@pytest.mark.parametrize("c_shape", C_SHAPES)
@pytest.mark.parametrize("beta", [1.0, 0.0])
def test_gradcheck_of_a_broadcast_c(stage, c_shape, beta):
    inputs = operands(c_shape=c_shape)

    def op(a, b, c):
        return stage(a, b, c, beta=beta)

    assert gradcheck(op, inputs, check_forward_ad=True, check_batched_grad=True, **exactly)
    upstream = integers(M, N, limit=3).requires_grad_()
    assert gradgradcheck(op, inputs, upstream, **exactly)
    gradients = torch.autograd.grad(op(*inputs).sum(), inputs)
    assert [g.shape for g in gradients] == [t.shape for t in inputs]


@pytest.mark.parametrize("call", ["wrapper", "op"])
def test_gradients_of_every_stage(stage, call):
    """B76: also where the op is called directly, as torch.ops.sgemm.stageN."""
    op = stage if call == "wrapper" else getattr(torch.ops.sgemm, stage.__name__)
    inputs, upstream = operands(c_shape=(N,)), integers(M, N)
    got = torch.autograd.grad(op(*inputs, alpha=2.0, beta=-1.0), inputs, upstream)
    wanted = torch.autograd.grad(addmm(*inputs, alpha=2.0, beta=-1.0), inputs, upstream)
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


UPSTREAMS = {  # what is made of the result, and the gradient that comes back
    "sum, an expanded scalar": (torch.sum, lambda: None),
    "sum over rows": (lambda y: y.sum(0), lambda: integers(N)),
    "transposed": (torch.t, lambda: integers(N, M)),
    "every other column": (lambda y: y[:, ::2], lambda: integers(M, N // 2)),
    "an expanded row": (torch.clone, lambda: integers(N).expand(M, N)),
    "an expanded column": (torch.clone, lambda: integers(M, 1).expand(M, N)),
    "unaligned": (torch.clone, lambda: integers(M * N + 1)[1:].view(M, N)),
}
VIEWS = {
    "contiguous": lambda rows, cols: integers(rows, cols),
    "transposed": lambda rows, cols: integers(cols, rows).t(),
    "expanded": lambda rows, cols: integers(1, cols).expand(rows, cols),
    "every other row": lambda rows, cols: integers(2 * rows, cols)[::2],
    "column slice": lambda rows, cols: integers(rows, cols + 3)[:, 2:-1],
}


@products_too
@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("view", VIEWS)
def test_gradients_through_any_strides(stage, upstream, view):
    """B33: .sum() hands an expanded gradient of stride 0, .t() a transposed one."""
    inputs = [VIEWS[view](*shape).requires_grad_() for shape in ((M, K), (K, N), (M, N))]
    reduce, gradient = UPSTREAMS[upstream]
    upstream = gradient()
    got, wanted = (
        torch.autograd.grad(reduce(op(*inputs, alpha=2.0, beta=-1.0)), inputs, upstream)
        for op in (stage, addmm)
    )
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("rows", "cols", "depth"), [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0, 0)])
def test_gradients_of_empty_products(stage, rows, cols, depth):
    """B14, B16: the forward is fine, the backward throws."""
    a, b = torch.ones(rows, depth), torch.ones(depth, cols)
    a, b, c = (t.requires_grad_() for t in (a, b, torch.ones(cols)))
    stage(a, b, c, beta=2.0).sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, cols))
    assert torch.equal(b.grad, torch.full_like(b, rows))
    assert torch.equal(c.grad, torch.full_like(c, 2 * rows))


@pytest.mark.parametrize("requires", SUBSETS)
def test_backward_computes_and_saves_what_is_needed(stage, requires):
    """B79: a frozen weight still costs its GEMM, and keeps the input alive."""
    inputs = a, b, _ = operands(*requires)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = stage(*inputs, beta=2.0)
    kept = {t.data_ptr() for t in saved}
    assert kept == ({b.data_ptr()} if requires[0] else set()) | (
        {a.data_ptr()} if requires[1] else set()
    )
    with CountOps() as ops:
        result.backward(torch.ones(M, N))
    assert ops.names == [stage.__name__] * sum(requires[:2])
    assert [t.grad is not None for t in inputs] == list(requires)


def test_no_gradient_wanted_saves_nothing(stage):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        assert not stage(*operands(False, False, False)).requires_grad
        with torch.no_grad():
            assert not stage(*operands()).requires_grad
    assert saved == []


@products_too
def test_a_saved_tensor_that_changed_is_noticed(stage):
    a, b, _ = operands()
    result = stage(a * 1, x := b * 1)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@products_too
def test_gradient_penalty(stage):
    """B77: the derivative of a gradient's norm."""
    inputs = operands()
    got, wanted = (
        torch.autograd.grad(
            sum(
                g.square().sum()
                for g in torch.autograd.grad(
                    op(*inputs, alpha=0.5, beta=2.0).pow(3).sum(), inputs, create_graph=True
                )
            ),
            inputs,
        )
        for op in (stage, addmm)
    )
    assert_equal(got, wanted)


@products_too
def test_checkpoint(stage):
    inputs = operands()
    checkpoint(stage, *inputs, beta=1.0, use_reentrant=False).square().sum().backward()
    wanted = torch.autograd.grad(addmm(*inputs, beta=1.0).square().sum(), inputs)
    assert_equal([t.grad for t in inputs], wanted)


def test_training_descends(stage):
    """Two layers by the stage; each step as torch's own."""
    torch.manual_seed(0)
    x, target = torch.randn(32, 5), torch.randn(32, 2)
    first = [torch.randn(5, 16) / 2, torch.zeros(16), torch.randn(16, 2) / 4, torch.zeros(2)]

    def train(op):
        parameters = [p.clone().requires_grad_() for p in first]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        losses = []
        for _ in range(30):
            w1, b1, w2, b2 = parameters
            hidden = op(x, w1, b1, beta=1.0).relu()
            loss = nn.functional.mse_loss(op(hidden, w2, b2, beta=1.0), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    losses = train(stage)
    assert losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(train(addmm), rel=1e-3)


# ---- torch.func ----------------------------------------------------------------------------------

TRANSFORMS = {
    "grad": lambda f, x: grad(f, (0, 1, 2))(*x),
    "vjp": lambda f, x: vjp(f, *x)[1](torch.tensor(2.0)),
    "jvp": lambda f, x: jvp(f, x, tuple(t + 1 for t in x)),
    "jvp of one": lambda f, x: jvp(lambda b: f(x[0], b, x[2]), (x[1],), (x[1] + 1,)),
    "jacrev": lambda f, x: jacrev(f, (0, 1, 2))(*x),
    "jacfwd": lambda f, x: jacfwd(f, (0, 1, 2))(*x),
    "hessian": lambda f, x: hessian(f, (0, 1, 2))(*x),
    "jacrev of jacfwd": lambda f, x: jacrev(jacfwd(f, (0, 1)), (0, 1))(*x),
    "jacfwd of jacfwd": lambda f, x: jacfwd(jacfwd(f, (0, 1)), (0, 1))(*x),
    "jvp of grad": lambda f, x: jvp(grad(f, (0, 1, 2)), x, tuple(t + 1 for t in x)),
    "grad of jvp": lambda f, x: grad(lambda *y: jvp(f, y, x)[1], (0, 1, 2))(*x),
    "third": lambda f, x: jacrev(hessian(f))(*x),
}


@products_too
@pytest.mark.parametrize("c_shape", [(M, N), (N,)])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(stage, transform, c_shape):
    """B92: torch.func raises, or is silently wrong in forward mode."""
    inputs = tuple(operands(False, False, False, c_shape=c_shape))

    def cubed(op):
        return lambda a, b, c: (op(a, b, c, alpha=0.5, beta=2.0) ** 3).sum()

    got, wanted = (TRANSFORMS[transform](cubed(op), inputs) for op in (stage, addmm))
    assert any(t.count_nonzero() for t in tree_leaves(wanted))
    assert_equal(got, wanted)


def test_transforms_of_every_stage(stage):
    a, b, _ = operands(False, False, False)
    assert torch.equal(grad(lambda b: stage(a, b).sum())(b), a.sum(0)[:, None].expand(K, N))
    primal, tangent = jvp(lambda b: stage(a, b, alpha=2.0), (b,), (b + 1,))
    assert torch.equal(primal, 2 * (a @ b))
    assert torch.equal(tangent, 2 * (a @ (b + 1)))


B = 3
BATCHES = {  # in_dims of a, b and c
    "a": (0, None, None),
    "b": (None, 0, None),
    "both": (0, 0, None),
    "another dimension": (1, 0, None),
    "the last dimension": (2, 2, None),
    "a and c": (0, None, 0),
    "c alone": (None, None, 1),
    "all": (0, 1, 0),
}


def _batched(shape, dim, size=B):
    return integers(*shape) if dim is None else integers(*shape[:dim], size, *shape[dim:])


@pytest.mark.parametrize(
    ("batch", "c_shape"),
    [
        (batch, c_shape)
        for batch, c_shape in itertools.product(BATCHES, [None, (), (N,), (M, 1), (M, N)])
        if batch != "c alone" or c_shape is not None
    ],
)
def test_vmap(stage, batch, c_shape):
    """B92: a batching rule for each way to batch."""
    in_dims = BATCHES[batch]
    if c_shape is None:
        in_dims = in_dims[:2]
    elif in_dims[2] is not None:
        in_dims = (*in_dims[:2], min(in_dims[2], len(c_shape)))
    x = [_batched(s, d) for s, d in zip(((M, K), (K, N), c_shape), in_dims, strict=False)]

    def op(function):
        return vmap(lambda *t: function(*t, alpha=2.0, beta=-1.0), in_dims)(*x)

    assert torch.equal(op(stage), op(addmm))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)])
def test_vmap_over_an_empty_batch(stage, in_dims):
    x = [_batched(s, d, size=0) for s, d in zip(((M, K), (K, N)), in_dims, strict=True)]
    assert vmap(stage, in_dims)(*x).shape == (0, M, N)


@products_too
def test_vmap_of_vmap(stage):
    a, b = integers(2, M, K), integers(5, K, N)
    got = vmap(lambda x: vmap(lambda y: stage(x, y))(b))(a)
    assert torch.equal(got, a[:, None] @ b[None])


@products_too
def test_gradients_per_sample(stage):
    w, x = integers(K, N), integers(5, K)

    def loss(op):
        return lambda w, x: op(x[None], w).square().sum()

    assert_equal(*(vmap(grad(loss(op)), (None, 0))(w, x) for op in (stage, addmm)))


# ---- out= ----------------------------------------------------------------------------------------

OUT_REFUSAL = "functions with out=... arguments don't support automatic differentiation"


@pytest.mark.parametrize("which", ["a", "b", "c", "out"])
def test_out_refuses_gradients(stage, which):
    tensors = dict(zip("abc", operands(False, False, False), strict=True))
    tensors["out"] = torch.full((M, N), 5.0)
    tensors[which].requires_grad_()
    with pytest.raises(RuntimeError, match=OUT_REFUSAL):
        stage(**tensors, beta=1.0)
    assert (tensors["out"] == 5).all()
    with torch.no_grad():
        stage(**tensors, beta=1.0)
    wanted = addmm(*(tensors[k].detach() for k in "abc"), beta=1.0)
    assert torch.equal(tensors["out"].detach(), wanted)


@pytest.mark.parametrize("which", ["a", "b", "c", "out"])
def test_out_refuses_forward_mode(stage, which):
    with forward_ad.dual_level():
        tensors = dict(zip("abc", operands(False, False, False), strict=True))
        tensors["out"] = torch.zeros(M, N)
        tensors[which] = forward_ad.make_dual(tensors[which], torch.ones_like(tensors[which]))
        with pytest.raises(RuntimeError, match=OUT_REFUSAL):
            stage(**tensors, beta=1.0)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_out_refuses_transforms(stage, transform):
    b = integers(K, N)

    def op(a):
        return stage(a, b, out=torch.empty(M, N)).sum()

    call = {
        "grad": lambda: grad(op)(integers(M, K)),
        "vmap": lambda: vmap(op)(integers(B, M, K)),
        "jvp": lambda: jvp(op, (integers(M, K),), (integers(M, K),)),
    }[transform]
    with pytest.raises(RuntimeError, match=r"out=|\.out"):
        call()


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode"])
def test_out_counts_as_a_change(stage, mode, layout):
    """A tensor saved for a backward is overwritten through out=: gradients silently wrong."""
    saved = torch.ones(M, N) if layout == "contiguous" else torch.ones(N, M).t()
    weight = torch.ones(M, N, requires_grad=True)
    loss = (saved * weight).sum()
    version = saved._version
    with {"grad": torch.enable_grad, "no_grad": torch.no_grad}.get(mode, torch.inference_mode)():
        stage(integers(M, K), integers(K, N), out=saved)
    assert saved._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- inference and autocast ----------------------------------------------------------------------


def test_inference_mode(stage):
    x = operands()
    with torch.inference_mode():
        result = stage(*x, beta=2.0)
        out = stage(*x, beta=2.0, out=torch.empty(M, N))
    assert result.is_inference()
    assert torch.equal(result, addmm(*x, beta=2.0).detach())
    assert torch.equal(result, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(stage, dtype):
    """B90: a stage stays FP32, and says so where an earlier layer hands it half precision."""
    a, b, c = operands(c_shape=(N,))
    with torch.autocast("cpu", dtype):
        result = stage(a, b, c, beta=1.0)
        assert result.dtype == torch.float32
        assert torch.equal(result, stage(a, b, c, beta=1.0))
        with pytest.raises(RuntimeError, match=r"a must be float32, got (Half|BFloat16)"):
            stage(a.to(dtype), b)
        with pytest.raises(RuntimeError, match=r"b must be float32, got (Half|BFloat16)"):
            stage(a, b.to(dtype))
    result.sum().backward()
    assert a.grad.dtype == torch.float32


# ---- torch.compile and torch.export --------------------------------------------------------------


@pytest.fixture
def compiled():
    """compiled(f, **options): f by torch.compile in one graph, nothing left of other tests."""
    torch._dynamo.reset()

    def compile_(function, backend="aot_eager", fullgraph=True, **options):
        return torch.compile(function, backend=backend, fullgraph=fullgraph, **options)

    yield compile_
    torch._dynamo.reset()


@products_too
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("c_shape", [None, (M, N), (N,)])
def test_compiled_forward_and_backward(stage, compiled, view, c_shape):
    """B85: strides of the fake differ from the real ones; B76: gradients are dropped."""
    inputs = [VIEWS[view](M, K), VIEWS[view](K, N)]
    inputs += [] if c_shape is None else [integers(*c_shape)]
    inputs = [t.requires_grad_() for t in inputs]

    def function(*x):
        return (stage(*x, alpha=0.5, beta=2.0) ** 2).relu()

    got, wanted = compiled(function)(*inputs), function(*inputs)
    assert torch.equal(got, wanted)
    assert_equal(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs))


def test_compiled_by_inductor(compiled):
    """The default backend, once: two stages, forward and backward."""
    inputs = operands(c_shape=(N,))

    def function(a, b, c):
        hidden = STAGES["stage2"](a, b, c, beta=1.0).sin()
        return STAGES["stage3b"](hidden.t(), hidden, alpha=0.5)

    got, wanted = compiled(function, backend="inductor")(*inputs), function(*inputs)
    assert_equal(got, wanted)
    assert_equal(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs))


@products_too
@pytest.mark.parametrize("transform", ["grad", "jvp", "hessian", "vmap"])
def test_compiled_transforms(stage, compiled, transform):
    a, b, c = operands(False, False, False)

    def function(a, b, c):
        def f(a, b, c):
            return (stage(a, b, c, beta=2.0) ** 3).sum()

        if transform == "vmap":
            return vmap(f, (0, None, None))(a.expand(B, M, K), b, c)
        return TRANSFORMS[transform](f, (a, b, c))

    assert_equal(compiled(function)(a, b, c), function(a, b, c))


@products_too
def test_compiled_for_any_batch_size(stage, compiled):
    """B88: compiled again for each M, or one M is burnt in."""
    counter = CompileCounterWithBackend("aot_eager")
    bias = integers(N)
    function = compiled(lambda x, w: stage(x, w, bias, beta=1.0) * 2, counter, dynamic=True)
    weight = integers(K, N).requires_grad_()

    def run(rows):
        x = integers(rows, K)
        got = function(x, weight)
        assert torch.equal(got, 2 * (x @ weight + bias))
        (gradient,) = torch.autograd.grad(got.sum(), weight)
        assert torch.equal(gradient, 2 * x.sum(0)[:, None].expand(K, N))

    run(2)
    graphs = counter.frame_count
    for rows in (17, 64, N, K, 129, 4096):
        run(rows)
        assert counter.frame_count == graphs, f"compiled again for {rows} rows"
    for rows in (0, 1):  # torch makes a graph of its own for these
        run(rows)
    assert counter.frame_count <= 3 * graphs


OUTS = {
    "new": lambda buffer: buffer.new_zeros(M, N),
    "an argument": lambda buffer: buffer,
    "rows of an argument": lambda buffer: buffer[1 : M + 1],
    "columns of an argument": lambda buffer: buffer[:, 1 : N + 1],
    "transposed": lambda buffer: buffer.t(),
}


@two_stages
@pytest.mark.parametrize(
    ("kind", "shape", "fullgraph"),
    [
        ("new", (), True),
        ("an argument", (M, N), True),
        ("rows of an argument", (M + 2, N), True),
        # torch.compile takes no out= with gaps, of any op: it breaks the graph there.
        ("columns of an argument", (M, N + 3), False),
        ("transposed", (N, M), False),
    ],
)
def test_compiled_out(stage, compiled, kind, shape, fullgraph):
    """B83: eager and compiled must agree on the result and on what it was written into."""

    def function(a, b, c, buffer):
        out = OUTS[kind](buffer)
        before = out + 0
        stage(a, b, c, beta=2.0, out=out)
        return out + 1, before

    x, buffers = operands(False, False, False), [torch.ones(shape) for _ in range(2)]
    got = compiled(function, fullgraph=fullgraph)(*x, buffers[0])
    wanted = function(*x, buffers[1])
    assert_equal(got, wanted)
    assert torch.equal(buffers[0], buffers[1])
    assert torch.equal(wanted[0], addmm(*x, beta=2.0) + 1)


@two_stages
def test_compiled_out_refuses_gradients(stage, compiled):
    """Or gives them; never drops them."""

    def function(a, b):
        out = torch.empty(M, N)
        stage(a, b, out=out)
        return out * 1

    a, b, _ = operands()
    with pytest.raises(Exception, match=r"arguments don.*t support automatic differentiation"):
        compiled(function)(a, b)


LAYOUTS = {
    "plain": lambda: (integers(M, K), integers(K, N)),
    "with c": lambda: (integers(M, K), integers(K, N), integers(N)),
    "transposed": lambda: (integers(K, M).t(), integers(N, K).t(), integers(N, M).t()),
    "expanded": lambda: (integers(1, K).expand(M, K), integers(K, 1).expand(K, N)),
    "padded": lambda: (integers(M, K + 2)[:, 1:-1], integers(K, N + 5)[:, :N]),
    "no rows": lambda: (integers(0, K), integers(K, N), integers(N)),
    "no columns": lambda: (integers(M, K), integers(K, 0)),
    "empty sum": lambda: (integers(M, 0), integers(0, N), integers(M, N)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_have_the_real_strides(stage, layout):
    """B85: compiled code asserts, or reads the result in the wrong order."""
    real_inputs = LAYOUTS[layout]()
    real = stage(*real_inputs, beta=1.0)
    meta = stage(*(t.to("meta") for t in real_inputs), beta=1.0)
    with FakeTensorMode() as mode:
        fake = stage(*(mode.from_tensor(t) for t in real_inputs), beta=1.0)
    for result in (fake, meta):
        assert (result.shape, result.stride()) == (real.shape, real.stride())
        assert result.dtype == real.dtype
        assert result.storage_offset() == real.storage_offset()
    assert fake.device == real.device
    assert meta.device.type == "meta"


@pytest.mark.parametrize("layout", ["plain", "with c", "no rows", "transposed"])
def test_opcheck(stage, layout):
    packet = getattr(torch.ops.sgemm, stage.__name__)
    inputs = LAYOUTS[layout]()
    if layout == "with c":
        inputs = tuple(t.requires_grad_() for t in inputs)
    torch.library.opcheck(packet.default, inputs, {"alpha": 2.0, "beta": 0.5})
    detached = [t.detach() for t in inputs]
    out = torch.empty(detached[0].shape[0], N)
    torch.library.opcheck(packet.out, detached, {"beta": 0.5, "out": out})


@two_stages
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_of_every_layout(stage, layout):
    packet = getattr(torch.ops.sgemm, stage.__name__)
    inputs = tuple(t.requires_grad_() for t in LAYOUTS[layout]())
    torch.library.opcheck(packet.default, inputs, {"alpha": 2.0, "beta": 0.5})


@two_stages
def test_export_with_a_dynamic_batch(stage):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(integers(K, N))
            self.bias = nn.Parameter(integers(N))

        def forward(self, x):
            return stage(x, self.weight, self.bias, beta=1.0).relu()

    layer = Layer()
    batch = torch.export.Dim("batch")
    program = torch.export.export(layer, (integers(5, K),), dynamic_shapes={"x": {0: batch}})
    assert f"sgemm.{stage.__name__}" in str(program.graph)
    for rows in (2, 5, 17):
        x = integers(rows, K)
        assert torch.equal(program.module()(x), layer(x))


# ---- as a part of a model ------------------------------------------------------------------------


@products_too
def test_parameters_subclasses_and_copies(stage):
    weight = nn.Parameter(integers(K, N))
    x = integers(M, K)
    require_right(stage, x, weight)
    stage(x, weight).sum().backward()
    twin = copy.deepcopy(weight)
    assert torch.equal(weight.grad, x.sum(0)[:, None].expand(K, N))
    assert torch.equal(stage(x, twin), stage(x, weight))
