"""mm, addmm, bmm, baddbmm, linear and matmul: right for every shape and layout, with torch's names
and words. bugs of others that the package must not have are named by their threads."""

import itertools
import math
import re

import arena
import check
import pytest
import torch
import torch.nn.functional as F

import torch_sgemm as ts
from torch_sgemm import products

SIZES = (1, 3, 9, 16, 17, 31, 33, 63, 65, 100, 127, 129, 257)
SHAPES = [
    *((size,) * 3 for size in SIZES),
    *((35, 79, 19), (3, 3, 431), (5, 5, 1000), (1000, 1000, 5), (256, 128, 256), (128, 256, 256)),
    *((2, 4, 3), (1, 105, 107), (1, 1, 705), (1, 200, 1), (200, 1, 1), (7, 1, 5), (1, 7, 5)),
    *((8, 300, 513), (300, 8, 513), (4, 1000, 64), (16, 16, 4096), (40, 30, 2000), (257, 300, 100)),
]


def rand(*shape, device, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).to(device)


def right(result, a, b, c=None, alpha=1.0, beta=0.0, what="the result"):
    check.require(result, check.reference(a, b, c, alpha, beta), what)
    return result


# ---- mm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_mm_of_any_shape_reads_and_writes_nothing_else(shape, device):
    """Cjkkkk/CUDA_gemm#6, #3, #4; yzhaiustc/Optimizing-SGEMM#2; how-to-optimize-gemm#19;
    NVIDIA/cutlass#49: wrong or refused at sizes that no tile divides; NVIDIA/raft#327: at 1."""
    M, N, K = shape
    a, b = (arena.place(rand(*s, device=device)) for s in ((M, K), (K, N)))
    out = arena.Arena(M, N, "padded", device=device)
    right(ts.mm(a.view, b.view), a.view, b.view)
    right(ts.mm(a.view, b.view, out=out.view), a.view, b.view)
    arena.require_untouched(a, b, out)


@pytest.mark.parametrize("layout_b", arena.LAYOUTS)
@pytest.mark.parametrize("layout_a", arena.LAYOUTS)
def test_mm_of_any_layouts(layout_a, layout_b, device):
    """tvm#8540, tilelang#2526: vector loads where the base pointer is not aligned;
    bitsandbytes#1995: a strided slice in physical order; cutlass#362: refusals that nothing asks
    for."""
    for M, N, K in ((65, 70, 33), (3, 129, 40), (130, 6, 64)):
        a = arena.place(rand(M, K, device=device), layout_a)
        b = arena.place(rand(K, N, device=device), layout_b)
        result = right(ts.mm(a.view, b.view), a.view, b.view, what=f"{layout_a} @ {layout_b}")
        assert result.is_contiguous()


@pytest.mark.parametrize("layout", arena.LAYOUTS)
def test_out_of_any_layout_keeps_what_lies_between(layout, device):
    """torch/torch7#671, torch/cutorch#411: a result that is not contiguous."""
    for M, N, K in ((33, 70, 20), (5, 129, 300), (129, 4, 300)):
        a, b, c = (rand(*s, device=device) for s in ((M, K), (K, N), (N,)))
        out = arena.Arena(M, N, layout, device=device)
        right(ts.mm(a, b, out=out.view), a, b)
        result = ts.addmm(c, a, b, beta=0.5, alpha=-2.0, out=out.view)
        right(result, a, b, c, -2.0, 0.5)
        assert result is out.view
        out.assert_untouched()


def test_overlapping_and_expanded_operands_are_what_they_say(device):
    """pytorch#42425: strides (1, 1) went to BLAS as if contiguous; #1517: leading dimension 0."""
    x = torch.arange(6.0).to(device)
    c = x.as_strided((2, 2, 2), (3, 1, 1))
    assert torch.equal(ts.bmm(c, c), ts.bmm(c.contiguous(), c.contiguous()))
    assert torch.equal(ts.mm(c[0], c[0]), ts.mm(c[0].contiguous(), c[0].contiguous()))
    row = torch.tensor([2.0]).to(device).expand(1, 64)
    w = rand(64, 5, device=device)
    right(ts.mm(row, w), row, w)
    right(ts.mm(w.t(), row.t()), w.t(), row.t())
    right(ts.addmm(row[:, :5], row, w), row, w, row[:, :5], 1.0, 1.0)


def test_small_integers_are_exact(device):
    a, b = (arena.integers(*s, device=device) for s in ((70, 300), (300, 90)))
    assert torch.equal(ts.mm(a, b).double(), a.double() @ b.double())


def test_products_are_fp32_and_no_tf32(device):
    """pytorch#53635, jax#12008, and many more: 1024.5 * 1 became 1025."""
    for value in (1024.5, 1 + 2**-11):
        a = value * torch.eye(256).to(device)
        assert torch.equal(ts.mm(a, torch.eye(256).to(device)), a)


def test_classes_of_numbers_are_those_of_float64(device):
    """rocm-libraries#7882: Inf became NaN; triton#11783: NaN became Inf; cupy#8382: subnormals."""
    nans = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    a = rand(40, 70, device=device)
    a[0, 0], a[1, 1], a[2, 2] = math.inf, -math.inf, math.inf
    a[3:6, 3] = nans.to(device)
    b = rand(70, 50, device=device)
    b[2, 7] = 0.0
    right(ts.mm(a, b), a, b)
    right(ts.mm(b.t(), a.t()), b.t(), a.t())
    for tiny in (1e-40, 1e-20):
        a, b = torch.full((9, 64), tiny).to(device), torch.full((64, 5), tiny).to(device)
        right(ts.mm(a, b), a, b)
        right(ts.mm(a, torch.ones_like(b)), a, torch.ones_like(b))


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("size", [17, 33, 130])
def test_what_lies_beyond_an_edge_is_not_multiplied(size, operand, device):
    """oneDNN#5717, triton#10772: the tail reads beyond the row, and zero times NaN is NaN."""
    buffer = torch.full((40, 160), math.nan).to(device)
    a = buffer[:, :size]
    a[:] = 1.0
    b = torch.ones(size, 33, device=device)
    result = ts.mm(a, b) if operand == "a" else ts.mm(b.t(), a.t())
    assert torch.equal(result, torch.full_like(result, size))


# ---- addends -------------------------------------------------------------------------------------

ADDENDS = {
    "number": (),
    "one": (1,),
    "row": ("N",),
    "row of a matrix": (1, "N"),
    "column": ("M", 1),
    "matrix": ("M", "N"),
}


@pytest.mark.parametrize(
    "shape", [(5, 7, 3), (64, 64, 64), (130, 33, 70), (1, 300, 20), (300, 2, 9)]
)
@pytest.mark.parametrize("addend", ADDENDS)
def test_addmm_broadcasts_as_torch_does(addend, shape, device):
    """FlagGems#553, openxla/xla#46897: only rows are read, or along the wrong axis."""
    M, N, K = shape
    sizes = [{"M": M, "N": N}.get(size, size) for size in ADDENDS[addend]]
    c = torch.arange(float(math.prod(sizes))).reshape(sizes).to(device)
    a, b = rand(M, K, device=device), rand(K, N, device=device)
    right(ts.addmm(c, a, b), a, b, c, 1.0, 1.0)
    right(ts.addmm(c, a, b, beta=-0.5, alpha=2.0), a, b, c, 2.0, -0.5)
    if c.dim() == 2:
        c = c.t().contiguous().t()
        right(ts.addmm(c, a, b, beta=3.0), a, b, c, 1.0, 3.0)


def test_beta_0_reads_nothing_and_spreads_no_nan(device):
    """pytorch#187521, #196596; FlagGems#5755; Tensile#102."""
    a, b = rand(20, 30, device=device), rand(30, 10, device=device)
    for c in (
        torch.full((1, 1), math.nan),
        torch.full((20, 10), math.nan),
        torch.full((10,), math.nan),
    ):
        right(ts.addmm(c.to(device), a, b, beta=0, alpha=0.088), a, b, None, 0.088)
        c3 = c.to(device)
        right(ts.baddbmm(c3, a[None], b[None], beta=0)[0], a, b)
    out = torch.full((20, 10), math.nan).to(device)
    right(ts.addmm(out, a, b, beta=0, out=out), a, b)


def test_alpha_0_is_as_in_torch(device):
    c, a, b = rand(4, 5, device=device), rand(4, 3, device=device), rand(3, 5, device=device)
    assert torch.equal(ts.addmm(c, a, b, alpha=0.0, beta=0.5), 0.5 * c)


def test_the_addend_may_be_out(device):
    a, b, c = (rand(*s, device=device) for s in ((33, 20), (20, 47), (33, 47)))
    expected = check.reference(a, b, c.clone(), 2.0, 0.5)
    assert ts.addmm(c, a, b, alpha=2.0, beta=0.5, out=c) is c
    check.require(c, expected)


# ---- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (7, 64, 64, 64), (2, 1, 70, 130), (5, 70, 1, 33)])
@pytest.mark.parametrize("turned", list(itertools.product((False, True), repeat=2)))
def test_bmm_of_any_layout(shape, turned, device):
    B, M, N, K = shape
    a = rand(B, K, M, device=device).mT if turned[0] else rand(B, M, K, device=device)
    b = rand(B, N, K, device=device).mT if turned[1] else rand(B, K, N, device=device)
    right(ts.bmm(a, b), a, b)
    right(ts.bmm(a[:1].expand(B, M, K), b), a[:1].expand(B, M, K), b)
    for c in (rand(N, device=device), rand(B, 1, N, device=device), rand(B, M, N, device=device)):
        right(ts.baddbmm(c, a, b, beta=0.5, alpha=2.0), a, b, c, 2.0, 0.5)
    out = torch.full((B, N, M + 1), math.nan).to(device).mT[:, :M]
    right(ts.bmm(a, b, out=out), a, b)


def test_overlapping_batches_take_no_copy(device):
    """pytorch#52111: a copy of 37 GiB of what was a window over a few numbers."""
    x = rand(600, device=device)
    a = x.as_strided((40, 50, 60), (1, 1, 1))
    b = rand(40, 60, 7, device=device)
    right(ts.bmm(a, b), a, b)


@pytest.mark.parametrize("B", [65535, 65536, 100_000])
@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 8, 8), (9, 1, 4)])
def test_more_batches_than_a_grid_has(B, shape, device):
    """modular#4047, mlx#3858, genbmm#12: 65,536 batches were an invalid launch."""
    M, N, K = shape
    a, b = rand(B, M, K, device=device), rand(B, K, N, device=device)
    right(ts.bmm(a, b), a, b)


# ---- empty sizes ---------------------------------------------------------------------------------


def test_no_terms_are_zeros_and_no_stale_memory(device):
    """pytorch#31421; CUDA.jl#2952: C was zeroed though beta was not 0."""
    out = rand(10, 1, 43200, device=device)
    a, b = torch.empty(10, 1, 0, device=device), torch.empty(10, 0, 43200, device=device)
    assert not ts.bmm(a, b, out=out).any()
    assert torch.equal(ts.bmm(a[:3, :, :0], b[:3, :0, :7]), torch.zeros(3, 1, 7, device=device))
    c = rand(4, 5, device=device)
    empty = torch.empty(4, 0, device=device), torch.empty(0, 5, device=device)
    for beta in (1.0, 0.5):
        assert torch.equal(ts.addmm(c, *empty, beta=beta), beta * c)
    assert not ts.addmm(torch.full_like(c, math.nan), *empty, beta=0.0).any()


def test_empty_results_have_their_shape(device):
    """pytorch#63352, #42553; sglang#38773."""

    def empty(*shape):
        return torch.empty(*shape, device=device)

    assert ts.bmm(empty(0, 5, 5), empty(0, 5, 5)).shape == (0, 5, 5)
    assert ts.mm(empty(0, 3), empty(3, 4)).shape == (0, 4)
    assert ts.mm(empty(3, 4), empty(4, 0)).shape == (3, 0)
    assert ts.matmul(empty(3, 0, 0), empty(0, 0)).shape == (3, 0, 0)
    assert ts.linear(empty(2, 0, 5), empty(7, 5)).shape == (2, 0, 7)
    assert ts.linear(empty(0, 3, 10), empty(10, 10), empty(10)).shape == (0, 3, 10)
    assert ts.linear(empty(0, 100), empty(1, 100), empty(1)).shape == (0, 1)


def test_linear_without_features_is_its_bias(device):
    """pytorch#190050: in_features = 0 aborted the process."""
    x, w, bias = (
        torch.empty(3, 4, 0, device=device, requires_grad=True),
        torch.empty(5, 0, device=device, requires_grad=True),
        torch.randn(5).to(device).requires_grad_(),
    )
    assert torch.equal(ts.linear(x, w, bias), bias.expand(3, 4, 5))
    assert not ts.linear(x, w).any()
    ts.linear(x, w, bias).sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
    assert torch.equal(bias.grad, torch.full_like(bias, 12.0))


# ---- linear and matmul ---------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (5,), (1,), (2, 7), (2, 3, 5), (1, 1, 6)])
@pytest.mark.parametrize("bias", [None, "row", "number", "one"])
def test_linear_takes_any_leading_dimensions(leading, bias, device):
    """llm-compressor#1542, torch-cublas-hgemm#1: two dimensions only."""
    x, w = rand(*leading, 64, device=device), rand(33, 64, device=device)
    c = {"row": (33,), "number": (), "one": (1,)}.get(bias)
    c = c if c is None else rand(*c, device=device)
    result = ts.linear(x, w, c)
    assert result.shape == (*leading, 33)
    assert result.is_contiguous()
    right(result.reshape(-1, 33), x.reshape(-1, 64), w.t(), c, 1.0, 0.0 if c is None else 1.0)


def test_linear_of_what_is_no_view_of_rows(device):
    """TransformerEngine#1017, FlagGems#5379: wrong, or refused, where the input is transposed."""
    w = rand(8, 16, device=device)
    for x in (
        rand(2, 16, 64, device=device).transpose(1, 2),
        rand(3, 2, 16, 5, device=device).permute(1, 0, 3, 2),
        rand(6, 4, 32, device=device)[::2, :, ::2],
    ):
        right(ts.linear(x, w).reshape(-1, 8), x.reshape(-1, 16), w.t())


MATMULS = [
    ((5,), (5,)),
    ((3, 5), (5,)),
    ((5,), (5, 4)),
    ((3, 5), (5, 4)),
    ((2, 3, 5), (5,)),
    ((2, 3, 5), (5, 4)),
    ((2, 6, 3, 5), (5, 4)),
    ((5,), (2, 5, 4)),
    ((3, 5), (2, 5, 4)),
    ((2, 3, 5), (2, 5, 4)),
    ((1, 3, 5), (2, 5, 4)),
    ((6, 1, 3, 5), (2, 5, 4)),
    ((6, 2, 3, 5), (6, 2, 5, 4)),
    ((1, 40, 64), (64, 32)),
]


@pytest.mark.parametrize(("a", "b"), MATMULS)
def test_matmul_has_torchs_shapes(a, b, device):
    a, b = (arena.integers(*shape, device=device) for shape in (a, b))
    expected = torch.matmul(a.cpu(), b.cpu())
    result = ts.matmul(a, b)
    assert result.shape == expected.shape
    assert torch.equal(result.cpu(), expected)
    out = torch.full_like(result, math.nan)
    assert ts.matmul(a, b, out=out) is out
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_drop_in_functions_leave_other_dtypes_to_torch(dtype, device):
    if device == "cpu" and dtype == torch.float16:
        pytest.skip("torch's own half is slow to be right on a CPU")
    x, w = (
        torch.ones(3, 4, dtype=dtype, device=device),
        torch.ones(5, 4, dtype=dtype, device=device),
    )
    assert torch.equal(ts.linear(x, w), F.linear(x, w))
    assert torch.equal(ts.matmul(x, w.t()), torch.matmul(x, w.t()))


# ---- what is refused -----------------------------------------------------------------------------


def ones(*shape, **options):
    return torch.ones(*shape, **options)


REFUSED = {
    "shapes": (lambda d: ts.mm(ones(2, 3, device=d), ones(4, 5, device=d)), "2x3 and 4x5"),
    "shapes of a linear": (
        lambda d: ts.linear(ones(2, 7, 3, device=d), ones(5, 4, device=d)),
        r"\(14x3 and 4x5\)",
    ),
    "batches": (
        lambda d: ts.bmm(ones(2, 3, 4, device=d), ones(3, 4, 5, device=d)),
        "batch2|two dim",
    ),
    "dtype": (
        lambda d: ts.mm(ones(2, 3, device=d).double(), ones(3, 5, device=d)),
        "input must be float32, got (float64|Double)",
    ),
    "dtype of an addend": (
        lambda d: ts.addmm(ones(5, device=d).half(), ones(2, 3, device=d), ones(3, 5, device=d)),
        "input must be float32, got (float16|Half)",
    ),
    "an addend that does not fit": (
        lambda d: ts.addmm(ones(4, device=d), ones(2, 3, device=d), ones(3, 5, device=d)),
        r"expand|\(4,\)",
    ),
    "dimensions": (lambda d: ts.mm(ones(2, device=d), ones(2, 5, device=d)), "matrix|matrices"),
    "out's shape": (
        lambda d: ts.mm(ones(2, 3, device=d), ones(3, 5, device=d), out=ones(5, 2, device=d)),
        r"out must have shape \(2, 5\), got \(5, 2\)",
    ),
    "out that overlaps itself": (
        lambda d: ts.mm(
            ones(4, 3, device=d), ones(3, 4, device=d), out=ones(1, device=d).expand(4, 4)
        ),
        "single memory location",
    ),
    "a number for linear": (lambda d: ts.linear(ones((), device=d), ones(1, 1, device=d)), "dim"),
    "precision": (
        lambda d: ts.mm(ones(2, 3, device=d), ones(3, 5, device=d), precision="tf32"),
        'precision must be "auto" or "ieee", got \'tf32\'',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_told(case, device):
    call, text = REFUSED[case]
    with pytest.raises((RuntimeError, ValueError, IndexError), match=text):
        call(device)


@pytest.mark.gpu
def test_mixed_devices_are_named():
    """pytorch#12406, pytorch_scatter#75: a segmentation fault, or obscure words."""
    a, b = torch.ones(2, 3, device="cuda"), torch.ones(3, 5)
    for call in (
        lambda: ts.mm(a, b),
        lambda: ts.mm(b.t(), a.t()),
        lambda: ts.linear(a, torch.ones(5, 3)),
        lambda: ts.addmm(torch.ones(5), a, b.cuda()),
        lambda: ts.bmm(a[None], b[None]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            call()


SHARED = {
    "out is a": lambda a, b: ts.mm(a, b, out=a),
    "out is b": lambda a, b: ts.mm(a, b, out=b),
    "out is a shifted view": lambda a, b: ts.mm(a[:-1], b[1:, 1:].t(), out=a[1:, 1:]),
    "out is b, with an addend": lambda a, b: ts.addmm(torch.zeros_like(a[0]), a, b, out=b),
    "out is a batch of a": lambda a, b: ts.bmm(a[None], b[None], out=a[None])[0],
}


@pytest.mark.parametrize("N", [4, 300])
@pytest.mark.parametrize("case", SHARED)
def test_out_that_shares_memory_with_an_operand_is_right_or_refused(case, N, device):
    """pytorch#48900, #13892, #85852: zeros or NaN."""
    a, b = rand(N, N, device=device), rand(N, N, device=device)
    expected = check.reference(a.clone(), b.clone())
    if "shifted" in case:
        a = rand(N + 1, N + 1, device=device)
        b = rand(N + 1, N + 2, device=device)
        expected = check.reference(a[:-1].clone(), b[1:, 1:].t().clone())
    try:
        result = SHARED[case](a, b)
    except RuntimeError as error:
        text = str(error)
    else:
        check.require(result, expected)
        return
    assert re.search("memory|overlap", text)


# ---- precision -----------------------------------------------------------------------------------


def test_the_precision_of_a_call_is_its_own_or_the_default(monkeypatch):
    seen = []
    monkeypatch.setattr(products, "_raw_gemm", lambda *arguments: seen.append(arguments[-1]))
    a = torch.ones(2, 2)
    ts.mm(a, a)
    with ts.precision("ieee"):
        ts.mm(a, a)
        with ts.precision("auto"):
            ts.mm(a, a)
        ts.mm(a, a, precision="auto")
    with pytest.raises(ZeroDivisionError), ts.precision("ieee"):
        raise ZeroDivisionError
    ts.mm(a, a)
    assert seen == ["auto", "ieee", "auto", "auto", "auto"]
    with pytest.raises(ValueError, match="precision must be"):
        ts.precision("fast")


def test_autocast_is_obeyed_by_drop_in_functions_alone(device):
    """pytorch#137033, apex#849: Half met Float."""
    x, w = torch.ones(3, 4, device=device), torch.ones(5, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert ts.linear(x, w).dtype == ts.matmul(x, w.t()).dtype == torch.bfloat16
        assert ts.linear(x, w, precision="ieee").dtype == torch.float32
        assert ts.matmul(x, w.t(), precision="ieee").dtype == torch.float32
        half, zero = x.bfloat16(), torch.zeros(1, dtype=torch.bfloat16, device=device)
        for result in (
            ts.mm(half, w.t()),
            ts.addmm(zero, half, w.t()),
            ts.bmm(half[None], w.t()[None])[0],
            ts.baddbmm(zero, half[None], w.t()[None])[0],
        ):
            assert torch.equal(result, torch.full((3, 5), 4.0, device=device))


# ---- explain -------------------------------------------------------------------------------------


def test_explain_says_kernel_workspace_and_reason():
    plan = ts.explain((4096, 4096), (4096, 4096))
    assert plan.workspace_bytes == 0
    assert plan.parts == 1
    assert re.search(r"^\d+x\d+, [\d.]+ us predicted: \d+ blocks for \d+ places", str(plan))
    deep = ts.explain((16, 65536), (65536, 16))
    assert deep.workspace_bytes == 4 * 16 * 16 * deep.parts
    assert "K in" in str(deep)
    row = ts.explain((1, 4096), (4096, 4096))
    assert row.kernel == "axpy"
    assert ts.explain(torch.ones(1, 4096), torch.ones(4096, 4096).t()).kernel == "dot"
    assert not ts.explain(torch.ones(64 * 64 + 1)[1:].view(64, 64), torch.ones(64, 64)).vector
    for a, b, text in (
        ((3, 4), (5, 6), "can be multiplied"),
        ((2, 3, 4), (3, 4, 5), "as many matrices, got 2 and 3"),
        ((0, 4), (4, 5), "empty"),
    ):
        with pytest.raises(ValueError, match=text):
            ts.explain(a, b)


def test_no_chunk_of_a_tile_is_copied_in_part():
    """compute-sanitizer takes the 16 bytes of a cp.async as read, whatever part is asked for."""
    padded = torch.empty(1000, 64)
    for cols, vector in ((40, True), (41, False)):
        for plan in ts.plan.candidates(torch.empty(1000, 1000), padded[:, :cols]):
            assert plan.vector == vector or plan.kernel == "axpy"
    by_k = torch.empty(64, 1004)[:, :1001].t()  # neighbours along k: parts go through registers
    assert ts.explain(torch.empty(1000, 1004)[:, :1001], by_k).vector


def test_the_plan_is_the_candidate_of_the_least_predicted_time():
    for a, b in (((300, 70), (70, 9)), ((5000, 100), (100, 5000)), ((7, 20, 30), (7, 30, 40))):
        first, *others = ts.plan.candidates(a, b)
        assert first == ts.explain(a, b)
        assert all(first.seconds <= other.seconds for other in others)
        assert len({(p.kernel, p.parts) for p in (first, *others)}) == 1 + len(others)


@pytest.mark.parametrize("K", [0, 1, 7, 100_000])
@pytest.mark.parametrize("N", [1, 8, 33, 5000])
@pytest.mark.parametrize("M", [1, 5, 8, 9, 100, 70_000])
def test_every_problem_has_a_plan(M, N, K):
    """select() is total: no size, layout or alignment is without a kernel."""

    def operands(rows, cols):
        steps = ((cols, 1), (1, rows), (0, 0), (3, 7))
        return [torch.empty_strided((rows, cols), step, device="meta") for step in steps]

    for a, b in itertools.product(operands(M, K), operands(K, N)):
        plans = ts.plan.candidates(a, b)
        assert plans
        assert all(p.workspace_bytes <= 16 << 30 for p in plans)
        assert all(p.seconds > 0 for p in plans)
