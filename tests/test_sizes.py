"""Speed over size: what is measured, what is skipped and told, and pictures that can be read."""

import itertools
import random
import re
from types import SimpleNamespace

import check
import ladder
import peaks
import pytest
import report
import roofline
import sizes
import timing
import torch

import torch_sgemm


@pytest.fixture
def quick(monkeypatch):
    """Peaks that nothing reaches, and no more than one call a sample."""
    asked = []

    def measure(device, reps=5):
        asked.append(device)
        return peaks.Peaks(1e15, 1e15)

    monkeypatch.setattr(peaks, "measure", measure)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0)
    return asked


def row(size, kernel, tflops, pct_cublas=50.0):
    values = (size, size, size, kernel, 2e-9 * size**3 / tflops, 0.01, tflops, pct_cublas)
    return dict(zip(sizes.COLUMNS, (*values, 10.0, 1e-6, 1e-7), strict=True))


# ---- the run -------------------------------------------------------------------------------------


def test_every_stage_is_measured_at_every_size(quick, tmp_path, capsys):
    out, picture = tmp_path / "sizes.csv", tmp_path / "sizes.png"
    arguments = ["24", "16", "--reps", "2", "--device", "cpu", "--budget", "100"]
    assert sizes.main([*arguments, "--csv", str(out), "--png", str(picture)]) == 0
    rows = report.read_csv(out)
    assert tuple(rows[0]) == sizes.COLUMNS
    names = ["torch.matmul", *torch_sgemm.STAGES]
    assert [(r["M"], r["kernel"]) for r in rows] == [(n, name) for n in (16, 24) for name in names]
    for r in rows:
        assert r["M"] == r["N"] == r["K"]
        assert r["tflops"] == pytest.approx(2 * r["M"] ** 3 / r["time_ms"] / 1e9, rel=1e-3)
        assert 0 < r["rms"] < 1e-6
    assert quick == ["cpu"]  # the peaks, once
    assert picture.read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert "skipped" not in captured.err
    assert "16 check stage0" in captured.err
    table = captured.out.splitlines()
    heading = next(line for line in table if line.startswith("  TFLOP/s at M = N = K ="))
    assert heading.split()[-2:] == ["16", "24"]
    assert sum(line.startswith("  stage") for line in table) == len(torch_sgemm.STAGES)
    assert "%|" not in captured.out


def test_the_chosen_kernels_are_in_the_ladder_s_order(quick, tmp_path):
    out = tmp_path / "sizes.csv"
    arguments = ["16", "--kernels", "stage5", "stage0", "--device", "cpu", "--reps", "1"]
    assert sizes.main([*arguments, "--csv", str(out)]) == 0
    assert [r["kernel"] for r in report.read_csv(out)] == ["torch.matmul", "stage0", "stage5"]


def test_a_wrong_result_at_one_size_leaves_no_file_and_keeps_the_table_before(
    quick, tmp_path, monkeypatch, capsys
):
    fp32 = ladder.Ladder.fp32

    def broken_at_24(self):
        wrong = {"stage0": lambda a, b, out: out.zero_()} if self.M == 24 else {}
        return fp32(self) | wrong

    monkeypatch.setattr(ladder.Ladder, "fp32", broken_at_24)
    path = tmp_path / "sizes.csv"
    arguments = ["16", "24", "--kernels", "stage0", "--device", "cpu", "--reps", "1"]
    assert sizes.main([*arguments, "--csv", str(path)]) == 1
    captured = capsys.readouterr()
    assert re.search(r"[\r\n]sizes.py: stage0 is wrong in 576 of 576 entries", captured.err)
    assert "  stage0 naive" in captured.out
    assert not path.exists()


def test_a_figure_above_the_peak_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(peaks, "measure", lambda device, reps=5: peaks.Peaks(1.0, 1.0))
    assert sizes.main(["16", "--kernels", "stage0", "--device", "cpu", "--reps", "1"]) == 1
    assert "cannot be true" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "launches"), [(0.004, 5), (0.02, 1), (0.09, 1), (0.11, 0)])
def test_a_sample_is_preceded_by_a_warm_up(monkeypatch, seconds, launches):
    """Of 20 ms, unless one launch is so much longer that this is nothing to it."""
    clock, ran = [0.0], []

    def launch(self):
        clock[0] += seconds
        ran.append(1)
        return seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0)
    monkeypatch.setattr(timing._Batch, "_seconds", launch)
    batch = timing._Batch(lambda i: None, "cuda", 1)
    ran.clear()
    assert batch.sample(0.0199) == seconds
    assert len(ran) == launches + 1


# ---- the budget ----------------------------------------------------------------------------------


class Pretended:
    """A GPU on which each kernel has a speed at each size, in TFLOP/s."""

    def __init__(self, monkeypatch, speeds):
        self.speeds, self.measured, self.probed = speeds, [], []
        monkeypatch.setattr(sizes, "Some", self.problem)
        monkeypatch.setattr(ladder, "measure", self.measure)
        monkeypatch.setattr(timing, "interleaved", self.interleaved)
        monkeypatch.setattr(peaks, "measure", lambda device: peaks.Peaks(66e12, 4e12))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def problem(self, size, stages, device):
        names = ["cublasSgemm", "torch.matmul", *stages]
        return SimpleNamespace(
            M=size, fp32=lambda: dict.fromkeys(names), call=lambda matmul: None, names=names
        )

    def measure(self, problem, reps, progress, limits, warm):
        self.measured.append((problem.M, problem.names[2:]))
        return [
            row(problem.M, name, self.speeds(name, problem.M)) for name in problem.names
        ], limits

    def interleaved(self, calls, device, reps, warm):
        (size,) = {sizes.PROBE[device]}
        self.probed.append((size, reps))
        seconds = {name: 2e-12 * size**3 / self.speeds(name, size) for name in calls}
        return {name: timing.Timing((s,)) for name, s in seconds.items()}

    def run(self, *wanted, kernels=("stage0", "stage9"), budget=0.25):
        arguments = SimpleNamespace(
            sizes=list(wanted), kernels=list(kernels), reps=7, budget=budget, device="cuda"
        )
        bar = SimpleNamespace(
            total=None, reset=lambda total: setattr(bar, "total", total), update=lambda: None
        )
        bar.set_description = lambda name: None
        return [r for found in sizes.Sizes(arguments, bar).measure() for r in found], bar


def test_what_would_take_too_long_is_skipped_and_told(monkeypatch, capsys):
    """A stage at 0.5 TFLOP/s takes 0.27 s at 4096; the references are measured everywhere."""
    gpu = Pretended(monkeypatch, lambda name, size: 0.5 if name == "stage0" else 45.0)
    rows, bar = gpu.run(1024, 2048, 4096, 8192, 16384)
    both, one = ["stage0", "stage9"], ["stage9"]
    assert gpu.measured == [(1024, both), (2048, both), (4096, one), (8192, one), (16384, one)]
    assert sum(r["kernel"] == "cublasSgemm" for r in rows) == 5
    assert not any(r["kernel"] == "stage0" and r["M"] > 2048 for r in rows)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "sizes.py: stage0 is skipped at 4096: a launch would take about 0.27 s, "
        "and --budget is 0.25"
    )
    assert [re.search(r"at (\d+)", line)[1] for line in said] == ["4096", "8192", "16384"]
    assert gpu.probed == []
    assert bar.total == 1 + 5 * 4 * 8 - 3 * 8  # the bar ends full


def test_a_slow_small_or_odd_size_does_not_foretell_a_large_one(monkeypatch):
    """256 leaves most of a GPU idle, and 4097 has edges: the best speed so far is what counts."""
    gpu = Pretended(monkeypatch, lambda name, size: {256: 0.1, 4097: 20.0}.get(size, 45.0))
    rows, _ = gpu.run(256, 4096, 4097, 16384)
    assert gpu.probed == [(2048, 1)]
    assert {r["M"] for r in rows if r["kernel"] == "stage9"} == {256, 4096, 4097, 16384}


def test_a_large_size_alone_is_probed_at_a_smaller_one(monkeypatch, capsys):
    """Or stage 0 would run for minutes at 16384."""
    gpu = Pretended(monkeypatch, lambda name, size: 0.5 if name == "stage0" else 45.0)
    rows, _ = gpu.run(16384)
    assert gpu.probed == [(2048, 1)]
    assert [r["kernel"] for r in rows] == ["cublasSgemm", "torch.matmul", "stage9"]
    assert "stage0 is skipped at 16384: a launch would take about 18 s" in capsys.readouterr().err


def test_the_probe_runs_the_stages(quick):
    """The real one, on the CPU."""
    args = sizes.parse(["65", "--kernels", "stage0", "--device", "cpu", "--budget", "1e-9"])
    bar = SimpleNamespace(total=0, reset=lambda total: None, update=lambda: None)
    bar.set_description = lambda name: None
    (rows,) = sizes.Sizes(args, bar).measure()
    assert [r["kernel"] for r in rows] == ["torch.matmul"]


# ---- tables and pictures -------------------------------------------------------------------------

ALL = ("cublasSgemm", "torch.matmul", *torch_sgemm.STAGES)


def many_rows():
    rows = []
    for size in sizes.DEFAULT_SIZES["cuda"]:
        for i, name in enumerate(ALL):
            if size < 16384 or i not in (3, 4, 5):
                rows.append(row(size, name, 50 - 0.4 * i if i % 2 else 6 + 0.01 * i))
    return rows


def test_the_table_has_a_dash_where_a_stage_was_skipped(tmp_path):
    rows = [row(64, "torch.matmul", 40.0), row(64, "cublasSgemm", 50.0), row(64, "stage0", 0.5, 1)]
    rows += [row(4096, "cublasSgemm", 51.0), row(64, "stage10", 48.0, 96)]
    rows += [row(4096, "stage10", 49.5, 97.06)]
    report.write_csv(tmp_path / "sizes.csv", rows)
    env = report.environment("cpu")
    assert sizes.markdown(report.read_csv(tmp_path / "sizes.csv"), env).splitlines() == [
        "| TFLOP/s at M = N = K = | 64 | 4096 |",
        "|---|--:|--:|",
        "| cublasSgemm | 50 | 51 |",
        "| torch.matmul | 40 | - |",
        "| stage0 naive | 0.5 | - |",
        "| stage10 retuned | 48 | 49.5 |",
        "| stage10, % of cuBLAS | 96.0% | 97.1% |",
        "",
        "Inputs out of cache. A dash: too slow to be measured at that size. "
        f"{report.describe(env)}.",
    ]
    lines = sizes.text(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[4].split() == ["stage0", "naive", "0.5", "-"]


def test_sizes_that_an_axis_cannot_tell_apart_have_a_panel():
    assert sizes.neighbours([256, 4095, 4096, 4097, 8192]) == (
        [256, 4096, 8192],
        [4095, 4096, 4097],
    )
    assert sizes.neighbours([256, 300, 4096]) == ([256, 300, 4096], [])
    assert sizes.neighbours([1000]) == ([1000], [])


@pytest.fixture
def figures(monkeypatch):
    """What is drawn, instead of closed."""
    from matplotlib import pyplot

    drawn = []
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", drawn.append)
        yield drawn
    for figure in drawn:
        pyplot.close(figure)


def overlapping(figure):
    """Pairs of names that cover one another."""
    from matplotlib.text import Annotation, Text

    figure.canvas.draw()
    boxes = [
        (text.get_text(), Text.get_window_extent(text))
        for axes in figure.axes
        for text in axes.texts
        if isinstance(text, Annotation)
    ]
    return len(boxes), [
        (a, b)
        for i, (a, box) in enumerate(boxes)
        for b, other in boxes[:i]
        if box.shrunk(0.98, 0.8).overlaps(other.shrunk(0.98, 0.8))
    ]


def test_the_names_at_the_lines_ends_do_not_cover_one_another(tmp_path, figures):
    env = report.environment("cpu")
    sizes.picture(many_rows(), env, tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
    count, pairs = overlapping(figures[0])
    assert count == len(ALL)
    assert pairs == []
    wide, narrow = figures[0].axes
    assert [label.get_text() for label in narrow.get_xticklabels()] == ["4095", "4096", "4097"]
    assert "4095" not in [label.get_text() for label in wide.get_xticklabels()]
    assert len(wide.get_lines()) == len(narrow.get_lines()) == len(ALL)
    right = narrow.get_window_extent().x0
    assert all(text.get_window_extent().x1 < right for text in wide.texts)


def test_one_size_of_one_kernel_is_a_picture_too(tmp_path, figures):
    sizes.picture([row(64, "stage3b", 5.0)], report.environment("cpu"), tmp_path / "one.png")
    assert not figures[0].axes[1].get_visible()


def test_the_roofline_s_names_do_not_cover_one_another(tmp_path, figures):
    """With all kernels, of which many lie together."""
    chance = random.Random(0)
    points = []
    for i, kernel in enumerate((*torch_sgemm.STAGES, "cublas")):
        for level, intensity in zip(roofline.LEVELS, (60, 30, 2), strict=True):
            near = intensity * chance.uniform(0.9, 1.1)
            point = {"kernel": kernel, "level": level, "flop_per_byte": near}
            points.append(point | {"M": 4096, "tflops": 6 + 0.01 * i if i < 7 else 40 + i / 2})
    limits = {"ffma": 66.0, "memory": 4.2, "l2": 8.6, "shared": 33.0}
    roofline.picture(points, limits, {"gpu": "a GPU"}, tmp_path / "roofline.png")
    count, pairs = overlapping(figures[0])
    assert count == 3 * (len(torch_sgemm.STAGES) + 1)
    assert pairs == []


def test_labels_are_spread_no_further_than_they_must():
    assert report.spread([1.0, 5.0, 9.0], 2) == [1, 5, 9]
    assert report.spread([5.0, 5.0], 2) == [4, 6]
    assert report.spread([9.0, 1.0, 9.0], 2) == [8, 1, 10]
    assert report.spread([0.0, 0.1], 2, low=0) == [0, 2]
    assert report.spread([], 1) == []
    chance = random.Random(0)
    for _ in range(200):
        wanted = [chance.uniform(0, 10) for _ in range(chance.randint(1, 12))]
        places = report.spread(wanted, 1, low=0.5)
        assert min(places) >= 0.5
        ordered = sorted(places)
        assert all(b - a > 1 - 1e-9 for a, b in itertools.pairwise(ordered))
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        assert order == sorted(range(len(wanted)), key=places.__getitem__)


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["0"], "sizes must be at least 1, got 0"),
        (["64", "-5"], "sizes must be at least 1, got -5"),
        (["--reps", "0"], "--reps must be at least 1, got 0"),
        (["--budget", "0"], "--budget must be more than 0 seconds, got 0"),
        (["--budget", "nan"], "--budget must be more than 0 seconds, got nan"),
        (["--kernels", "stage99"], "no kernel is called 'stage99'; there are stage0, stage1"),
        (["64", "300000"], r"size 300000 takes about [\d.]+ GiB .* GiB free; leave it out"),
        (["many"], "invalid int value: 'many'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(capsys, arguments, text):
    with pytest.raises(SystemExit) as exit:
        sizes.parse(["--device", "cpu", *arguments])
    assert exit.value.code == 2
    assert re.search(text, capsys.readouterr().err.strip().split("\n")[-1])


def test_the_defaults_are_every_stage_at_sizes_for_the_device():
    args = sizes.parse(["--device", "cpu"])
    assert args.sizes == sorted(sizes.DEFAULT_SIZES["cpu"])
    assert args.kernels == list(torch_sgemm.STAGES)
    assert sizes.parse(["--device", "cpu", "64", "16", "64"]).sizes == [16, 64]


@pytest.mark.gpu
def test_sizes_are_measured_on_the_gpu(tmp_path):
    path = tmp_path / "sizes.csv"
    arguments = ["200", "256", "--reps", "1", "--device", "cuda", "--csv", str(path)]
    assert sizes.main(arguments) == 0
    rows = report.read_csv(path)
    assert {r["kernel"] for r in rows} == set(ALL)
    with pytest.raises(check.CheckError):
        check.require_below_peak(2 * max(r["tflops"] for r in rows), 1e-3, "it")
