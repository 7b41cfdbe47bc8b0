"""ablation.py: its rows are the differences between the two stages, whatever those are tuned to."""

import re
import shutil
from types import SimpleNamespace

import ablation
import pytest
import report
import sweeps
import timing
import variants
from ablation import Change
from variants import Built, Measured, Resources, Variant

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")

STAGE = """
struct Shipped {{
  static constexpr int BM = {BM}, BN = 128, BK = {BK}, PAD = {PAD}, STAGES = {STAGES};
  static constexpr int WM = 64, WN = {WN};
  static constexpr int TM = {TM}, TN = 8;
  static constexpr int THREADS = (BM / WM) * (BN / WN) * WARP{more};
}};
template <Edge E, class Tile>
__global__ __launch_bounds__({bounds}) void kernel(In<E> A, In<E> B, Out<E> C) {{
  // registers -> global
}}
"""
OLD = {"BM": 128, "BK": 8, "PAD": 4, "STAGES": 2, "WN": 32, "TM": 8, "more": ""}
OLD |= {"bounds": "Tile::THREADS"}
BOUNDED = {"more": ", MIN_BLOCKS = 2", "bounds": "Tile::THREADS, Tile::MIN_BLOCKS"}


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """Makes the two stages what the test says of the new one."""

    def make(**new):
        monkeypatch.setattr(report, "ROOT", tmp_path)
        for stage, values in ((ablation.OLD, OLD), (ablation.NEW, OLD | new)):
            (tmp_path / f"{stage}.cu").write_text(STAGE.format(**values))
        monkeypatch.setattr(variants, "stage_file", lambda stage: tmp_path / f"{stage}.cu")
        return ablation.changes()

    return make


def test_the_changes_are_the_differences_in_groups(stages):
    assert stages() == []
    assert stages(PAD=0) == [Change("padding", {"PAD": 4}, {"PAD": 0})]
    assert stages(TM=16, WN=64) == [
        Change("thread tile", {"WN": 32, "TM": 8}, {"WN": 64, "TM": 16}),
    ]
    assert stages(TM=16, PAD=0) == [
        Change("thread tile", {"TM": 8}, {"TM": 16}),
        Change("padding", {"PAD": 4}, {"PAD": 0}),
        Change("tiles and padding", {"PAD": 4, "TM": 8}, {"PAD": 0, "TM": 16}),
    ]
    assert stages(BM=256, BK=16, TM=16, STAGES=3, **BOUNDED) == [
        Change("block tile", {"BM": 128, "BK": 8}, {"BM": 256, "BK": 16}),
        Change("thread tile", {"TM": 8}, {"TM": 16}),
        Change("both tiles", {"BM": 128, "BK": 8, "TM": 8}, {"BM": 256, "BK": 16, "TM": 16}),
        Change("STAGES", {"STAGES": 2}, {"STAGES": 3}),
        Change("launch bounds (THREADS, 2)", bounds=("Tile::THREADS", "Tile::THREADS, 2")),
    ]


def test_a_change_is_made_and_unmade_in_the_source(stages):
    """All of them make the old stage the new one, and the other way round."""
    padding, bounds = stages(PAD=0, **BOUNDED)
    assert padding.added() == Variant("stage9", "stage9 + padding (PAD = 0)", {"PAD": 0})
    assert padding.removed() == Variant("stage10", "stage10 - padding (PAD = 4)", {"PAD": 4})
    assert "__launch_bounds__(Tile::THREADS, 2) void" in variants.source(bounds.added())
    assert "__launch_bounds__(Tile::THREADS) void" in variants.source(bounds.removed())
    assert "global\n  C.c = nullptr;\n}" in variants.source(ablation.left_out("stage9"))
    old, new = (variants.stage_file(stage).read_text() for stage in ("stage9", "stage10"))
    assert ablation.numbers(old) | padding.new | {"MIN_BLOCKS": 2} == ablation.numbers(new)


def test_the_rows_of_the_shipped_stages_can_be_made():
    """Each has a source, and together the changes are all there is."""
    wanted = ablation.variants_of()
    assert len({v.label for v in wanted}) == len(wanted) >= 2 + 2 * 2
    for variant in wanted:
        variants.source(variant)
    old, new = (
        ablation.numbers(report.stage_file(stage).read_text()) for stage in ("stage9", "stage10")
    )
    for change in ablation.changes():
        old |= change.new
    assert old | {name: new[name] for name in new.keys() - old.keys()} == new


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A tile that the copies do not divide, one that is legal, and a mistake in the source."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    some = [
        Change("block tile", new={"BM": 1024}).added(),
        ablation.left_out("stage9"),
        Variant("stage9", "mistake", replace=((ablation.EPILOGUE, "  nonsense\n"),)),
    ]
    return variants.compile(some, tmp_path_factory.mktemp("ablation"), ["9.0a"])


@needs_nvcc
def test_an_illegal_tile_is_told_from_a_mistake(compiled):
    tile, beta, mistake = compiled
    assert tile.error
    assert ablation.illegal(tile).startswith("no legal tile: ")
    assert "BM" in ablation.illegal(tile) or "shared" in ablation.illegal(tile)
    assert beta.error == ablation.illegal(beta) == ""
    assert "nonsense" in mistake.error
    assert ablation.illegal(mistake) == ""


@needs_nvcc
def test_compile_prints_every_variant_and_fails_for_a_mistake_alone(compiled, monkeypatch, capsys):
    def main(built):
        monkeypatch.setattr(sweeps.Sweep, "built", lambda self, args: built)
        return ablation.SWEEP.main(["--compile", "folder"])

    assert main(compiled[:2]) == 0
    tile, beta = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"stage9 \+ block tile \(BM = 1024\) +no legal tile: .+", tile)
    assert re.search(r"sm_90a: \d+ registers, 0 bytes spilled$", beta)
    assert main(compiled) == 1
    assert "ablation.py: stage9 with 'nonsense' for" in capsys.readouterr().err


def built(stage, label, error=""):
    return Built(Variant(stage, label), None, (Resources("sm_90a", "EdgeE0E", 99, 8, 0, 0),), error)


def test_the_rows_have_what_was_measured_and_why_some_was_not(tmp_path, monkeypatch):
    legal = [("stage9", "stage9 as it is", 4e-3), ("stage9", "stage9 + padding (PAD = 0)", 2e-3)]
    legal.append(("stage10", "stage10 as it is", 2.5e-3))
    found = []
    for stage, label, seconds in legal:
        b = built(stage, label)
        time = timing.Timing((seconds, 1.1 * seconds, seconds))
        found.append(Measured(b, resources=b.resources[0], occupancy=0.125, time=time))
    error = 'x.cu(9): error: static assertion failed with "a warp tile WM x WN is ..."'
    illegal = built("stage9", "stage9 + thread tile (TM = 4)", error)
    found.insert(2, Measured(illegal, failure=error))
    crashed = Measured(built("stage10", "stage10 - padding (PAD = 4)"), failure="crashed (SIGSEGV)")
    found.insert(3, crashed)
    monkeypatch.setattr(ablation, "time_cublas", lambda limit: timing.Timing((2e-3,)))
    monkeypatch.setattr(
        ablation,
        "sweeps",
        SimpleNamespace(peak=lambda: 1e15, measured=lambda built, size, limit: found),
    )
    rows, failed = ablation.measure([])
    assert failed == ["stage10 - padding (PAD = 4): crashed (SIGSEGV)"]
    assert all(tuple(row) == ablation.COLUMNS for row in rows)
    assert rows[1]["tflops"] == pytest.approx(2 * 4096**3 / 4e-3 / 1e12)
    path = tmp_path / "ablation.csv"
    report.write_csv(path, rows)
    lines = ablation.markdown(report.read_csv(path), report.environment("cpu")).splitlines()[2:]
    assert lines[:6] == [
        "| cublasSgemm | 2.000 | 68.7 | - | - | - | - | for scale |",
        "| stage9 as it is | 4.000 | 34.4 | 1.000 | 99 | 8 | 12.5% |  |",
        "| stage9 + padding (PAD = 0) | 2.000 | 68.7 | 2.000 | 99 | 8 | 12.5% |  |",
        "| stage9 + thread tile (TM = 4) | - | - | - | - | - | - | no legal tile: a warp tile WM x "
        "WN is ... |",
        "| stage10 - padding (PAD = 4) | - | - | - | - | - | - | crashed (SIGSEGV) |",
        "| stage10 as it is | 2.500 | 55 | 1.000 | 99 | 8 | 12.5% |  |",
    ]
