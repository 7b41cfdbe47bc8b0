"""What only a GPU can show of the product ops: every kernel at its edges, which kernels run,
memory, parts of K in graphs, sizes that 32 bits do not hold."""

import itertools
import math

import arena
import check
import pytest
import torch
from adapters import PRODUCTS
from gpu_work import allocations, device_work, is_ours, randn, require_ours_alone, two_gpus

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
#: "k": for A with neighbours along k.
RINGS = {
    name + k: size
    for name, size in {
        "ring256x128": (256, 128),
        "ring128x128": (128, 128),
        "ring128x64": (128, 64),
        "ring64x64": (64, 64),
    }.items()
    for k in ("", "k")
}
SKINNY = {"dot": (8, 130), "axpy": (8, 130)}
KERNELS = TILES | RINGS | SKINNY
#: Of A and B: row-major and column-major, 16 bytes aligned, not aligned, not adjacent.
LAYOUTS = {
    "chunks": ("padded_by_16_bytes", "transposed"),
    "neighbours": ("padded", "padded_transposed"),
    "any": ("every_other_column", "every_other_column"),
}


def shapes(BM, BN):
    return [(1, BN + 1, 20), (BM, BN, 16), (BM + 3, BN - 1, 47), (2 * BM - 1, 1, 130), (BM, 4, 1)]


@pytest.fixture(autouse=True)
def needs_hopper(request):
    used = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    if {*RINGS} & {*map(str, used)} and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def here(kernels):
    """Those that this GPU runs."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    return [kernel for kernel in kernels if hopper or kernel not in RINGS]


@pytest.mark.parametrize("access", LAYOUTS)
@pytest.mark.parametrize("turned", list(itertools.product((0, 1), repeat=2)))
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_at_its_edges(kernel, turned, access):
    """In each layout, with K whole and in parts; nothing beside the operands is read."""
    ran = 0
    for M, N, K in shapes(*KERNELS[kernel]):
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
    if kernel in RINGS:
        assert ran or (kernel.endswith("k") and (turned[0] or access != "chunks"))
    elif access != "any" or kernel == "64x64":
        possible = kernel in TILES or turned[1] == (kernel == "dot")
        ragged = kernel != "128x256" or access == "chunks"
        assert ran or not (possible and ragged)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_keeps_classes_of_numbers(kernel, parts):
    """B52: NaN of an addend that beta = 0 leaves out; B54: zero times NaN beyond an edge; B55, B57:
    infinities become NaN, or NaNs infinite; B59: subnormals are flushed."""
    M, N, K = *((8, 132) if kernel in SKINNY else (size + 4 for size in KERNELS[kernel])), 300
    a = arena.place(randn(M, K), "padded_by_16_bytes")
    b = arena.place(randn(K, N), "transposed" if kernel == "dot" else "padded_by_16_bytes")
    a.view[0, 0], a.view[1, 1], a.view[2, 2], b.view[2, 7] = math.inf, -math.inf, math.inf, 0.0
    a.view[3:6, 3].view(torch.int32).copy_(torch.tensor([0x7F800001, -0x7FFFFF, 0x7FC00000]))
    a.view[6] = 1e-40
    result = ops._gemm_by(
        a.view, b.view, torch.full((N,), math.nan).cuda(), 0.0, 2.0, kernel, parts
    )
    check.require(result, check.reference(a.view, b.view, alpha=2.0))
    assert result[6].count_nonzero() == N


STRIDE = 5 << 26  # seven of them are more than 2^31 elements
FAR = {
    **{f"rows of {name}": (name, (8, 8), (STRIDE, 1)) for name in "abc"},
    **{f"columns of {name}": (name, (8, 8), (1, STRIDE)) for name in "abc"},
    **{f"batches of {name}": (name, (3, 8, 8), (1 << 30, 8, 1)) for name in "abc"},
}


@pytest.mark.parametrize("far", FAR)
def test_offsets_beyond_32_bits_in_every_kernel(far):
    """B36: stride times index wraps at 2^31 elements."""
    name, size, strides = FAR[far]
    view = torch.empty(7 * STRIDE + 64, device="cuda").as_strided(size, strides)
    ran = []
    for kernel in here(KERNELS):
        x = {n: arena.integers(*size, device="cuda") for n in "abc"}
        if kernel == "dot":
            x["b"] = x["b"].mT.contiguous().mT
        x[name] = view.copy_(x[name])
        try:
            result = ops._gemm_by(*x.values(), -1.0, 2.0, kernel, 1)
        except RuntimeError as error:
            if "cannot compute" not in str(error):
                raise
            continue
        check.require(result, check.reference(*x.values(), 2.0, -1.0), kernel)
        ran.append(kernel)
    assert {kernel for kernel in here(TILES | RINGS) if not kernel.endswith("k")} <= {*ran}


@pytest.mark.parametrize("long", ["M", "N"])
@pytest.mark.parametrize("tile", [k for k in (*TILES, *RINGS) if k[-1] != "k"])
def test_more_tiles_than_a_grid_is_high(tile, long):
    """B40: 65,535 blocks are the most along y and z."""
    BM, BN = KERNELS[tile]
    M, N = (65535 * BM + 4, 12) if long == "M" else (12, 65535 * BN + 4)
    a, b = arena.integers(M, 1, device="cuda"), arena.integers(1, N, device="cuda")
    assert torch.equal(ops._gemm_by(a, b, None, 0.0, 1.0, tile, 1), a * b)


@pytest.mark.parametrize("kernel", ["64x64", *SKINNY])
def test_more_batches_than_a_grid_has_with_k_in_parts(kernel):
    """B39: the second launch has parts, and an addend, of its own."""
    B, M, N, K = 65537, 2, 3, 300
    a, b, c = randn(B, M, K), randn(B, K, N), randn(B, 1, N)
    b = b.mT.contiguous().mT if kernel == "dot" else b
    result = ops._gemm_by(a, b, c, 0.5, 2.0, kernel, 3)
    check.require(result, check.reference(a, b, c, 2.0, 0.5))


@two_gpus
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_on_each_device(kernel):
    """B60, B62: what a kernel needs is set up on the first device alone."""
    for device in ("cuda:0", "cuda:1"):
        a, b = randn(8, 512, device=device), randn(512, 512, device=device)
        b = b.t() if kernel == "dot" else b
        result = ops._gemm_by(a, b, None, 0.0, 1.0, kernel, 3)
        check.require(result, check.reference(a, b))
        assert result.device == torch.device(device)
    assert torch.cuda.current_device() == 0


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
        require_ours_alone(call)


def test_a_training_step_of_linear_runs_three_products_and_a_sum():
    x, w, bias = randn(4, 50, 64).requires_grad_(), randn(96, 64).requires_grad_(), randn(96)
    bias.requires_grad_()
    upstream = randn(4, 50, 96)

    def step():
        torch.autograd.grad(ts.linear(x, w, bias), (x, w, bias), upstream)

    names = device_work(step)
    beside = ("add_parts", "add_pieces", "panels")
    ours = [name for name in names if is_ours(name) and not any(b in name for b in beside)]
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


OPERANDS = {
    "whole": lambda: (randn(512, 512), randn(512, 512)),
    "in parts": lambda: (randn(16, 65536), randn(65536, 16)),
    "edges, in parts": lambda: (randn(130, 9000), randn(9000, 70)),
    "a row": lambda: (randn(1, 4096), randn(4096, 4096)),
    "a batch": lambda: (randn(9, 100, 200), randn(9, 200, 300)),
    # 256 MB each, were they copied
    "windows that overlap": lambda: (
        randn(3000).as_strided((64, 1024, 1024), (1, 1, 1)),
        randn(64, 1024, 16),
    ),
    "one for all": lambda: (randn(1024, 1024).expand(64, 1024, 1024), randn(64, 1024, 16)),
}


@pytest.mark.parametrize("operands", OPERANDS)
def test_the_memory_is_what_explain_says(operands):
    """B25, pytorch#52111: a copy of 37 GiB of what was a window over a few numbers."""
    a, b = OPERANDS[operands]()
    plan, op = ts.explain(a, b), ts.mm if a.dim() == 2 else ts.bmm
    op(a, b)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = op(a, b)
    peak = torch.cuda.max_memory_allocated() - before

    def rounded(size):
        return -(-size // 512) * 512

    assert peak == rounded(result.nbytes) + rounded(plan.workspace_bytes)
    assert allocations(lambda: op(a, b)) == 1 + (plan.workspace_bytes > 0)
    check.require(result, check.reference(a, b))


@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        *((16, 16, 65536), (8, 384, 7168), (384, 8, 7168), (1024, 832, 4096)),
        *((1, 4096, 14336), (16, 4096, 14336)),
    ],
)
def test_parts_of_k_are_added_up_in_order(M, N, K):
    """B101, CUDALibrarySamples#243, B102, vllm#56887: atomics differ from run to run; B67,
    aiter#4494, B71, cutlass#1296: counters that are not reset hang; B70, cutlass#3538: partial sums
    of the call before."""
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
    """B68, aiter#5393: a workspace of one graph's memory is used by the other."""
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
    """B35, pytorch#196431: batch times stride in 32 bits wrote before the buffer."""
    a, b = randn(8209, 512, 1), randn(8209, 1, 512)
    result = ts.bmm(a, b)
    for batch in (slice(0, 2), slice(8189, 8209)):
        check.require(result[batch], check.reference(a[batch], b[batch]))


def test_batches_of_rows_beyond_2_to_the_31_elements():
    """B37, mlx#1051, pytorch#191083: their number overflows on the host."""
    a, b = randn(131072, 128, 32), randn(32, 128)
    result = ts.matmul(a, b)
    for part in (slice(0, 2), slice(65535, 65537), slice(131070, 131072)):
        check.require(result[part], check.reference(a[part], b.expand(2, 32, 128)))


@pytest.mark.parametrize("op", PRODUCTS.values(), ids=PRODUCTS)
def test_sizes_over_the_limit_are_refused(op):
    limit, one = 2_147_482_623, torch.ones(1, 1, device="cuda")
    for a, b in (
        ((limit + 1, 1), (1, 1)),
        ((1, 1), (1, limit + 1)),
        ((1, limit + 1), (limit + 1, 1)),
    ):
        with pytest.raises(RuntimeError, match=f"must have .*at most {limit}.*, got shape"):
            op(one.expand(a), one.expand(b))


def test_an_unaligned_weight_of_1_gb_is_used_in_place():
    """B29, pytorch#112771: copied in every call."""
    w = randn((1 << 28) + 1)[1:].view(1 << 14, 1 << 14)
    x = randn(2, 1 << 14)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = ts.linear(x, w)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    check.require(result[:, :50], check.reference(x, w[:50].t()))


@pytest.mark.parametrize("M", [1, 2, 17, 128, 4096])
def test_a_row_is_right_in_a_batch_of_any_size(M):
    """B103, pytorch#45422, #136338: its bits may differ, as K is split by the shape (B104); they
    are within the rule, and the same in every call of that shape."""
    x, w = randn(4096, 4096), randn(4096, 4096)
    x[M - 1] = x[0]
    result = ts.linear(x[:M], w)
    for row in (0, M - 1):
        check.require(result[row : row + 1], check.reference(x[:1], w.t()), f"row {row} of {M}")
    assert torch.equal(ts.linear(x[:M], w), result)


def test_deterministic_mode_is_obeyed_by_being_so():
    """B101: where it is asked for, split K is an error or differs all the same."""
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
