"""mm, addmm, bmm, baddbmm, linear and matmul under torch.compile and torch.export: one graph, the
eager results, no graph of its own for each batch size. Ids like B88 are rows of the bug list."""

import pytest
import torch
import torch.nn.functional as F
from arena import integers
from torch import nn
from torch._dynamo import mark_dynamic
from torch._dynamo.testing import CompileCounterWithBackend

import torch_sgemm as ts

M, K, N = 6, 4, 5
NAN = float("nan")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def backend(device):
    """One that is quick to compile on a CPU, and the one that is used on a GPU."""
    return "aot_eager" if device == "cpu" else "inductor"


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


class Net(nn.Module):
    """Every op once, on leading dimensions of any number."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.w = nn.Parameter(integers(N, K, device=device, limit=2))
        self.bias = nn.Parameter(integers(N, device=device, limit=2))
        self.square = nn.Parameter(integers(N, N, device=device, limit=2))

    def forward(self, x):
        x = ts.linear(x, self.w, self.bias)
        rows = x.flatten(0, -2)
        x = ts.matmul(x, self.square) + ts.mm(rows, self.square.t()).view(x.shape)
        x = x + ts.addmm(self.bias, rows, self.square, beta=0.5, alpha=-1.0).view(x.shape)
        scores = ts.bmm(self.square.unsqueeze(0).mT, self.square.unsqueeze(0))
        scores = ts.baddbmm(self.bias, scores, scores, beta=2.0, alpha=0.125)
        return ts.matmul(x, scores[0].mT).relu()


def assert_same(f, g, x, parameters):
    got, want = f(x), g(x)
    assert torch.equal(got, want)
    upstream = torch.ones_like(got)
    got, want = (torch.autograd.grad(y, parameters, upstream) for y in (got, want))
    for p, q in zip(got, want, strict=True):
        torch.testing.assert_close(p, q, rtol=0.0, atol=1e-5 * q.abs().max().item())


@pytest.mark.parametrize("shape", [(M, K), (2, 3, K)])
def test_a_model_of_all_ops(shape, device, backend):
    """B76, B85: no gradients, or other strides than were promised."""
    net = Net(device)
    x = integers(*shape, device=device, limit=2).requires_grad_()
    assert_same(compiled(net, backend), net, x, [x, *net.parameters()])


def test_any_batch_size_is_one_graph(device, backend):
    """B88: compiled again for each M, or one M is burnt in."""
    counter = CompileCounterWithBackend(backend)
    net = Net(device)
    function = compiled(net, counter)
    frames = []
    for rows in (7, 2, 17, 64, K, N, 129, 1024):
        x = integers(rows, 3, K, device=device, limit=1)
        mark_dynamic(x, 0)
        assert_same(function, net, x, list(net.parameters()))
        frames.append(counter.frame_count)
    assert frames == [frames[0]] * len(frames)
    for rows in (0, 1):  # torch makes a graph of its own for these
        x = integers(rows, 3, K, device=device)
        assert torch.equal(function(x), net(x))


@pytest.mark.parametrize("op", ["addmm", "baddbmm"])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_what_zero_multiplies_is_not_read(op, alpha, beta, device, backend):
    """B51: compiled addmm spread the NaN of what it should not read; eager did not."""

    def function(c, a, b):
        return getattr(ts, op)(c, a, b, beta=beta, alpha=alpha)

    sizes = ((N,), (M, K), (K, N)) if op == "addmm" else ((N,), (2, M, K), (2, K, N))
    c, a, b = (integers(*s, device=device) for s in sizes)
    if beta == 0:
        c = torch.full_like(c, NAN)
    if alpha == 0:
        a = torch.full_like(a, NAN)
    got, want = compiled(function, backend)(c, a, b), function(c, a, b)
    assert want.isfinite().all()
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["new", "argument", "rows of an argument", "input"])
@pytest.mark.parametrize("op", ["mm", "addmm", "linear"])
def test_out(op, kind, device, backend):
    """B83: eager and compiled must agree on the result and on what it was written into."""
    a, b, c = (integers(*s, device=device) for s in ((M, K), (K, N), (M, N)))

    def function(a, b, c, buffer):
        out = {
            "new": torch.empty_like(c),
            "argument": buffer,
            "rows of an argument": buffer[:M],
            "input": c,
        }[kind]
        if kind != "input" and kind != "new":
            out = out[:M]
        if op == "mm":
            ts.mm(a, b, out=out)
        elif op == "addmm":
            ts.addmm(c, a, b, beta=2.0, out=out)
        else:
            torch.ops.sgemm.linear.out(a, b.t(), None, out=out)
        return out + 1

    first, second = ([a, b, c.clone(), torch.ones(M + 2, N, device=device)] for _ in range(2))
    assert torch.equal(compiled(function, backend)(*first), function(*second))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_the_precision_that_is_set_is_guarded():
    """A default that compiled code does not look at again would be burnt in."""
    seen = []

    def backend(graph, inputs):
        seen.extend(
            node.kwargs["precision"] for node in graph.graph.nodes if "precision" in node.kwargs
        )
        return graph

    def function(a, b):
        first = ts.mm(a, b)
        with ts.precision("ieee"):
            second = ts.mm(a, b)
            with ts.precision("auto"):
                third = ts.mm(a, b)
        return first + second + third + ts.mm(a, b, precision="auto") + ts.mm(a, b)

    f, a, b = compiled(function, backend), integers(M, K), integers(K, N)
    assert torch.equal(f(a, b), 5 * (a @ b))
    assert seen == ["auto", "ieee", "auto", "auto", "auto"]
    with ts.precision("ieee"):
        f(a, b)
    assert seen[5:] == ["ieee", "ieee", "auto", "auto", "ieee"]
    f(a, b)
    assert len(seen) == 10
    assert ts._precision.resolved(None) == "auto"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device, backend):
    """B90: within and around the compiled function as in eager mode."""
    x, w = integers(3, M, K, device=device), integers(N, K, device=device).requires_grad_()

    def function(x, w):
        return (
            ts.linear(x, w),
            ts.matmul(x.to(dtype), w.t(), precision="ieee"),
            torch.ops.sgemm.mm(x[0].to(dtype), w.t()),
        )

    def inside(x, w):
        with torch.autocast(device, dtype):
            return function(x, w)

    for f, around in ((inside, False), (function, True)):
        with torch.autocast(device, dtype, enabled=around):
            got, want = compiled(f, backend)(x, w), f(x, w)
        assert [t.dtype for t in got] == [dtype, torch.float32, torch.float32]
        assert all(torch.equal(g, v) for g, v in zip(got, want, strict=True))
        g, v = (torch.autograd.grad(sum(t.float().sum() for t in y), w) for y in (got, want))
        assert torch.equal(g[0], v[0])


def test_other_dtypes_are_torchs(device, backend):
    x, w = integers(3, M, K, device=device).double(), integers(N, K, device=device).double()

    def function(x, w):
        return ts.linear(x, w) + ts.matmul(x, w.t())

    assert torch.equal(compiled(function, backend)(x, w), 2 * F.linear(x, w))


@pytest.mark.parametrize("transform", ["per-sample gradients", "hessian", "jvp"])
def test_transforms(transform):
    w, bias, x = integers(N, K, limit=2), integers(N, limit=2), integers(3, M, K, limit=2)

    def of(linear, w, x):
        def loss(w, x):
            return (linear(x, w, bias) ** 3).sum()

        if transform == "hessian":
            return torch.func.hessian(loss)(w, x)
        if transform == "jvp":
            return torch.func.jvp(loss, (w, x), (w + 1, x))
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)

    got = compiled(lambda w, x: of(ts.linear, w, x))(w, x)
    torch.testing.assert_close(got, of(F.linear, w, x))


@pytest.mark.parametrize("mode", ["plain", "op"])
def test_compiled_backward_of_an_eager_forward(mode):
    """An AttributeError; or a graph made for other scalars, layouts or needs serves again."""

    def compiler(graph):
        return torch.compile(graph, backend="eager", fullgraph=True)

    addmm = ts.addmm if mode == "plain" else torch.ops.sgemm.addmm
    linear = ts.linear if mode == "plain" else torch.ops.sgemm.linear
    with torch._dynamo.config.patch(recompile_limit=64):
        for alpha in (1.0, 2.0, 3.0):
            for needs_x, turned in ((True, False), (False, True), (True, True)):
                x = integers(M, K, limit=2).requires_grad_(needs_x)
                w = integers(K, N, limit=2)
                w = (w.t().contiguous().t() if turned else w).requires_grad_()
                bias = integers(N, limit=2).requires_grad_()
                of = [t for t in (x, w, bias) if t.requires_grad]
                product = torch.addmm(bias, x, w, alpha=alpha, beta=2 * alpha)
                want = torch.autograd.grad(product.sum(), of)
                with torch._dynamo.compiled_autograd._enable(compiler):
                    addmm(bias, x, w, alpha=alpha, beta=2 * alpha).sum().backward()
                assert all(torch.equal(t.grad, g) for t, g in zip(of, want, strict=True))
        x, w = integers(2, 3, K), integers(N, K).requires_grad_()
        with torch._dynamo.compiled_autograd._enable(compiler):
            linear(x, w).sum().backward()
        assert torch.equal(w.grad, x.sum((0, 1)).expand(N, K))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("grads", [True, False])
def test_what_is_traced_is_differentiable(grads, device):
    """B76: the twins of plain eager mode are not, and must not get into a graph."""
    net = Net(device)
    x = integers(2, 3, K, device=device, limit=1)
    with torch.set_grad_enabled(grads):
        traced = torch.jit.trace(net, x)
    assert "sgemm::_" not in str(traced.inlined_graph)
    assert_same(traced, net, x, list(net.parameters()))


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_batch(strict):
    net = Net()
    batch = torch.export.Dim("batch")
    x = integers(5, 3, K, limit=1)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},), strict=strict)
    graph = str(program.graph)
    assert all(f"sgemm.{op}." in graph for op in ("mm", "addmm", "bmm", "baddbmm", "linear"))
    for rows in (2, 5, 17):
        x = integers(rows, 3, K, limit=1)
        assert torch.equal(program.module()(x), net(x))


@pytest.mark.parametrize(
    "mode", ["default", pytest.param("reduce-overhead", marks=pytest.mark.gpu)]
)
def test_by_inductor(mode, device):
    """The default backend; on a GPU by graphs as well, of which each call has new inputs."""
    if mode == "reduce-overhead" and device == "cpu":
        pytest.skip("CUDA graphs")
    net = Net(device)
    function = torch.compile(net, fullgraph=True, mode=mode)
    for _ in range(4):
        x = integers(2, 3, K, device=device, limit=2).requires_grad_()
        assert_same(function, net, x, [x, *net.parameters()])
