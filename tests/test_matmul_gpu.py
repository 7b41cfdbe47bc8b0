"""What only a GPU can show of the product ops as a part of PyTorch: which kernels a call, its
backward and its batching rule run, and that none of them waits or copies."""

import itertools

import check
import pytest
import torch
import torch.nn.functional as F
from gpu_work import device_work, is_ours, randn, require_ours_alone

import torch_sgemm as ts

pytestmark = pytest.mark.gpu

B, M, K, N = 3, 70, 130, 90


def turned(*shape):
    return randn(*shape).mT.contiguous().mT


def padded(*shape):
    return randn(*shape[:-1], shape[-1] + 5)[..., 1:-4]


def steps(*shape):
    return randn(*shape[:-1], 2 * shape[-1])[..., ::2]


LAYOUTS = {"contiguous": randn, "turned": turned, "padded": padded, "steps": steps}
CALLS = {
    "bmm": lambda make_a, make_b: (ts.bmm, make_a(B, M, K), make_b(B, K, N)),
    "bmm of one for all": lambda make_a, make_b: (
        ts.bmm,
        make_a(M, K).expand(B, M, K),
        make_b(B, K, N),
    ),
    "baddbmm": lambda make_a, make_b: (ts.baddbmm, randn(N), make_a(B, M, K), make_b(B, K, N)),
    "linear": lambda make_a, make_b: (ts.linear, make_a(M, K), make_b(N, K), randn(N)),
    "linear of three dimensions": lambda make_a, make_b: (
        ts.linear,
        make_a(B, M, K),
        make_b(N, K),
    ),
    "matmul": lambda make_a, make_b: (ts.matmul, make_a(B, M, K), make_b(K, N)),
    "matmul that broadcasts": lambda make_a, make_b: (
        ts.matmul,
        make_a(1, M, K),
        make_b(B, K, N),
    ),
    "vmap": lambda make_a, make_b: (
        torch.vmap(ts.mm, (0, None)),
        make_a(B, M, K),
        make_b(K, N),
    ),
}


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids="-".join)
@pytest.mark.parametrize("call", CALLS)
def test_only_our_kernels_run_and_nothing_is_copied(call, layouts):
    """pytorch#112771: an unaligned view was copied in every call."""
    function, *operands = CALLS[call](*(LAYOUTS[layout] for layout in layouts))
    require_ours_alone(lambda: function(*operands))


@pytest.mark.parametrize("way", ["function", "op"])
@pytest.mark.parametrize("op", ["linear", "linear of three dimensions", "mm", "matmul"])
def test_accumulating_gradients_copies_none(op, way):
    """Gradients come in their parameters' layout."""
    x = randn(M, K) if op in ("linear", "mm") else randn(B, M, K)
    w = torch.nn.Parameter(randn(N, K) if "linear" in op else randn(K, N))
    if op == "matmul" and way == "op":
        pytest.skip("a function alone")
    name = op.split()[0]
    function = getattr(ts if way == "function" else torch.ops.sgemm, name)
    upstream = torch.ones(*x.shape[:-1], N, device="cuda")

    def step():
        w.grad = None
        function(x, w).backward(upstream)

    names = device_work(step)
    assert all(map(is_ours, names)), names
    want = x.reshape(-1, K).sum(0).expand(N, K)
    torch.testing.assert_close(w.grad, want if "linear" in op else want.t(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("call", [c for c in CALLS if c != "vmap"])
def test_the_short_way_and_the_op_agree(call):
    """In plain eager mode twins without derivatives are called; under a transform the ops."""
    function, *operands = CALLS[call](randn, turned)
    operands = [t.detach().requires_grad_() for t in operands]
    short = function(*operands)
    long, pullback = torch.func.vjp(function, *(t.detach() for t in operands))
    assert short.stride() == long.stride()
    upstream = randn(*short.shape)
    gradients = torch.autograd.grad(short, operands, upstream)
    for x, y in zip((short, *gradients), (long, *pullback(upstream)), strict=True):
        assert (x - y).norm() <= 1e-6 * y.norm()


@pytest.mark.parametrize("call", CALLS)
def test_nothing_waits_for_the_gpu(call):
    """Forward, backward and double backward."""
    function, *operands = CALLS[call](randn, turned)
    operands = [t.detach().requires_grad_() for t in operands]

    def step():
        result = function(*operands)
        first = torch.autograd.grad(result.square().sum(), operands, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), operands)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_meet_the_error_rule():
    """Each is a product of its own, with K that of the forward or another."""
    x, w, bias = randn(B, M, K).requires_grad_(), randn(N, K).requires_grad_(), randn(N)
    upstream = randn(B, M, N)
    rows, up = x.detach().view(-1, K), upstream.view(-1, N)
    for function in (ts.linear, torch.ops.sgemm.linear):
        gx, gw = torch.autograd.grad(function(x, w, bias), (x, w), upstream)
        check.require(gx.view(-1, K), check.reference(up, w.detach()))
        check.require(gw, check.reference(up.t(), rows))


def test_a_captured_training_step_follows_new_inputs():
    """pytorch#114048: kernels vanish from a graph; aiter#5393: memory of it is used by others."""
    w, bias = (torch.nn.Parameter(t) for t in (randn(N, K), randn(N)))
    x = randn(B, M, K)

    def step():
        loss = ts.matmul(ts.linear(x, w, bias).relu(), w).square().mean()
        return torch.autograd.grad(loss, (w, bias))

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        x.normal_()
        want = step()
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(got, w) for got, w in zip(captured, want, strict=True))


def test_a_model_trains_as_torchs_does():
    x, target = randn(64, K), randn(64, 3)
    first = [randn(32, K) / K**0.5, torch.zeros(32, device="cuda"), randn(3, 32) / 6]

    def train(linear):
        w1, b1, w2 = parameters = [t.clone().requires_grad_() for t in first]
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        losses = []
        for _ in range(30):
            loss = F.mse_loss(linear(linear(x, w1, b1).relu(), w2), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return torch.stack(losses).tolist()

    losses = train(ts.linear)
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(train(F.linear), rel=1e-3)
