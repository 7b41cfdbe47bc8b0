"""Every stage on every kind of input, against float64, and the product ops where what is asked is
the same. Ids like B36 are rows of the bug list: faults of this kind that users of other packages
reported."""

import re
from pathlib import Path

import check
import pytest
import torch
from adapters import PRODUCTS, gemms_too, products_too
from arena import LAYOUTS, Arena, integers, place, require_right, require_untouched

from torch_sgemm import STAGES

NAN, INF = float("nan"), float("inf")
EDGES = (1, 3, 9, 15, 16, 17, 31, 33, 63, 65, 100, 127, 129, 257)


# ---- shapes --------------------------------------------------------------------------------------


def _tile(stage) -> list[int]:
    """BM, BN and BK of the stage's source; of the product ops' largest tile."""
    if stage.__name__ in PRODUCTS:
        return [128, 256, 16]
    for source in Path(__file__).parents[1].glob("csrc/stages/*.cu"):
        text = source.read_text()
        if f"namespace sgemm::{stage.__name__} {{" in text:
            return [int(re.search(rf"\b{size} = (\d+)", text)[1]) for size in ("BM", "BN", "BK")]
    raise LookupError(stage.__name__)


def _whole_tiles(stage) -> tuple[int, int, int]:
    """M, N, K that a kernel of their own takes, which checks no bounds; in K there is a tile that
    is neither the first nor the last."""
    BM, BN, BK = _tile(stage)
    return BM, 2 * BN, max(3 * BK, 12)  # stages without shared memory have BK = 1


@products_too
@pytest.mark.parametrize("M", EDGES)
def test_edge_shapes(stage, device, M):
    """B01, B03, B04: wrong beside the last full tile, or where bounds of one matrix serve another.

    Over all M the shapes are a Latin square: each pair of (M, N), (M, K) and (N, K) occurs.
    """
    for n, N in enumerate(EDGES):
        K = EDGES[(EDGES.index(M) + n) % len(EDGES)]
        what = f"M, N, K = {M}, {N}, {K}"
        a, b = place(torch.randn(M, K, device=device)), place(torch.randn(K, N, device=device))
        c, out = place(torch.randn(M, N, device=device)), Arena(M, N, device=device)
        require_right(stage, a.view, b.view, what=what)
        require_right(stage, a.view, b.view, c.view, alpha=1.5, beta=-0.5, out=out.view, what=what)
        require_untouched(a, b, c, out)


@products_too
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        pytest.param(100, 100, 100, id="B01-square-100"),
        pytest.param(30000, 64, 64, id="B02-rows-after-the-last-full-tile"),
        pytest.param(5, 5, 1000, id="B03-bounds-of-C-used-for-A-and-B"),
        pytest.param(1000, 1000, 5, id="B03-bounds-of-C-used-for-A-and-B"),
        pytest.param(35, 79, 19, id="B04-tail-in-all-dimensions"),
        pytest.param(3, 431, 3, id="B04-wide"),
        pytest.param(3, 3, 431, id="B04-deep"),
        pytest.param(256, 128, 256, id="B05-not-square"),
        pytest.param(128, 256, 256, id="B05-not-square"),
        pytest.param(256, 256, 128, id="B05-not-square"),
        pytest.param(2, 4, 3, id="B08-odd-sizes"),
        pytest.param(1, 105, 107, id="B08-odd-row"),
        pytest.param(1, 705, 705, id="B08-odd-row"),
        pytest.param(1471, 256, 512, id="B09-odd-M-with-aligned-rows"),
        pytest.param(1, 1, 1, id="B43-one"),
        pytest.param(1, 200, 1, id="B43-row"),
        pytest.param(200, 1, 1, id="B43-column"),
        pytest.param(1, 1, 200, id="B43-dot"),
    ],
)
def test_reported_shapes(stage, device, M, N, K):
    a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
    out = Arena(M, N, device=device)
    require_right(stage, a, b)
    require_right(stage, a, b, a.new_ones(N), alpha=-1.0, beta=2.0, out=out.view)
    out.assert_untouched()


@pytest.mark.parametrize("more", [1, -1, 4, -4])
@pytest.mark.parametrize("dimension", ["M", "N", "K"])
def test_whole_tiles_but_in_one_dimension(stage, device, dimension, more):
    """B01, B05: what is beside whole tiles is left out, or more of them are read and written. By 4
    the rows stay multiples of 16 bytes."""
    sizes = dict(zip("MNK", _whole_tiles(stage), strict=True))
    sizes[dimension] += more
    M, N, K = sizes.values()
    a = place(torch.randn(M, K, device=device), "contiguous")
    b = place(torch.randn(K, N, device=device), "contiguous")
    out = Arena(M, N, "contiguous", device)
    require_right(stage, a.view, b.view, out=out.view)
    require_right(stage, a.view, b.view, a.view.new_ones(N), alpha=-1.0, beta=2.0, out=out.view)
    require_untouched(a, b, out)


@products_too
@pytest.mark.parametrize(("M", "N", "K"), [(0, 5, 4), (5, 0, 4), (0, 0, 4), (0, 5, 0), (0, 0, 0)])
def test_empty_results(stage, device, M, N, K):
    a, b, c = (torch.randn(*size, device=device) for size in ((M, K), (K, N), (M, N)))
    assert stage(a, b).shape == (M, N)
    assert stage(a, b, c, alpha=2.0, beta=0.5).shape == (M, N)
    out = Arena(M, N, device=device)
    assert stage(a, b, c.new_ones(1, N), beta=1.0, out=out.view) is out.view
    out.assert_untouched()


@gemms_too
@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(("M", "N"), [(1, 1), (17, 33), (64, 64)])
def test_an_empty_sum_leaves_beta_times_c(stage, device, M, N, beta):
    """B10: stale memory; B11: c dropped although beta is not 0, or its NaN kept although it is."""
    a, b = torch.empty(M, 0, device=device), torch.empty(0, N, device=device)
    c = torch.randn(M, N, device=device) if beta else torch.full((M, N), NAN, device=device)
    wanted = beta * c if beta else torch.zeros_like(c)
    out = Arena(M, N, device=device)
    assert torch.equal(stage(a, b, c, beta=beta), wanted)
    assert torch.equal(stage(a, b, c, alpha=INF, beta=beta, out=out.view), wanted)
    assert torch.equal(stage(a, b), torch.zeros_like(c))
    out.assert_untouched()


@products_too
def test_more_than_65535_row_tiles(stage, device):
    """B40: a grid has at most 65,535 blocks along y, so rows beyond fail or stay unwritten."""
    if device == "cpu" and stage.__name__ not in ("stage0", "stage3", "stage9"):
        pytest.skip("launch_tiles() does it for all stages, and the executor takes 10 s for some")
    M = 65535 * _tile(stage)[0] + 1
    # Neighbours in the buffers: each pointer must advance by its own leading dimension.
    buffer = torch.full((M, 4), NAN, device=device)
    rows = torch.arange(M, device=device)
    a, c, out = buffer[:, 0:1], buffer[:, 1:2], buffer[:, 3:4]
    a.copy_((rows % 1000).unsqueeze(1))
    c.copy_((rows % 7).unsqueeze(1))
    stage(a, a.new_full((1, 1), 3.0), c, beta=2.0, out=out)
    assert torch.equal(out.flatten(), (rows % 1000 * 3 + rows % 7 * 2).float())
    assert buffer[:, 2].isnan().all()


@products_too
@pytest.mark.parametrize("far", ["a", "b", "c", "columns of c", "out", "columns of out"])
def test_offsets_beyond_32_bits(stage, device, far):
    """B36: row * stride wraps at 2^31 elements: the third row's offset is beyond."""
    stride = 2**30 + 8
    # 8.6 GB of address space, of which a few pages are touched (on a GPU it is memory).
    buffer = torch.empty(2 * stride + 64, device=device)
    if far.startswith("columns"):
        matrix = buffer.as_strided((3, 3), (1, stride), 5)
    else:
        matrix = buffer.as_strided((3, 3), (stride, 1), 5)
    operands = {name: integers(3, 3, device=device) for name in "abc"}
    out = None
    if far.endswith("out"):
        out = matrix.fill_(NAN)
    else:
        operands[far[-1]] = matrix.copy_(operands[far[-1]])
    require_right(stage, *operands.values(), alpha=2.0, beta=-1.0, out=out)


LIMIT = 2_147_482_623


@products_too
def test_sizes_at_the_limit_are_accepted(stage, device):
    one = torch.ones(1, 1, device=device)
    assert stage(one.expand(LIMIT, 1), torch.empty(1, 0, device=device)).shape == (LIMIT, 0)
    assert stage(torch.empty(0, 1, device=device), one.expand(1, LIMIT)).shape == (0, LIMIT)
    assert stage(torch.empty(0, LIMIT, device=device), one.expand(LIMIT, 1)).shape == (0, 1)


@pytest.mark.parametrize(
    ("a", "b", "name", "shape"),
    [
        pytest.param((LIMIT + 1, 1), (1, 1), "a", "(2147482624, 1)", id="M"),
        pytest.param((1, 1), (1, LIMIT + 1), "b", "(1, 2147482624)", id="N"),
        pytest.param((1, LIMIT + 1), (LIMIT + 1, 1), "a", "(1, 2147482624)", id="K"),
    ],
)
def test_sizes_over_the_limit_are_refused(stage, device, a, b, name, shape):
    one = torch.ones(1, 1, device=device)
    text = f"{name} must have at most 2147482623 rows and columns, got shape {shape}"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        stage(one.expand(a), one.expand(b))


# ---- strides -------------------------------------------------------------------------------------

SHAPES = [(33, 17, 19), (32, 32, 32), (1, 40, 7), (40, 1, 7), (7, 9, 1), (1, 1, 1)]


@products_too
@pytest.mark.parametrize("operand", ["a", "b", "c", "out"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(stage, device, operand, layout):
    """B26: a result written as if contiguous; B27: pointers unfit for 16-byte loads; B30: slices
    read in physical order; B43: one row or column with the wrong leading dimension.

    The last shape's rows are multiples of 16 bytes, but for what the layout says of one operand."""
    for M, N, K in [*SHAPES, _whole_tiles(stage)]:
        layouts = dict.fromkeys(("a", "b", "c", "out"), "padded_by_16_bytes") | {operand: layout}
        a = place(torch.randn(M, K, device=device), layouts["a"])
        b = place(torch.randn(K, N, device=device), layouts["b"])
        c = place(torch.randn(M, N, device=device), layouts["c"])
        out = Arena(M, N, layouts["out"], device)
        strides = out.view.stride()
        what = f"{operand} {layout}, M, N, K = {M}, {N}, {K}"
        require_right(stage, a.view, b.view, what=what)
        require_right(stage, a.view, b.view, c.view, alpha=-0.5, beta=2.0, out=out.view, what=what)
        require_untouched(a, b, c, out)
        assert out.view.stride() == strides


def _views_of_one_buffer(device):
    """Each with shape (12, 12), as slices, transposed, expanded and overlapping views have them."""
    x = torch.randn(24, 24, device=device)
    return {
        "rows [::2]": x[::2, :12],
        "columns [::2]": x[:12, ::2],
        "both [::2]": x[::2, ::2],
        "transposed": x[:12, 3:15].t(),
        "rows of stride 0": x[0, :12].expand(12, 12),
        "columns of stride 0": x[:12, :1].expand(12, 12),
        "both of stride 0": x[0, 0].expand(12, 12),
        "B21: rows that overlap": x.as_strided((12, 12), (1, 1)),
        "rows that overlap in part": x.as_strided((12, 12), (5, 1), 2),
        "columns that overlap": x.as_strided((12, 12), (1, 5), 2),
        "one matrix of a batch": x.view(12, 2, 24)[:, 1, 7:19],
        "a lazily negated view": torch._neg_view(x[:12, :12]),
    }


@products_too
@pytest.mark.parametrize("view", _views_of_one_buffer("cpu"))
def test_views(stage, device, view):
    """B21: both strides 1; B23: leading dimension 0; B30: as .contiguous() gives."""
    views = _views_of_one_buffer(device)
    x, y = views[view], torch.randn(12, 12, device=device)
    for a, b, c in ((x, y, y), (y, x, y), (y, y, x), (x, x, x)):
        got = require_right(stage, a, b, c, alpha=0.5, beta=1.5)
        same = stage(a.contiguous(), b.contiguous(), c.contiguous(), alpha=0.5, beta=1.5)
        # A product op may take another kernel for another layout.
        assert stage.__name__ in PRODUCTS or torch.equal(got, same)


@products_too
@pytest.mark.parametrize("K", [1, 64])
def test_an_expanded_row(stage, device, K):
    """B23: (1, K) with strides (1, 0) as A, as the transpose of B, and as the bias."""
    two = torch.tensor([2.0], device=device)
    x = two.expand(1, K)
    assert stage(x, x.t()).item() == 4 * K
    assert torch.equal(stage(x.t(), x, x, beta=1.0), two.new_full((K, K), 6.0))


# ---- c, alpha, beta ------------------------------------------------------------------------------


def _biases(M, N, device):
    def ramp(*shape):
        return torch.arange(torch.Size(shape).numel(), device=device).float().view(shape)

    return {
        "()": ramp(),
        "(1,)": ramp(1) + 1,
        "(N,)": ramp(N),
        "(1, 1)": ramp(1, 1) - 1,
        "(1, N)": ramp(1, N),
        "(M, 1)": ramp(M, 1),
        "(M, N)": ramp(M, N),
        "(N,) expanded": ramp(N).expand(M, N),
        "(M, 1) expanded": ramp(M, 1).expand(M, N),
        "() expanded": (ramp() + 2).expand(M, N),
        "(1,) expanded": (ramp(1) + 2).expand(N),
        "transposed": ramp(N, M).t(),
        "(N,) [::2]": ramp(2 * N)[::2],
        "(M, 1) column of a buffer": ramp(M, 3)[:, 1:2],
        "(M, N) column slice": ramp(M, N + 3)[:, 2:-1],
    }


@products_too
@pytest.mark.parametrize("kind", _biases(2, 2, "cpu"))
def test_c_broadcasts_as_in_addmm(stage, device, kind):
    """B45: only a row is read, or along the wrong axis, which a square M == N alone can hide."""
    for M, N, K in ((33, 47, 6), (40, 40, 6), (1, 9, 6), (9, 1, 6), _whole_tiles(stage)):
        c = _biases(M, N, device)[kind]
        a, b = integers(M, K, device=device), integers(K, N, device=device)
        out = Arena(M, N, "padded_by_16_bytes", device)
        require_right(stage, a, b, c, beta=1.0, what=f"c {kind} for {M} x {N}")
        got = require_right(stage, a, b, c, alpha=-2.0, beta=0.5, out=out.view)
        assert torch.equal(got, (-2 * (a.double() @ b.double()) + 0.5 * c.double()).float())
        out.assert_untouched()


@pytest.mark.parametrize("beta", [0.0, 1.0, -1.0, 0.75, 1000.0])
@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0, 0.3, 1e-3])
def test_alpha_and_beta(stage, device, alpha, beta):
    a, b = torch.randn(33, 21, device=device), torch.randn(21, 18, device=device)
    c = torch.randn(33, 18, device=device)
    require_right(stage, a, b, c, alpha=alpha, beta=beta)
    require_right(stage, a, b, alpha=alpha, beta=beta)  # beta without c has no effect


@gemms_too
@pytest.mark.parametrize("kind", ["(1, 1)", "(N,)", "(M, N)", "transposed"])
def test_beta_0_does_not_read_c(stage, device, kind):
    """B50, B52: NaN times zero, from a c that was never initialised."""
    a, b = torch.randn(33, 21, device=device), torch.randn(21, 18, device=device)
    c = torch.full_like(_biases(33, 18, device)[kind], NAN)
    got = require_right(stage, a, b, c, alpha=0.088)
    assert got.isfinite().all()
    assert torch.equal(got, stage(a, b, alpha=0.088))


@gemms_too
def test_beta_0_does_not_read_out(stage, device):
    """B52: out is c, and holds NaN."""
    a, b = torch.randn(33, 21, device=device), torch.randn(21, 18, device=device)
    out = Arena(33, 18, device=device)
    require_right(stage, a, b, out.view, beta=0.0, out=out.view)
    out.assert_untouched()


@gemms_too
@pytest.mark.parametrize("poison", [NAN, INF])
def test_alpha_0_does_not_read_a_and_b(stage, device, poison):
    """B51: as BLAS has it, what a zero multiplies is not read."""
    a = torch.full((33, 21), poison, device=device)
    b = torch.full((21, 18), poison, device=device)
    c = torch.randn(33, 18, device=device)
    assert torch.equal(stage(a, b, alpha=0.0), torch.zeros_like(c))
    assert torch.equal(stage(a, b, c, alpha=0.0, beta=0.5), 0.5 * c)
    assert torch.equal(stage(a.t().contiguous().t(), b, c, alpha=0.0, beta=1.0), c)


# ---- out -----------------------------------------------------------------------------------------


@gemms_too
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("beta", [1.0, -0.5])
def test_out_may_be_c(stage, device, layout, beta):
    for M, N, K in SHAPES:
        a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
        c = place(torch.randn(M, N, device=device), layout)
        require_right(stage, a, b, c.view[:], beta=beta, out=c.view)
        c.assert_untouched()


def test_out_may_be_c_of_fewer_dimensions(stage, device):
    c = torch.randn(9, device=device)
    a, b = torch.randn(1, 4, device=device), torch.randn(4, 9, device=device)
    require_right(stage, a, b, c, beta=1.0, out=c.unsqueeze(0))


SELF_OVERLAP = {
    "B47: one element": lambda x: x[0, 0].expand(4, 4),
    "one row": lambda x: x[0, :4].expand(4, 4),
    "one column": lambda x: x[:4, :1].expand(4, 4),
    "rows that overlap in part": lambda x: x.as_strided((4, 4), (3, 1)),
    "both strides 1": lambda x: x.as_strided((4, 4), (1, 1)),
    "strides 2 and 3": lambda x: x.as_strided((4, 4), (2, 3)),
}


@pytest.mark.parametrize("kind", SELF_OVERLAP)
def test_out_that_overlaps_itself_is_refused(stage, device, kind):
    """B47: garbage, as each location gets several elements."""
    buffer = torch.zeros(8, 8, device=device)
    a = torch.ones(4, 4, device=device)
    with pytest.raises(RuntimeError, match="out must not overlap itself"):
        stage(a, a, out=SELF_OVERLAP[kind](buffer))
    assert (buffer == 0).all()


@gemms_too
def test_out_with_interleaved_but_distinct_elements_is_accepted(stage, device):
    """Strides 3 and 4 of a 4 x 3 matrix: rows and columns interleave, and no two meet."""
    out = torch.full((32,), NAN, device=device).as_strided((4, 3), (3, 4))
    assert len({3 * i + 4 * j for i in range(4) for j in range(3)}) == 12
    require_right(
        stage, torch.randn(4, 5, device=device), torch.randn(5, 3, device=device), out=out
    )


OVERLAPS = {
    "a itself": lambda x: ("a", x[:4, :4], x[:4, :4]),
    "b itself": lambda x: ("b", x[:4, :4], x[:4, :4]),
    "a shifted by a row": lambda x: ("a", x[1:5, :4], x[:4, :4]),
    "b shifted by a column": lambda x: ("b", x[:4, 1:5], x[:4, :4]),
    "a, in one corner": lambda x: ("a", x[3:7, 3:7], x[:4, :4]),
    "a transposed": lambda x: ("a", x[:4, :4].t(), x[:4, :4]),
    "b with other rows": lambda x: ("b", x.view(-1)[:16].view(4, 4), x[:4, :4]),
    "c transposed": lambda x: ("c", x[:4, :4].t(), x[:4, :4]),
    "c shifted by a row": lambda x: ("c", x[1:5, :4], x[:4, :4]),
    "c, one row of out": lambda x: ("c", x[2, :4], x[:4, :4]),
    "c, one element of out": lambda x: ("c", x[1, 1], x[:4, :4]),
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_out_that_overlaps_an_operand_is_refused(stage, device, kind):
    """B46: zeros or NaN, as an operand is overwritten while it is read."""
    buffer = torch.randn(8, 8, device=device)
    before = buffer.clone()
    name, operand, out = OVERLAPS[kind](buffer)
    operands = {key: torch.ones(4, 4, device=device) for key in "abc"} | {name: operand}
    with pytest.raises(RuntimeError, match=f"out must not share memory with {name}"):
        stage(*operands.values(), beta=1.0, out=out)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("N", [4, 5000])
def test_out_that_is_an_operand_is_refused_at_any_size(stage, device, N):
    """B46: some implementations notice only where they take another path for large sizes."""
    x, y = torch.empty(N, N, device=device), torch.empty(N, N, device=device)
    for a, b in ((x, y), (y, x)):
        with pytest.raises(RuntimeError, match="out must not share memory with"):
            stage(a, b, out=x)


def test_operands_and_out_may_be_slices_of_one_buffer(stage, device):
    """Not an overlap: they share rows of memory, and no element."""
    buffer = torch.randn(12, 40, device=device)
    for columns in (
        {"a": slice(0, 12), "b": slice(12, 21), "c": slice(21, 30), "out": slice(30, 39)},
        {"out": slice(0, 9), "c": slice(9, 18), "b": slice(18, 27), "a": slice(27, 39)},
    ):
        operands = {name: buffer[:, columns[name]] for name in "abc"}
        out = buffer[:, columns["out"]]
        before = buffer.clone()
        require_right(stage, *operands.values(), alpha=0.5, beta=2.0, out=out)
        before[:, columns["out"]] = out
        assert torch.equal(buffer, before)
    rows = torch.randn(24, 12, device=device)
    require_right(stage, rows[::2], torch.randn(12, 12, device=device), out=rows[1::2])
    require_right(stage, rows[:12], torch.randn(12, 12, device=device), out=rows[12:])


def test_c_that_is_not_read_may_overlap_out(stage, device):
    x = torch.full((4, 4), NAN, device=device)
    a = torch.ones(4, 4, device=device)
    require_right(stage, a, a, x.t(), beta=0.0, out=x)


@pytest.mark.parametrize(
    ("M", "K", "alpha", "beta"),
    [
        pytest.param(5, 4, 1.0, 0.0, id="plain"),
        pytest.param(5, 4, 0.0, 1.0, id="result-equals-c"),
        pytest.param(5, 0, 1.0, 1.0, id="empty-sum"),
        pytest.param(0, 4, 1.0, 1.0, id="empty-result"),
        pytest.param(5, 5, 1.0, 0.0, id="square"),
    ],
)
def test_the_result_is_a_new_tensor(stage, device, M, K, alpha, beta):
    """B82: a shortcut returns an input, and whoever writes into the result changes it."""
    a, b = torch.randn(M, K, device=device), torch.randn(K, 5, device=device)
    c = torch.randn(M, 5, device=device)
    before = c.clone()
    result = stage(a, b, c, alpha=alpha, beta=beta)
    assert result._base is None
    assert all(result is not t for t in (a, b, c))
    assert result.is_contiguous()
    assert result.storage_offset() == 0
    result.fill_(7.0)
    assert torch.equal(c, before)
    assert not (a == 7.0).any()
    assert not (b == 7.0).any()


# ---- values --------------------------------------------------------------------------------------


@products_too
@pytest.mark.parametrize("N", [1, 16, 33])
def test_a_k_tail_reads_no_neighbour(stage, device, N):
    """B54: zero times the NaN beyond a row is NaN."""
    a, b = torch.full((16, 40), NAN, device=device), torch.full((40, N), NAN, device=device)
    a[:, :33], b[:33] = 1, 1
    assert (stage(a[:, :33], b[:33]) == 33).all()
    wide = torch.full((33, N + 7), NAN, device=device)
    wide[:, :N] = 1
    assert (stage(a[:, :33], wide[:, :N]) == 33).all()


@products_too
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("size", [33, 64])
def test_one_special_value_reaches_its_row_or_column_only(stage, device, value, size):
    """B54, B55: NaN spreads to clean rows, or an infinity becomes NaN."""
    ones = torch.ones(size, size, device=device)
    special = ones.clone()
    special[5, 7] = value
    hit = torch.zeros(size, size, dtype=torch.bool, device=device)
    hit[5] = True
    for got, where in ((stage(special, ones), hit), (stage(ones, special.t()), hit.t())):
        assert (got[~where] == size).all()
        assert torch.equal(got[where], torch.full_like(got[where], value)) or (
            value != value and got[where].isnan().all()
        )


@products_too
def test_infinities_follow_ieee(stage, device):
    """B55: inf stays inf; NaN only for inf * 0 and inf - inf."""
    ones = torch.ones(20, 20, device=device)
    inf, zero = torch.full_like(ones, INF), torch.zeros_like(ones)
    assert (require_right(stage, inf, ones) == INF).all()
    assert (require_right(stage, -inf, ones) == -INF).all()
    assert (require_right(stage, inf, -inf) == -INF).all()
    assert require_right(stage, inf, zero).isnan().all()
    mixed = inf.clone()
    mixed[:, ::2] = -INF
    assert require_right(stage, mixed, ones).isnan().all()
    assert (require_right(stage, ones, ones, inf, beta=-1.0) == -INF).all()
    assert require_right(stage, inf, ones, inf, beta=-1.0).isnan().all()


@products_too
def test_overflow_is_infinite(stage, device):
    huge = torch.full((3, 4), 3e38, device=device)
    assert (require_right(stage, huge, torch.ones(4, 5, device=device)) == INF).all()
    assert (require_right(stage, -huge, torch.ones(4, 5, device=device)) == -INF).all()


@products_too
@pytest.mark.parametrize("bits", [0x7F800001, -0x7FFFFF, 0x7FC00000, 0x7FFFFFFF])
def test_every_nan_stays_nan(stage, device, bits):
    """B57: rounding to fewer bits turns the NaN 0x7f800001 into an infinity (-0x7fffff is
    0xff800001)."""
    a = torch.ones(17, 18, device=device)
    a.view(torch.int32)[3, 4] = bits
    got = require_right(stage, a, torch.ones(18, 5, device=device))
    assert got[3].isnan().all()
    assert got.isnan().sum() == 5


@products_too
@pytest.mark.parametrize("K", [1, 64])
def test_subnormals_are_kept(stage, device, K):
    """B59: flushed to zero."""
    tiny = torch.full((5, K), 1e-40, device=device)
    ones = torch.ones(K, 6, device=device)
    # Sums of one subnormal are exact.
    expected = torch.full((5, 6), 1e-40, dtype=torch.float32, device=device) * K
    assert (expected > 0).all()
    assert torch.equal(require_right(stage, tiny, ones), expected)
    assert torch.equal(require_right(stage, ones.t(), tiny.t()), expected.t())
    small = torch.full((5, K), 1e-20, device=device)
    assert (require_right(stage, small, torch.full_like(ones, 1e-20)) > 0).all()
    assert (require_right(stage, tiny * 100, ones, alpha=0.5) > 0).all()
    c = torch.full((5, 6), 1e-40, device=device)
    zero = torch.zeros_like(tiny)
    assert torch.equal(require_right(stage, zero, ones, c, beta=1.0), c)


def test_integers_are_exact(stage, device):
    a, b = integers(65, 1000, device=device), integers(1000, 33, device=device)
    assert torch.equal(stage(a, b).double(), a.double() @ b.double())


def test_products_are_not_rounded(stage, device):
    """B106: TF32, BF16 and FP16 have no bits for 1024.5 and 1 + 2^-11."""
    check.require_fp32(stage, device, stage.__name__)


@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_error_is_that_of_the_first_stage(stage, device, spread):
    """A stage sums in another order, at most: its rms error is within 1.25 x stage0's."""
    a, b = ((torch.rand(n, n, device=device) - 0.5) for n in (192, 192))
    a, b = a * (spread * torch.randn_like(a)).exp(), b * (spread * torch.randn_like(b)).exp()
    reference = check.reference(a, b)
    first = check.require(STAGES["stage0"](a, b), reference).rms
    assert first > 0
    assert check.require(stage(a, b), reference).rms <= 1.25 * first


@pytest.mark.parametrize(("M", "N", "K"), [(130, 70, 257), (64, 64, 512), (256, 256, 64)])
def test_the_same_call_gives_the_same_bits(stage, device, M, N, K):
    """B75: a missing barrier corrupts a result now and then."""
    a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
    first = stage(a, b)
    for _ in range(10):
        assert torch.equal(stage(a, b), first)
