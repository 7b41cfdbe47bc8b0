"""The suite: what it multiplies, what it refuses, and what it makes of its times."""

import collections
import re

import check
import documents
import ladder
import peaks
import pytest
import report
import suite
import timing
import torch

import torch_sgemm

NAN = float("nan")
SMALL = ("100x100x100", "35x79x19")  # both in the suite "odd"
RUN = ["--device", "cpu", "--reps", "1", "--suite", "odd", "--name", "|".join(SMALL)]


@pytest.fixture
def quick(monkeypatch):
    """Peaks that nothing reaches, few inputs, and one call a sample."""
    monkeypatch.setattr(peaks, "measure", lambda device: peaks.Peaks(1e15, 1e15))
    monkeypatch.setattr(timing, "rotation", lambda set_bytes, device: 2)
    monkeypatch.setattr(suite, "SAMPLE_SECONDS", 0)


def shape(op="mm", layout="nn", batch=1, M=40, N=30, K=20, name="it"):
    return suite.Shape("odd", name, op, layout, batch, M, N, K)


def replace(monkeypatch, op, change):
    """Puts change(a, b, right result) in the place of our op's result."""
    right = getattr(torch_sgemm, op)

    def changed(a, b, *, precision=None, out=None):
        result = change(a, b, right(a, b, precision=precision))
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(torch_sgemm, op, changed)


# ---- the shapes ----------------------------------------------------------------------------------


def test_the_shapes_are_those_that_the_project_speaks_of():
    shapes = suite.shapes()
    assert len(shapes) == 143
    assert len({s.name for s in shapes}) == 143
    count = collections.Counter(s.suite for s in shapes)
    assert count == {"square": 16, "layout": 9, "linear": 82, "train": 12, "batched": 8, "odd": 16}
    for s in shapes:
        assert min(s.batch, s.M, s.N, s.K) >= 1
        assert s.op == {"linear": "linear", "batched": "bmm"}.get(s.suite, "mm")
        assert s.layout in (("nt",) if s.op == "linear" else ("nn", "nt", "tn", "tt"))
        assert (s.batch > 1) == (s.op == "bmm")
        assert s.suite != "square" or s.M == s.N == s.K == int(s.name)
    assert {s.layout for s in shapes if s.suite == "layout"} == {"nt", "tn", "tt"}


def test_the_floor_is_the_longer_of_arithmetic_and_traffic():
    s = shape(M=10, N=20, K=30, op="bmm", batch=7)
    flop, traffic = 2 * 7 * 10 * 20 * 30, 4 * 7 * (10 * 30 + 30 * 20 + 10 * 20)
    assert s.floor(peaks.Peaks(ffma=1e3, memory=1e9)) == flop / 1e3
    assert s.floor(peaks.Peaks(ffma=1e9, memory=1e3)) == traffic / 1e3


@pytest.mark.parametrize(
    ("op", "layout"),
    [("mm", "nn"), ("mm", "nt"), ("mm", "tn"), ("mm", "tt"), ("linear", "nt"), ("bmm", "nn")],
)
def test_inputs_have_the_layout_of_the_shape_and_rotate(quick, op, layout):
    batch = 3 if op == "bmm" else 1
    problem = suite.Problem(shape(op, layout, batch), "cpu")
    for matrices, letter, size in (
        (problem.a, layout[0], (40, 20)),
        (problem.b, layout[1], (20, 30)),
    ):
        for m in matrices:
            assert m.shape == ((3, *size) if op == "bmm" else size)
            assert (m.mT if letter == "t" else m).is_contiguous()
            assert m.data_ptr() % 512 == matrices[0].data_ptr() % 512  # as if each were allocated
    expected = [a @ b for a, b in zip(problem.a, problem.b, strict=True)]
    assert not torch.equal(*expected)
    results = []
    torch_op = suite.contenders(op, ())[suite.REFERENCE]
    call = problem.call(
        lambda *args, **keywords: results.append(torch_op(*args, **keywords).clone())
    )
    for i in range(4):
        call(i)
    for i, result in enumerate(results):
        torch.testing.assert_close(result, expected[i % 2])


# ---- the run -------------------------------------------------------------------------------------


def test_every_shape_is_a_row_of_every_precision(quick, tmp_path, capsys):
    path, detail = tmp_path / "new" / "suite.csv", tmp_path / "suite.json"
    files = ["--csv", str(path), "--json", str(detail)]
    assert suite.main([*RUN, "--precision", "ieee,auto", *files]) == 0
    rows = report.read_csv(path)
    assert tuple(rows[0]) == suite.COLUMNS
    assert [(r["name"], r["precision"]) for r in rows] == [
        (name, precision) for name in SMALL for precision in ("ieee", "auto")
    ]
    sizes = {"100x100x100": (100, 100, 100), "35x79x19": (35, 79, 19)}
    for r in rows:
        assert (r["M"], r["N"], r["K"]) == sizes[r["name"]]
        flop = 2 * r["M"] * r["N"] * r["K"]
        assert r["tflops"] == pytest.approx(flop / r["time_us"] / 1e6, rel=1e-3)
        assert r["speedup"] == pytest.approx(r["torch_us"] / r["time_us"], rel=1e-3)
        assert 0 < r["rms"] < 1e-6
        assert 0 < r["torch_rms"] < 1e-6
    captured = capsys.readouterr()
    assert len(re.findall(r"^  odd     35x79x19", captured.out, re.MULTILINE)) == 6
    assert "1 ratios a row are too few to call one slower" in captured.out
    assert "%|" not in captured.out
    assert "0/12" in captured.err
    assert '"spread": ' in detail.read_text()


def all_nan(a, b, right):
    return right * NAN


def writes_nothing(a, b, right):
    return torch.full_like(right, NAN)


def forgets_the_last_column(a, b, right):
    return torch.cat([right[:, :-1], torch.full_like(right[:, -1:], NAN)], 1)


def half_precision(a, b, right):
    return a.bfloat16().float() @ b.bfloat16().float()


def raises(a, b, right):
    raise RuntimeError("no such kernel\nand its trace")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (all_nan, "ieee is wrong in 10000 of 10000 entries"),
        (forgets_the_last_column, "ieee is wrong in 100 of 10000 entries: C[0, 99] is nan"),
        (half_precision, "ieee is wrong in"),
        (raises, "RuntimeError: no such kernel"),
    ],
)
def test_a_wrong_row_is_told_at_the_end_and_loses_no_other(
    quick, monkeypatch, tmp_path, capsys, change, text
):
    replace(monkeypatch, "mm", lambda a, b, right: change(a, b, right) if len(a) == 100 else right)
    path = tmp_path / "suite.csv"
    assert suite.main([*RUN, "--csv", str(path)]) == 1
    captured = capsys.readouterr()
    assert [r["name"] for r in report.read_csv(path)] == ["35x79x19"]
    assert captured.err.strip().splitlines()[-1].startswith(f"suite.py: odd 100x100x100: {text}")
    assert "trace" not in captured.err
    assert "odd     35x79x19" in captured.out


def test_a_kernel_that_does_not_write_is_wrong(quick, monkeypatch):
    monkeypatch.setattr(torch_sgemm, "mm", lambda a, b, *, precision, out: out)
    run = suite.Suite([shape()], ["ieee"], "cpu", 1, peaks.Peaks(1e15, 1e15))
    assert run.measure(run.wanted[0]) == []
    assert "ieee is wrong in 1200 of 1200 entries" in run.failures.texts[0]


@pytest.mark.parametrize(("op", "layout", "batch"), [("linear", "nt", 1), ("bmm", "nn", 3)])
def test_linear_and_batches_are_checked_too(quick, monkeypatch, op, layout, batch):
    replace(monkeypatch, op, lambda a, b, right: right.index_fill(-1, torch.tensor([29]), 0.0))
    run = suite.Suite([shape(op, layout, batch)], ["ieee"], "cpu", 1, peaks.Peaks(1e15, 1e15))
    run.run()
    assert run.rows == []
    place = "[0, 0, 29]" if op == "bmm" else "[0, 29]"
    assert (
        f"wrong in {40 * batch} of {1200 * batch} entries: C{place} is 0.0" in run.failures.texts[0]
    )


def test_one_precision_s_failure_is_not_the_other_s(quick, monkeypatch):
    right = torch_sgemm.mm

    def broken(a, b, *, precision, out=None):
        return out if precision == "auto" and len(a) != 256 else right(a, b, out=out)

    monkeypatch.setattr(torch_sgemm, "mm", broken)
    run = suite.Suite([shape()], ["ieee", "auto"], "cpu", 1, peaks.Peaks(1e15, 1e15))
    run.run()
    assert [r["precision"] for r in run.rows] == ["ieee"]
    assert len(run.failures.texts) == 1
    assert "auto is wrong" in run.failures.texts[0]


@pytest.mark.parametrize("place", [(0, 7), (199, 7), (5, 0), (5, 149)])
def test_where_float64_is_too_dear_the_edges_are_checked(monkeypatch, place):
    monkeypatch.setattr(check, "WHOLE", 0)
    monkeypatch.setattr(check, "SAMPLED", 5)
    a, b = torch.randn(200, 30), torch.randn(30, 150)
    refs = check.references(a, b)
    assert all(ref.exact.numel() <= 5 * 200 for ref in refs)
    result = a @ b
    found = check.require_all(result, refs)
    whole = check.errors(result, check.reference(a, b))
    assert found.rms == pytest.approx(whole.rms, rel=0.5)
    assert 0 < found.cw <= whole.cw
    result[place] = NAN
    with pytest.raises(check.CheckError, match=re.escape(f"C{list(place)} is nan")):
        check.require_all(result, refs, "the sample")
    with pytest.raises(check.CheckError, match="expected a float32 result of shape"):
        check.require_all(result[:-1], refs)


def test_a_sample_sees_what_is_wrong_in_every_tile(monkeypatch):
    monkeypatch.setattr(check, "WHOLE", 0)
    a, b = torch.randn(400, 30), torch.randn(30, 300)
    result = a @ b
    result[256:, 256:] = 0
    with pytest.raises(check.CheckError, match=r"C\[\d{3}, \d{3}\] is 0.0"):
        check.require_all(result, check.references(a, b))


# ---- times ---------------------------------------------------------------------------------------


def pretend(monkeypatch, ours, reference):
    """Samples in seconds, instead of measured ones."""
    samples = {"ieee": ours, "auto": ours, suite.REFERENCE: reference}
    monkeypatch.setattr(
        timing, "interleaved", lambda calls, *rest: {n: timing.Timing(samples[n]) for n in calls}
    )


def test_a_row_is_made_of_medians_and_its_verdict_of_ratios(quick, monkeypatch):
    # Each of ours is 5 % slower than torch's of its turn, while both drift by a factor of 3.
    reference = (1e-3, 2e-3, 3e-3, 1e-3, 2e-3, 3e-3, 2e-3)
    pretend(monkeypatch, tuple(t / 0.95 for t in reference), reference)
    run = suite.Suite([shape()], ["ieee"], "cpu", 7, peaks.Peaks(1e9, 1e12))
    (row,) = run.measure(run.wanted[0])
    assert run.failures.texts == []
    assert (row["torch_us"], row["speedup"]) == (2e3, pytest.approx(0.95))
    assert row["tflops"] == pytest.approx(2 * 40 * 30 * 20 / 2e-3 * 0.95 / 1e12)
    assert row["floor_us"] == pytest.approx(1e6 * 48000 / 1e9)
    assert row["torch_spread"] == 1.0
    assert row["slower"]


def test_noise_is_not_called_slower(quick, monkeypatch):
    reference = (1e-3,) * 7
    limits = peaks.Peaks(1e15, 1e15)
    for ours, reps, slower in (
        ((1.05e-3, 1.06e-3) * 3 + (1.05e-3,), 7, True),
        ((1.0e-3, 1.2e-3) * 3 + (1.0e-3,), 7, False),  # slower in the mean, but not surely
        ((1.02e-3,) * 7, 7, False),  # surely, but by 2 %
        ((1.05e-3,) * 6, 6, False),  # too few
        ((0.5e-3,) * 7, 7, False),
    ):
        pretend(monkeypatch, ours, reference[:reps])
        run = suite.Suite([shape()], ["ieee"], "cpu", reps, limits)
        assert run.measure(run.wanted[0])[0]["slower"] == slower


def test_the_bound_is_student_s():
    assert timing.upper_bound([1.0] * 7) == 1.0
    assert timing.upper_bound([0.9, 1.1]) == pytest.approx(1 + 6.314 * 0.1)
    seven = [0.94, 0.95, 0.96, 0.95, 0.94, 0.96, 0.95]  # s = 0.00816
    assert timing.upper_bound(seven) == pytest.approx(0.95 + 1.943 * 0.0081650 / 7**0.5, rel=1e-6)
    assert timing.upper_bound([0.5]) == float("inf")
    many = [0.9, 1.0] * 50
    assert 0.95 < timing.upper_bound(many) < 0.96


def test_a_sample_takes_the_time_that_is_asked_for():
    def calls(seconds):
        seen = []
        timing.interleaved(
            {"it": lambda i: (seen.append(i), torch.randn(999))}, "cpu", 1, sample=seconds
        )
        return len(seen)

    assert calls(0) == 3
    assert calls(0.01) > 10


@pytest.mark.parametrize(
    ("ours", "reference", "limits", "text"),
    [
        (1e-9, 1e-3, peaks.Peaks(1e12, 1e12), r"odd it: ieee: 48 TFLOP/s cannot be true"),
        (1e-3, 1e-9, peaks.Peaks(1e12, 1e12), r"odd it: torch: 48 TFLOP/s cannot be true"),
        (1e-3, 1e-3, peaks.Peaks(1e12, 1e12, l2=1e6), r"odd it: torch: .* TB/s cannot be true"),
    ],
)
def test_a_figure_above_the_peak_is_refused(quick, monkeypatch, ours, reference, limits, text):
    # B122: a kernel that is not waited for is faster than the hardware. Where there are few
    # multiply-adds, it reads faster than the cache can.
    pretend(monkeypatch, (ours,) * 7, (reference,) * 7)
    run = suite.Suite([shape()], ["ieee"], "cpu", 7, limits)
    run.run()
    assert run.rows == []
    assert re.match(text, run.failures.texts[0])


def test_tensor_cores_may_pass_the_multiply_adds_peak_and_no_more(quick, monkeypatch):
    run = suite.Suite([shape()], ["auto"], "cpu", 7, peaks.Peaks(1e9, 1e12))
    for seconds, rows in ((48000 / 30e9, 1), (48000 / 50e9, 0)):
        pretend(monkeypatch, (seconds,) * 7, (1.0,) * 7)
        assert len(run.measure(run.wanted[0])) == rows


def test_a_tf32_baseline_is_refused_before_and_told_after(quick, monkeypatch, tmp_path, capsys):
    # B106, B112.
    asked = []

    def require_fp32(matmul, device, what):
        asked.append(what)
        if len(asked) > allowed:
            raise check.CheckError(f"{what} does not multiply in FP32")

    monkeypatch.setattr(check, "require_fp32", require_fp32)
    allowed = 0
    assert suite.main(RUN) == 1
    captured = capsys.readouterr()
    assert "suite.py: torch.mm does not multiply in FP32" in captured.err
    assert captured.out == ""
    allowed, asked[:] = 3, []
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert suite.main(["--device", "cpu", "--reps", "1", "--save"]) == 1
    captured = capsys.readouterr()
    assert asked == ["torch.mm", "mm, ieee,"] * 2
    assert "suite.py: after the run: mm, ieee, does not multiply in FP32" in captured.err
    assert "--save wrote nothing" in captured.err
    assert not list(tmp_path.rglob("*.csv"))


# ---- tables --------------------------------------------------------------------------------------


def made_up_rows():
    """x torch of 0.5 and 2 among the squares, of 1.01, 1.02 ... 1.20 in linear."""
    rows = []
    speeds = [("square", 0.5), ("square", 2.0), *(("linear", 1 + i / 100) for i in range(1, 21))]
    for number, (name, speed) in enumerate(speeds):
        row = dict.fromkeys(suite.COLUMNS, 1.5e-7)
        row |= {"suite": name, "name": f"shape{number}", "op": "mm", "layout": "nn", "batch": 1}
        row |= {"M": 64, "N": 32, "K": 16, "precision": "ieee", "time_us": 10 / speed}
        row |= {"torch_us": 10.0, "speedup": speed, "tflops": 12.5, "floor_us": 4.0}
        rows.append(row | {"spread": 0.01, "torch_spread": 0.02, "slower": speed < 0.97})
    return rows


def test_the_table_ends_with_means_the_worst_and_the_best():
    rows = made_up_rows()
    lines = suite.text(rows, 7).splitlines()
    assert len(rows) + 2 == lines.index("")
    start = next(i for i, line in enumerate(lines) if line.startswith("  geometric mean"))
    means = {line.split()[0]: line.split()[1:] for line in lines[start + 2 : start + 5]}
    linear = 1.0
    for i in range(1, 21):
        linear *= 1 + i / 100
    everything = linear ** (1 / 22)  # the squares' two cancel
    assert means == {
        "square": ["1.000", "0.500", "2.000", "2"],
        "linear": [f"{linear ** (1 / 20):.3f}", "1.010", "1.200", "20"],
        "all": [f"{everything:.3f}", "0.500", "2.000", "22"],
    }
    worst, best = lines.index("  the worst"), lines.index("  the best")
    numbers = [int(re.search(r"shape(\d+)", line)[1]) for line in lines[worst + 1 : worst + 11]]
    assert numbers == [0, *range(2, 11)]
    numbers = [int(re.search(r"shape(\d+)", line)[1]) for line in lines[best + 1 : best + 6]]
    assert numbers == [1, 21, 20, 19, 18]
    assert lines[2].endswith("slower")
    assert lines[-1] == "  slower than torch (upper 95 % bound of 7 ratios under 0.97): 1 of 22"


def test_the_documents_table_is_made_of_the_file(tmp_path):
    report.write_csv(tmp_path / "suite_ieee.csv", suite.csv_rows(made_up_rows()))
    env = report.environment("cpu")
    lines = suite.markdown(report.read_csv(tmp_path / "suite_ieee.csv"), env).splitlines()
    assert lines[2] == "| square | 1.00 | 0.50 | 2.00 | 2 |"
    assert lines[4].startswith("| all | 1.")
    assert lines[8].split(" | ")[:5] == ["| square shape0", "mm nn", "64 x 32 x 16", "20.0", "10.0"]
    assert lines[8].split(" | ")[5:] == ["0.50", "20.0%", "1.50e-07", "1.50e-07 |"]
    assert sum(line.startswith("| linear shape") for line in lines) == 9
    assert lines[-1] == f'Precision "ieee", inputs out of cache. {report.describe(env)}.'


def test_the_results_are_saved_and_reach_the_documents(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    run = ["--device", "cpu", "--reps", "1", "--precision", "ieee,auto", "--save"]
    assert suite.main(run) == 0
    assert "126 shapes are left out" in capsys.readouterr().out
    folder = tmp_path / "results" / "cpu"
    rows = {p: report.read_csv(folder / f"suite_{p}.csv") for p in ("ieee", "auto")}
    assert [r["name"] for r in rows["ieee"]] == [r["name"] for r in rows["auto"]]
    assert {r["precision"] for r in rows["auto"]} == {"auto"}
    assert len(rows["auto"]) == 17
    env = report.read_environment(folder, "suite_auto.csv")
    readme, story = tmp_path / "README.md", tmp_path / "docs" / "ladder.md"
    story.parent.mkdir()
    readme.write_text("<!-- suite_auto cpu -->\n<!-- /suite_auto cpu -->\n")
    story.write_text("nothing\n")
    texts = documents.documents()
    assert suite.markdown(rows["auto"], env) in texts[readme]
    assert texts[story] == "nothing\n"


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--precision", "half"], r"--precision: there is no 'half'; there are ieee, auto"),
        (["--precision", "ieee,"], r"--precision: there is no ''; there are ieee"),
        (["--suite", "square,cubic"], r"--suite: there is no 'cubic'; there are square, layout"),
        (["--name", "(", "--suite", "odd"], r"--name: '\(' is no regular expression: missing \)"),
        (["--name", "nowhere"], r"--name: no shape of square, .*, odd has 'nowhere' in its name"),
        (
            ["--name", "^8192$"],
            r"--device cpu: all 1 of these shapes have more than the 20,000,000",
        ),
        (["--reps", "0"], r"--reps must be at least 1, got 0"),
        (["--save", "--suite", "odd"], r"--save writes the whole suite: leave out --suite"),
        (["100"], r"unrecognized arguments: 100"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(capsys, arguments, text):
    with pytest.raises(SystemExit) as exit:
        suite.parse(["--device", "cpu", *arguments])
    assert exit.value.code == 2
    assert re.search(text, capsys.readouterr().err.strip().split("\n")[-1])


def test_the_default_is_every_shape_in_ieee(monkeypatch):
    monkeypatch.setattr(report, "pick_device", lambda parser, wanted: "cuda")
    args = suite.parse([])
    assert (args.precisions, args.reps, args.shapes) == (["ieee"], 7, suite.shapes())
    args = suite.parse(["--suite", "linear,odd", "--name", "M=1$|x1x"])
    assert {s.suite for s in args.shapes} == {"linear", "odd"}
    assert all(s.M == 1 or s.N == 1 for s in args.shapes)


@pytest.mark.gpu
def test_the_suite_runs_on_the_gpu(tmp_path):
    path = tmp_path / "suite.csv"
    names = "^256$|1024 t|router-128x4096 M=(1|64)$|96x128|4096x16|997|35x79"
    assert suite.main(["--name", names, "--reps", "2", "--csv", str(path)]) == 0
    rows = report.read_csv(path)
    assert {r["op"] for r in rows} == {"mm", "linear", "bmm"}
    for r in rows:
        assert 0 < r["rms"] < 2e-6
        assert r["time_us"] > 0.5 * r["floor_us"]


@pytest.mark.gpu
def test_tf32_is_refused_on_the_gpu(capsys):
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        assert suite.main(["--name", "^256$"]) == 1
    finally:
        settings.fp32_precision = before
    assert "torch.mm does not multiply in FP32" in capsys.readouterr().err
    ladder.require_fp32_baselines("cuda")
