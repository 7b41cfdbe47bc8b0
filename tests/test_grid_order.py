"""grid_order.py: the same kernels, whose blocks take the tiles in the other order."""

import shutil

import cpu_variants
import grid_order
import pytest
import report
import timing
import torch
import variants
from variants import Built, Measured

import torch_sgemm

STAGES = list(torch_sgemm.STAGES)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on PATH")
    wanted = {stage: grid_order.other(stage) for stage in STAGES}
    return cpu_variants.compiled(wanted, tmp_path_factory.mktemp("other"))


@pytest.mark.parametrize("stage", STAGES)
def test_the_other_order_computes_the_same(stage, launch):
    """Each tile once, to the bit, in a grid that is not square and has an edge."""
    text = report.stage_file(stage).read_text()
    spans = variants.constants(text)
    BM, BN, BK = (int(text[slice(*spans[name])]) for name in ("BM", "BN", "BK"))
    a, b = torch.randn(3 * BM - 1, BK), torch.randn(BK, 2 * BN)
    out = torch.full((a.shape[0], b.shape[1]), float("nan"))
    assert launch(stage, a, b, out) == 0
    assert torch.equal(out, torch_sgemm.STAGES[stage](a, b))


def test_the_order_is_the_other_one():
    """The blocks' tiles, in the order in which they start."""
    source = variants.source(grid_order.other("stage2"))
    assert "block_row = tile % gridDim.y * BM, block_col = tile / gridDim.y * BN" in source
    tiles = [(tile % 3, tile // 3) for tile in range(6)]
    assert tiles == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


def test_the_rows_pair_a_stage_with_its_other_order(monkeypatch, tmp_path):
    def measured(built, size, limit):
        def time(b):
            return timing.Timing((0.002 if "down M" in b.variant.label else 0.001,) * 7)

        return [Measured(b, time=time(b)) for b in built]

    monkeypatch.setattr(grid_order.sweeps, "measured", measured)
    monkeypatch.setattr(grid_order.sweeps, "peak", lambda: 1e15)
    rows, failures = grid_order.measure([Built(variant, None) for variant in grid_order.pairs()])
    assert failures == []
    assert [row["kernel"] for row in rows] == STAGES
    assert {row["ratio"] for row in rows} == {2.0}
    report.write_csv(tmp_path / "grid_order.csv", rows)
    table = grid_order.markdown(
        report.read_csv(tmp_path / "grid_order.csv"), report.environment("cpu")
    )
    assert "| stage3 register tile | 2048 | 1.000 | 2.000 | 2.000 |" in table.splitlines()
    built = [Measured(Built(variant, None)) for variant in grid_order.pairs()]
    with pytest.raises(ValueError, match="no pair: stage0 down M first, stage1 as written"):
        grid_order.rows_of([(built[1], built[2])])
