"""What only a GPU can show of the product ops: every kernel at its edges, which kernels run,
memory, parts of K in graphs, sizes that 32 bits do not hold."""

import itertools

import arena
import check
import pytest
import torch
from test_gpu import allocations, device_work, randn

import torch_sgemm as ts

pytestmark = pytest.mark.gpu

ops = torch.ops.sgemm
TILES = {
    "128x256": (128, 256),
    "64x128": (64, 128),
    "64x64": (64, 64),
    "32x128": (32, 128),
    "128x32": (128, 32),
    "32x32": (32, 32),
}
SKINNY = {"dot": (8, 130), "axpy": (8, 130)}
#: Of A and B: row-major and column-major, 16 bytes aligned, not aligned, not adjacent.
LAYOUTS = {
    "chunks": ("padded_by_16_bytes", "transposed"),
    "neighbours": ("padded", "padded_transposed"),
    "any": ("every_other_column", "every_other_column"),
}


def shapes(BM, BN):
    return [(1, BN + 1, 20), (BM, BN, 16), (BM + 3, BN - 1, 47), (2 * BM - 1, 1, 130), (BM, 4, 1)]


@pytest.mark.parametrize("access", LAYOUTS)
@pytest.mark.parametrize("turned", list(itertools.product((0, 1), repeat=2)))
@pytest.mark.parametrize("kernel", [*TILES, *SKINNY])
def test_every_kernel_at_its_edges(kernel, turned, access):
    """In each layout, with K whole and in parts; nothing beside the operands is read."""
    ran = 0
    for M, N, K in shapes(*(TILES | SKINNY)[kernel]):
        if kernel in SKINNY:
            M = min(M, 8)
        M, N, K = (-(-size // 4) * 4 if access == "chunks" else size for size in (M, N, K))
        a, b = (
            arena.place(randn(*size), LAYOUTS[access][turn])
            for size, turn in zip(((M, K), (K, N)), turned, strict=True)
        )
        c = randn(N)
        for parts in (1, 3):
            try:
                result = ops._gemm_by(a.view, b.view, c, -0.5, 2.0, kernel, parts)
            except RuntimeError as error:
                why = str(error)
            else:
                ran += 1
                reference = check.reference(a.view, b.view, c, 2.0, -0.5)
                check.require(result, reference, f"{kernel}, {M} x {N} x {K}, {parts} parts")
                continue
            assert "cannot compute" in why
    if access != "any" or kernel == "64x64":
        possible = kernel in TILES or turned[1] == (kernel == "dot")
        ragged = kernel != "128x256" or access == "chunks"
        assert ran or not (possible and ragged)


def is_ours(name):
    return "sgemm::matmul::" in name


@pytest.mark.parametrize("shape", [(70, 130, 260), (3, 300, 500), (40, 40, 9000)])
@pytest.mark.parametrize("layout_b", arena.LAYOUTS)
@pytest.mark.parametrize("layout_a", arena.LAYOUTS)
def test_only_our_kernels_run_and_nothing_is_copied(layout_a, layout_b, shape):
    """pytorch#112771: an unaligned view was copied in every call."""
    M, N, K = shape
    a = arena.place(randn(M, K), layout_a).view
    b = arena.place(randn(K, N), layout_b).view
    out = torch.empty(N, M, device="cuda").t()
    for call in (lambda: ts.mm(a, b), lambda: ts.addmm(a[:, :1], a, b, out=out)):
        names = device_work(call)
        assert 1 <= len(names) <= 2
        assert all(map(is_ours, names)), names


def test_a_training_step_of_linear_runs_three_products_and_a_sum():
    x, w, bias = randn(4, 50, 64).requires_grad_(), randn(96, 64).requires_grad_(), randn(96)
    bias.requires_grad_()
    upstream = randn(4, 50, 96)

    def step():
        torch.autograd.grad(ts.linear(x, w, bias), (x, w, bias), upstream)

    names = device_work(step)
    ours = [name for name in names if is_ours(name) and "add_parts" not in name]
    others = [name for name in names if not is_ours(name)]
    assert len(ours) == 3, names
    assert len(others) == 1, names
    assert "reduce" in others[0]


@pytest.mark.parametrize("needs", ["x", "w"])
def test_only_the_products_that_are_asked_for_run(needs):
    """pytorch#42371, apex#1517: a frozen weight's gradient was computed."""
    x, w = randn(64, 64).requires_grad_(needs == "x"), randn(64, 64).requires_grad_(needs == "w")
    upstream = randn(64, 64)
    for op in (ts.linear, ts.mm):
        out = op(x, w)
        names = device_work(lambda out=out: out.backward(upstream, retain_graph=True))
        assert sum(is_ours(name) and "add_parts" not in name for name in names) == 1


@pytest.mark.parametrize(
    ("M", "N", "K"), [(512, 512, 512), (16, 16, 65536), (1, 4096, 4096), (130, 70, 9000)]
)
def test_the_memory_is_what_explain_says(M, N, K):
    a, b = randn(M, K), randn(K, N)
    plan = ts.explain(a, b)
    ts.mm(a, b)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = ts.mm(a, b)
    peak = torch.cuda.max_memory_allocated() - before

    def rounded(size):
        return -(-size // 512) * 512

    assert peak == rounded(result.nbytes) + rounded(plan.workspace_bytes)
    assert allocations(lambda: ts.mm(a, b)) == 1 + (plan.parts > 1)


@pytest.mark.parametrize(
    ("M", "N", "K"), [(16, 16, 65536), (8, 384, 7168), (1024, 832, 4096), (1, 4096, 14336)]
)
def test_parts_of_k_are_added_up_in_order(M, N, K):
    """CUDALibrarySamples#243, vllm#56887: atomics differ from run to run; aiter#4494, cutlass#1296:
    counters that are not reset hang; cutlass#3538: partial sums of the call before."""
    a, b = randn(M, K), randn(K, N)
    first = ts.mm(a, b)
    check.require(first, check.reference(a, b))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ts.mm(a, b)
    other, stream = randn(M, K), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(25):
        with torch.cuda.stream(stream):  # at once with
            elsewhere = ts.mm(other, b)
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, first)
        assert torch.equal(ts.mm(a, b), first)
    torch.cuda.synchronize()
    check.require(elsewhere, check.reference(other, b))


def test_a_graph_outlives_another_that_is_freed():
    """aiter#5393: a workspace of one graph's memory is used by the other."""
    a, b = randn(16, 65536), randn(65536, 16)
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(ts.mm(a, b))
    expected = ts.mm(a, b)
    graphs[0].reset()
    junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    for _ in range(3):
        graphs[1].replay()
        assert torch.equal(ts.mm(a, b), expected)
        assert torch.equal(results[1], expected)
    del junk


def test_batches_beyond_2_to_the_31_elements():
    """pytorch#196431: batch times stride in 32 bits wrote before the buffer."""
    a, b = randn(8209, 512, 1), randn(8209, 1, 512)
    result = ts.bmm(a, b)
    for batch in (slice(0, 2), slice(8189, 8209)):
        check.require(result[batch], check.reference(a[batch], b[batch]))


def test_an_unaligned_weight_of_1_gb_is_used_in_place():
    """pytorch#112771."""
    w = randn((1 << 28) + 1)[1:].view(1 << 14, 1 << 14)
    x = randn(2, 1 << 14)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = ts.linear(x, w)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    check.require(result[:, :50], check.reference(x, w[:50].t()))


def test_deterministic_mode_is_obeyed_by_being_so():
    torch.use_deterministic_algorithms(True)
    try:
        x, w = randn(16, 65536).requires_grad_(), randn(65536, 16).requires_grad_()
        first = torch.autograd.grad(ts.mm(x, w).sum(), (x, w))
        for _ in range(5):
            again = torch.autograd.grad(ts.mm(x, w).sum(), (x, w))
            assert all(torch.equal(p, q) for p, q in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_kernel_that_cannot_is_told():
    a, b = randn(9, 20), randn(20, 30)
    for kernel in ("dot", "nonsense"):
        with pytest.raises(RuntimeError, match=f'kernel "{kernel}" cannot compute a of shape'):
            ops._gemm_by(a, b, None, 0.0, 1.0, kernel, 1)
    with pytest.raises(RuntimeError, match="parts must be from 1 to 65535, got 0"):
        ops._gemm_by(a, b, None, 0.0, 1.0, "64x64", 0)
