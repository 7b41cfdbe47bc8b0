"""mm, addmm, bmm, baddbmm, linear and matmul: right for every shape and layout, with torch's names
and words. Bugs of others that the package must not have are named by their threads, or as rows of
the bug list (B36). What is asked of the stages too is in test_stages.py.
"""

import itertools
import math
import re

import arena
import check
import pytest
import torch
import torch.nn.functional as F
from gpu_work import two_gpus

import torch_sgemm as ts
from torch_sgemm import products


def rand(*shape, device, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).to(device)


def right(result, a, b, c=None, alpha=1.0, beta=0.0, what="the result"):
    check.require(result, check.reference(a, b, c, alpha, beta), what)
    return result


# ---- mm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        *((8, 300, 513), (300, 8, 513), (4, 1000, 64)),
        *((16, 16, 4096), (40, 30, 2000), (257, 300, 100)),
    ],
    ids=lambda s: "x".join(map(str, s)),
)
def test_few_rows_and_long_sums_read_and_write_nothing_else(shape, device):
    """Kernels of their own, and K in parts. cutlass#3538: partial sums landed in the result."""
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


BATCHES = {
    "every other element": lambda x: x(3, 5, 7, 2)[..., 0],
    "turned": lambda x: x(3, 7, 5).mT,
    "a slice": lambda x: x(5, 70, 133)[1:-1, 2:, 1:-2],
    "the batch last": lambda x: x(65, 33, 3).permute(2, 0, 1),
}


@pytest.mark.parametrize("layout", BATCHES)
def test_batches_into_any_layout_keep_what_lies_between(layout, device):
    """B26, torch7#671, cutorch#411: a result that is not contiguous, written as if it were."""
    buffers = []

    def poisoned(*size):
        buffers.append(torch.full(size, math.nan, device=device))
        return buffers[-1]

    out = BATCHES[layout](poisoned)
    (B, M, N), strides = out.shape, out.stride()
    a, b, c = (rand(*size, device=device) for size in ((B, M, 9), (B, 9, N), (B, 1, N)))
    right(ts.bmm(a, b, out=out), a, b)
    right(ts.baddbmm(c, a, b, beta=0.5, alpha=-2.0, out=out), a, b, c, -2.0, 0.5)
    before = out.clone()
    right(ts.baddbmm(out, a, b, beta=3.0, out=out), a, b, before, 1.0, 3.0)
    torch.ops.sgemm.linear.out(a, b[0].mT, c[0, 0], out=out)
    right(out, a, b[:1].expand_as(b), c[:1], 1.0, 1.0)
    assert out.stride() == strides
    out.fill_(math.nan)
    assert buffers[0].isnan().all()


def test_overlapping_batches_are_what_they_say(device):
    """B21, pytorch#42425: strides (1, 1) went to BLAS as if contiguous."""
    x = torch.arange(6.0).to(device)
    c = x.as_strided((2, 2, 2), (3, 1, 1))
    assert torch.equal(ts.bmm(c, c), ts.bmm(c.contiguous(), c.contiguous()))
    a, b = (
        rand(600, device=device).as_strided((40, 50, 60), (1, 1, 1)),
        rand(40, 60, 7, device=device),
    )
    right(ts.bmm(a, b), a, b)


def test_small_integers_are_exact(device):
    a, b = (arena.integers(*s, device=device) for s in ((70, 300), (300, 90)))
    assert torch.equal(ts.mm(a, b).double(), a.double() @ b.double())


def test_products_are_fp32_and_no_tf32(device):
    """pytorch#53635, jax#12008, and many more: 1024.5 * 1 became 1025."""
    for value in (1024.5, 1 + 2**-11):
        a = value * torch.eye(256).to(device)
        assert torch.equal(ts.mm(a, torch.eye(256).to(device)), a)


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


@pytest.mark.parametrize("B", [65535, 65536, 100_000])
@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 8, 8), (9, 1, 4)])
def test_more_batches_than_a_grid_has(B, shape, device):
    """B39, modular#4047, mlx#3858, genbmm#12: 65,536 batches were an invalid launch."""
    M, N, K = shape
    a, b, c = (rand(B, *size, device=device) for size in ((M, K), (K, N), (1, N)))
    right(ts.bmm(a, b), a, b)
    right(ts.baddbmm(c, a, b, beta=2.0), a, b, c, 1.0, 2.0)


# ---- empty sizes ---------------------------------------------------------------------------------


def test_no_terms_are_zeros_and_no_stale_memory(device):
    """B10, pytorch#31421."""
    out = rand(10, 1, 43200, device=device)
    a, b = torch.empty(10, 1, 0, device=device), torch.empty(10, 0, 43200, device=device)
    assert not ts.bmm(a, b, out=out).any()
    assert torch.equal(ts.bmm(a[:3], b[:3, :, :7]), torch.zeros(3, 1, 7, device=device))


def test_empty_results_have_their_shape(device):
    """B13, pytorch#63352: reshape(-1, 0) is ambiguous; B15, B17, #42553: refused where empty."""

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
    """B16, pytorch#190050: in_features = 0 aborted the process."""
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
    """B20, llm-compressor#1542, torch-cublas-hgemm#1: two dimensions only."""
    x, w = rand(*leading, 64, device=device), rand(33, 64, device=device)
    c = {"row": (33,), "number": (), "one": (1,)}.get(bias)
    c = c if c is None else rand(*c, device=device)
    result = ts.linear(x, w, c)
    assert result.shape == (*leading, 33)
    assert result.is_contiguous()
    right(result.reshape(-1, 33), x.reshape(-1, 64), w.t(), c, 1.0, 0.0 if c is None else 1.0)


def test_linear_of_what_is_no_view_of_rows(device):
    """B31, TransformerEngine#1017; B32, FlagGems#5379: wrong, or refused, where the input is
    transposed."""
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
    "a number for linear": (  # B19, pytorch#119161: an index underflow
        lambda d: ts.linear(ones((), device=d), ones(1, 1, device=d)),
        "input must have at least one dimension, got a 0-D tensor",
    ),
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
    # B74, cuopt#1095: the error was blamed on a later call.
    assert (ts.mm(ones(2, 3, device=device), ones(3, 5, device=device)) == 3).all()


ARGUMENTS = {
    "mm": {"input": (2, 3), "mat2": (3, 5)},
    "addmm": {"input": (5,), "mat1": (2, 3), "mat2": (3, 5)},
    "bmm": {"input": (4, 2, 3), "mat2": (4, 3, 5)},
    "baddbmm": {"input": (5,), "batch1": (4, 2, 3), "batch2": (4, 3, 5)},
    "linear": {"input": (2, 3), "weight": (5, 3), "bias": (5,)},
}


@pytest.mark.parametrize("op", ARGUMENTS)
@pytest.mark.parametrize(
    ("rest", "odd"),
    [
        ("cpu", "meta"),
        pytest.param("cpu", "cuda:0", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "cpu", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "cuda:1", marks=[pytest.mark.gpu, two_gpus]),
    ],
)
def test_the_tensor_on_another_device_is_named(op, rest, odd):
    """B48, pytorch#12406, pytorch_scatter#75: a segmentation fault, or obscure words."""
    made = {name: ones(size, device=rest) for name, size in ARGUMENTS[op].items()}
    out = getattr(ts, op)(*made.values())
    for name, tensor in made.items():
        with pytest.raises(RuntimeError, match=rf"same device, but .*\b{name} is on "):
            getattr(ts, op)(**made | {name: tensor.to(odd)})
    with pytest.raises(RuntimeError, match=r"same device, but .*\bout is on "):
        getattr(torch.ops.sgemm, op).out(*made.values(), out=out.to(odd))


SHARED = {
    "out is a": lambda a, b: ts.mm(a, b, out=a),
    "out is b": lambda a, b: ts.mm(a, b, out=b),
    "out is a shifted view": lambda a, b: ts.mm(a[:-1], b[1:, 1:].t(), out=a[1:, 1:]),
    "out is b, with an addend": lambda a, b: ts.addmm(torch.zeros_like(a[0]), a, b, out=b),
    "out is a batch of a": lambda a, b: ts.bmm(a[None], b[None], out=a[None])[0],
}


@pytest.mark.parametrize("N", [4, 300, 5000])
@pytest.mark.parametrize("case", SHARED)
def test_out_that_shares_memory_with_an_operand_is_right_or_refused(case, N, device):
    """B46, pytorch#48900, #13892, #85852: zeros or NaN. At 5000 there are more blocks than run at
    once: later ones would read what the first have written."""
    if device == "cpu" and N > 300:
        pytest.skip("aten's, and slow")
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


ADDENDS_OF_OUT = {
    "turned": lambda out: out.t(),
    "a row": lambda out: out[0],
    "a column": lambda out: out[:, :1],
    "a number": lambda out: out[0, 0],
}


@pytest.mark.parametrize("N", [4, 3000])
@pytest.mark.parametrize("addend", ADDENDS_OF_OUT)
def test_an_addend_that_shares_memory_with_out_is_read_before_it_is_written(addend, N, device):
    """B46: of the addend only out itself may be overwritten on the way."""
    if device == "cpu" and N > 4:
        pytest.skip("aten's, and slow")
    a, b, out = (rand(*size, device=device) for size in ((N, 16), (16, N), (N, N)))
    for into in (
        lambda c, out: ts.addmm(c, a, b, beta=0.5, alpha=2.0, out=out),
        lambda c, out: ts.baddbmm(c, a[None], b[None], beta=0.5, alpha=2.0, out=out[None])[0],
    ):
        x = out.clone()
        expected = check.reference(a, b, ADDENDS_OF_OUT[addend](out), 2.0, 0.5)
        check.require(into(ADDENDS_OF_OUT[addend](x), x), expected)
    if addend in ("a row", "a number"):
        expected = check.reference(a, b, ADDENDS_OF_OUT[addend](out), 1.0, 1.0)
        torch.ops.sgemm.linear.out(a, b.t(), ADDENDS_OF_OUT[addend](out), out=out)
        check.require(out, expected)


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
    plan = ts.explain((300, 5000), (5000, 20))
    assert plan.workspace_bytes == 4 * 300 * 20 * plan.parts
    assert re.search(
        r"^\d+x\d+, K in \d+ parts, .* us predicted: \d+ blocks for \d+ places", str(plan)
    )
    large = ts.explain((4096, 4096), (4096, 4096))
    assert large.kernel == "ring256x128"
    assert (large.parts, large.streamed) == (2, True)
    assert large.workspace_bytes == 4 * (4096 * 4096 + (132 + 512 % 132) * 256 * 128)
    assert "132 multiprocessors, which share K of the last 116; A is copied first" in str(large)
    deep = ts.explain((16, 65536), (65536, 16))
    assert deep.workspace_bytes == 4 * 16 * 16 * deep.parts
    assert "K in" in str(deep)
    row = ts.explain((1, 4096), (4096, 4096))
    assert row.kernel == "axpy"
    assert ts.explain(torch.ones(1, 4096), torch.ones(4096, 4096).t()).kernel == "dot"
    assert ts.explain((1471, 512), (512, 256)).vector  # B09, cutlass#362: M does not matter
    for a, b, text in (
        ((3, 4), (5, 6), "can be multiplied"),
        ((2, 3, 4), (3, 4, 5), "as many matrices, got 2 and 3"),
        ((0, 4), (4, 5), "empty"),
    ):
        with pytest.raises(ValueError, match=text):
            ts.explain(a, b)


def test_a_remembered_plan_is_for_its_layout_alone():
    """B27, tvm#8540, tilelang#2526: a vector load where the address is not that of one."""
    buffer, other = torch.empty(64 * 68 + 4), torch.empty(64, 64)
    for _ in range(2):
        for offset, ld, vector in ((0, 64, True), (1, 64, False), (0, 68, True), (0, 66, False)):
            view = buffer.as_strided((64, 64), (ld, 1), offset)
            assert ts.explain(view, other).vector == vector
            assert ts.explain(other, view).vector == vector
            assert ts.explain(view.t(), other).vector == vector


def test_no_chunk_of_a_tile_is_copied_in_part():
    """compute-sanitizer takes the 16 bytes of a cp.async as read, whatever part is asked for."""
    padded = torch.empty(1000, 64)
    for cols, vector in ((40, True), (41, False)):
        for plan in ts.plan.candidates(torch.empty(1000, 1000), padded[:, :cols]):
            assert plan.vector == vector or plan.kernel == "axpy" or plan.kernel[:4] == "ring"
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
