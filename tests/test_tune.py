"""The tuner: its tiles are the stage's own, an impossible one says why, a bad one loses nothing."""

import contextlib
import shutil
from types import SimpleNamespace

import pytest
import report
import torch
import tune
import variants
from variants import Built, Measured

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


@pytest.mark.parametrize("stage", tune.STAGES)
def test_the_sweep_has_the_shipped_tile_once_and_no_tile_twice(stage):
    tiles = tune.space(stage)
    assert tiles.count(tune.shipped(stage)) == 1
    labels = [tune.label(tile) for tile in tiles]
    assert len(set(labels)) == len(labels) > 50
    for tile in tiles:
        assert tile.keys() == tune.shipped(stage).keys()
        assert tile["WM"] * tile["WN"] == 32 * tile["TM"] * tile["TN"]


@pytest.mark.parametrize("stage", tune.STAGES)
def test_a_tile_becomes_the_constants_of_the_stage_s_own_source(stage):
    tile = tune.parse_tile(stage, "BK=32")
    text = variants.source(tune.variant(stage, tile))
    spans = variants.constants(text)
    assert {name: int(text[slice(*spans[name])]) for name in tile} == tile
    assert variants.source(tune.variant(stage, tune.shipped(stage))).startswith(
        f'#line 1 "{report.stage_file(stage).relative_to(report.ROOT)}"\n'
        + report.stage_file(stage).read_text()
    )


def test_of_two_tiles_in_a_stage_it_is_the_shipped_one():
    text = report.stage_file("stage10").read_text()
    assert text.count("constexpr int BM = ") == 3  # Shipped, Ragged and the kernel's short name
    start, end = variants.constants(text)["BM"]
    assert text.index("struct Shipped") < start < end < text.index("struct Ragged")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["stage5", "--compile", "d"], "stage5 has no struct Shipped with a tile to tune"),
        (["stage77", "--compile", "d"], "there is no stage 'stage77'"),
        (["stage7", "--compile", "d", "--tile", "PAD=4"], "BM, BN, BK, WM, WN, TM, TN; got 'PAD"),
        (["stage7", "--compile", "d", "--tile", "BM=x"], "got 'BM=x'"),
        (["stage7", "--compile", "d", "--quick", "0"], "--quick must be at least 1, got 0"),
        (["stage7", "--compile", "d", "--sizes", "0"], "sizes must be at least 1, got 0"),
        (["stage7"], "measuring needs a GPU and torch sees none here"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(capsys, monkeypatch, tmp_path, arguments, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with contextlib.suppress(SystemExit):  # argparse's
        assert tune.main(arguments) == 1
    assert text in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@needs_nvcc
def test_an_illegal_tile_says_which_rule_of_the_stage_it_breaks(tmp_path, capsys):
    tiles = ["BM=48", "WM=64", "BK=128"]
    arguments = [part for tile in tiles for part in ("--tile", tile)]
    assert tune.main(["stage7", "--compile", str(tmp_path), "--arch", "9.0a", *arguments]) == 0
    found = {b.variant.label: b for b in variants.load(tmp_path)}
    notes = [tune.reason(b.error) for b in found.values()]
    source = report.stage_file("stage7").read_text()
    assert notes[0] == ""
    assert found[f"stage7 {tune.label(tune.shipped('stage7'))}"].library
    for note in notes[1:]:
        assert note.startswith("illegal: ")
        assert note.removeprefix("illegal: ") in source
    assert "illegal: the block tile BM x BN is whole warp tiles WM x WN" in capsys.readouterr().out


class Sweep:
    """A sweep of four tiles whose measurements are pretended."""

    def __init__(self, monkeypatch, tmp_path):
        self.tiles = [
            tune.shipped("stage7"),
            *(tune.parse_tile("stage7", f"BK={k}") for k in (4, 8, 32)),
        ]
        self.labels = [tune.variant("stage7", tile).label for tile in self.tiles]
        self.rounds, self.saved = [], []
        monkeypatch.setattr(variants, "measure", self.measure)
        monkeypatch.setattr(report, "environment", lambda device: {"gpu": "none"})
        monkeypatch.setattr(report, "results_folder", lambda device: tmp_path)
        monkeypatch.setattr(report, "save", self.save)
        built = [Built(tune.variant("stage7", tile), tmp_path) for tile in self.tiles[:3]]
        illegal = 'it does not compile: error: static assertion failed with "BK is wrong"'
        built.append(Built(tune.variant("stage7", self.tiles[3]), None, (), illegal))
        self.sweep = tune.Sweep(built, [512, 1024], save=True)

    def measure(self, built, size, reps, device, peak, progress):
        self.rounds.append((size[0], reps, [b.variant.label for b in built]))
        if len(self.rounds) == self.fail_at:
            raise KeyboardInterrupt
        found = []
        for b in built:
            place = self.labels.index(b.variant.label)
            time = SimpleNamespace(median=1e-3 * (2 - place / 2))
            wrong = place == 2 and size[0] == 512
            found.append(
                Measured(
                    b, failure="crashed (SIGSEGV)" if wrong else "", time=None if wrong else time
                )
            )
        return found

    def save(self, folder, name, rows, env):
        self.saved.append([dict(row) for row in rows])

    fail_at = 0


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    return Sweep(monkeypatch, tmp_path)


class Bar:
    def set_description(self, text):
        pass

    def update(self):
        pass


def test_all_are_measured_once_and_the_best_and_the_shipped_again(pretended):
    pretended.sweep.run(quick=1, best=1, reps=5, peak=1e15, bar=Bar())
    shipped, second, third, _ = pretended.labels
    assert pretended.rounds == [
        (512, 1, [shipped, second, third]),
        (512, 5, [shipped, second]),
        (1024, 1, [shipped, second, third]),
        (1024, 5, [shipped, third]),
    ]
    text = tune.summary(pretended.sweep, "stage7")
    assert "512  1." in text
    assert "BK=4" in text
    assert "1.333 x the shipped" in text
    assert "2.000 x the shipped" in text


def test_a_tile_that_crashes_or_is_illegal_is_a_row_with_the_reason(pretended):
    pretended.sweep.run(quick=1, best=1, reps=5, peak=1e15, bar=Bar())
    rows = {(row["tile"], row["M"]): row for row in pretended.saved[-1]}
    assert len(rows) == 8
    tiles = [tune.label(tile) for tile in pretended.tiles]
    assert rows[tiles[2], 512]["note"] == "crashed (SIGSEGV)"
    assert rows[tiles[2], 512]["time_ms"] is None
    assert rows[tiles[2], 1024]["note"] == ""
    assert rows[tiles[2], 1024]["samples"] == 5
    assert rows[tiles[3], 512]["note"] == "illegal: BK is wrong"
    assert "1 tiles: crashed (SIGSEGV)" in tune.problems(pretended.sweep)


def test_an_interrupted_sweep_has_saved_the_rounds_before(pretended):
    pretended.fail_at = 3
    with pytest.raises(KeyboardInterrupt):
        pretended.sweep.run(quick=1, best=1, reps=5, peak=1e15, bar=Bar())
    rows = pretended.saved[-1]
    assert {row["note"] for row in rows if row["M"] == 1024} == {
        "not measured",
        "illegal: BK is wrong",
    }
    assert sum(row["samples"] == 5 for row in rows if row["M"] == 512) == 2


def test_the_committed_sweep_has_the_shipped_tiles_among_its_best():
    """The tile of a stage comes from it: within 3 % of the best from 2048 on."""
    rows = report.read_csv(report.RESULTS / "nvidia-h200" / "tune.csv")
    assert {row["kernel"] for row in rows} == set(tune.STAGES)
    for stage in tune.STAGES:
        ours = tune.label(tune.shipped(stage))
        for size in (2048, 4096, 8192):
            timed = [r for r in rows if (r["kernel"], r["M"]) == (stage, size) and r["time_ms"]]
            (shipped,) = (r for r in timed if r["tile"] == ours)
            assert shipped["time_ms"] < 1.03 * min(r["time_ms"] for r in timed), (stage, size)
