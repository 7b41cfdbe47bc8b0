"""The benchmarks' own mistakes: what a harness must notice before it prints a figure."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import check
import documents
import ladder
import peaks
import pytest
import report
import timing
import torch

import torch_sgemm

BENCHMARKS = Path(report.__file__).parent
NAN = float("nan")


def small_ladder() -> ladder.Ladder:
    return ladder.Ladder(48, 40, 56, "cpu", sets=2)


def add_contender(monkeypatch, name, matmul):
    real = ladder.Ladder.fp32
    monkeypatch.setattr(ladder.Ladder, "fp32", lambda self: real(self) | {name: matmul})


@pytest.fixture
def quick(monkeypatch):
    """Peaks that nothing reaches, measured in no time."""
    monkeypatch.setattr(peaks, "measure", lambda device, reps=5: peaks.Peaks(1e15, 1e15))


# ---- results -------------------------------------------------------------------------------------


def all_nan(a, b, out):
    out.fill_(NAN)


def writes_nothing(a, b, out):
    pass


def forgets_the_last_column(a, b, out):
    torch.matmul(a, b[:, :-1], out=out[:, :-1])


def half_precision(a, b, out):
    out.copy_(a.bfloat16().float() @ b.bfloat16().float())


@pytest.mark.parametrize(
    "matmul", [all_nan, writes_nothing, forgets_the_last_column, half_precision]
)
def test_a_wrong_kernel_is_refused_before_it_is_timed(monkeypatch, quick, matmul):
    # B130: a verifier that asks |diff| > tol accepts NaN, and the broken kernel looks very fast.
    add_contender(monkeypatch, "broken", matmul)
    monkeypatch.setattr(timing, "interleaved", lambda *args: pytest.fail("it was timed"))
    with pytest.raises(check.CheckError, match=r"broken is wrong in \d+ of 1920 entries: C\["):
        ladder.measure(small_ladder(), reps=1)


def test_a_kernel_that_returns_the_last_result_again_is_refused(monkeypatch, quick):
    # B133: results cached by the identity of the inputs.
    kept = {}

    def cached(a, b, out):
        key = (a.data_ptr(), b.data_ptr())
        out.copy_(kept.setdefault(key, torch.zeros_like(out)))

    add_contender(monkeypatch, "cached", cached)
    with pytest.raises(check.CheckError, match="cached is wrong"):
        ladder.measure(small_ladder(), reps=1)


# ---- times ---------------------------------------------------------------------------------------


def test_a_forgotten_synchronisation_is_noticed_as_more_than_the_peak(monkeypatch):
    # B122: without a synchronisation MatMul took 0.03 ms instead of 1.36 ms. Here a kernel runs on
    # after the call has returned, as a GPU's does, and the harness's synchronisation is a no-op.
    running = []

    def asynchronous(a, b, out):
        running.append(
            threading.Thread(target=lambda: (time.sleep(0.05), torch.matmul(a, b, out=out)))
        )
        running[-1].start()

    def wait(device):
        while running:
            running.pop().join()

    problem = ladder.Ladder(300, 300, 300, "cpu", sets=1)
    call = problem.call(asynchronous)
    flop, peak = 2 * 300**3, 1e10  # what its 50 ms cannot reach

    def rate():
        monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0)  # one call a sample
        return flop / timing.interleaved({"async": call}, "cpu", 1)["async"].median / 1e12

    monkeypatch.setattr(timing, "synchronize", wait)
    check.require_below_peak(rate(), peak / 1e12, "synchronised")
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    too_fast = rate()
    wait("cpu")
    with pytest.raises(check.CheckError, match=r"cannot be true.*synchronised"):
        check.require_below_peak(too_fast, peak / 1e12, "not synchronised")


def test_no_time_at_all_is_an_error_and_not_an_infinite_speed(monkeypatch):
    # B132: every kernel "verified", and every GFLOPS is inf.
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    with pytest.raises(check.CheckError, match=r"nothing: 0\.0 s is no time"):
        timing.interleaved({"nothing": lambda i: None}, "cpu", 1)


def test_contenders_take_turns_and_inputs_rotate():
    # B129, B124: order and temperature change times; inputs in cache overstate speed.
    turns, seen = [], []
    timing.interleaved(
        {"one": lambda i: seen.append(i), "two": lambda i: time.sleep(1e-3)}, "cpu", 3, turns.append
    )
    assert turns == ["one", "two"] * 3
    assert seen == list(range(len(seen)))
    problem = ladder.Ladder(8, 8, 8, "cpu", sets=3)
    used = []
    call = problem.call(lambda a, b, out: used.append(a.data_ptr()))
    for i in range(6):
        call(i)
    assert len(set(used)) == 3
    assert used[:3] == used[3:]


def test_input_sets_are_more_than_the_cache_holds():
    set_bytes = 4 * (256 * 256 * 2)
    assert timing.rotation(set_bytes, "cpu") * set_bytes > 2 * timing.cache_bytes("cpu")
    assert timing.rotation(100 * timing.cache_bytes("cpu"), "cpu") == 2
    assert timing.rotation(8, "cpu") == timing.MAX_SETS  # ladder.py 1 must not make millions


def test_an_unknown_cache_counts_as_a_large_one(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 0)
    assert timing.cache_bytes("cpu") == 64 << 20


@pytest.mark.gpu
def test_a_graph_uses_every_set_of_inputs():
    used = set()
    x = torch.zeros(8, device="cuda")

    def call(i):
        used.add(i % 777)
        x.add_(1)

    timing.interleaved({"short": call}, "cuda", 1, period=777)
    assert len(used) == 777


def test_documents_skip_devices_that_they_do_not_show(monkeypatch, tmp_path):
    shutil.copytree(report.RESULTS, tmp_path / "results")
    shutil.copytree(report.RESULTS / "cpu", tmp_path / "results" / "nvidia-geforce")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    assert documents.documents()


@pytest.mark.parametrize("rms", [0.0, 1e-6, 0.5, NAN])
def test_a_row_for_scale_has_the_error_of_its_format(rms):
    with pytest.raises(check.CheckError, match="significant bits"):
        check.require_half_precision(rms, "torch.matmul TF32")
    check.require_half_precision(3e-4, "torch.matmul TF32")


def test_median_and_spread_are_of_the_samples():
    t = timing.Timing((1.0, 4.0, 2.0))
    assert (t.median, t.best, t.spread) == (2.0, 1.0, 1.5)


def test_a_figure_above_the_measured_peak_is_refused(monkeypatch):
    monkeypatch.setattr(peaks, "measure", lambda device, reps=5: peaks.Peaks(1e6, 1e6))
    with pytest.raises(check.CheckError, match=r"torch.matmul: .* TFLOP/s cannot be true"):
        ladder.measure(small_ladder(), reps=1)
    for rate in (0.0, -1.0, NAN, 1.03):
        with pytest.raises(check.CheckError):
            check.require_below_peak(rate, 1.0, "it")
    check.require_below_peak(1.01, 1.0, "it")


# ---- the baseline --------------------------------------------------------------------------------


def tf32_matmul(a, b, out=None):
    """TF32 keeps 10 bits of a fraction."""

    def shorten(t):
        return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)

    return torch.mm(shorten(a.contiguous()), shorten(b.contiguous()), out=out)


def test_a_tf32_baseline_is_refused_before_and_after(monkeypatch, quick):
    # B106, B107, B112: a FP32 product of 1024.5 and 1 that comes out as 1024 or 1025.
    with pytest.raises(check.CheckError, match=r"1024\.5 \* 1 came out as 1024\.0"):
        check.require_fp32(tf32_matmul, "cpu", "torch.matmul")
    check.require_fp32(torch.matmul, "cpu", "torch.matmul")

    asked = []

    def switched_on_meanwhile(matmul, device, what):
        asked.append(what)
        if len(asked) > 1:
            check_fp32(tf32_matmul, device, what)

    check_fp32 = check.require_fp32
    monkeypatch.setattr(check, "require_fp32", switched_on_meanwhile)
    with pytest.raises(check.CheckError, match="does not multiply in FP32"):
        ladder.measure(small_ladder(), reps=1)
    assert len(asked) == 2


@pytest.mark.gpu
def test_a_baseline_with_tf32_switched_on_is_refused_on_the_gpu():
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        with pytest.raises(check.CheckError, match="does not multiply in FP32"):
            ladder.require_fp32_baselines("cuda")
        check.require_fp32(torch_sgemm.cublas, "cuda", "cublasSgemm")  # has a mode of its own
    finally:
        settings.fp32_precision = before
    ladder.require_fp32_baselines("cuda")


# ---- the error rule ------------------------------------------------------------------------------


def test_the_error_rule_accepts_any_order_of_summation_and_nothing_worse():
    a, b = torch.randn(30, 500), torch.randn(500, 20)
    ref = check.reference(a, b)
    assert check.errors(a @ b, ref).wrong == 0
    backwards = a.flip(1) @ b.flip(0)
    found = check.errors(backwards, ref)
    assert found.wrong == 0
    assert 0 < found.rms < 1e-5
    worse = (ref.exact + 1.1 * ref.allowed).float()
    assert check.errors(worse, ref).wrong > 500
    off = a @ b
    off[3, 4] = NAN
    with pytest.raises(check.CheckError, match=r"C\[3, 4\]"):
        check.require(off, ref)
    with pytest.raises(check.CheckError, match="expected a float32 result"):
        check.errors((a @ b).double(), ref)


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_the_error_rule_wants_nan_and_infinity_where_they_belong(value):
    a, b = torch.rand(4, 6), torch.rand(6, 5)
    a[1, 2] = value
    ref = check.reference(a, b)
    assert check.errors(a @ b, ref).wrong == 0
    finite = (a @ b).nan_to_num(0, 0, 0)
    assert check.errors(finite, ref).wrong == 5
    opposite = torch.where((a @ b).isinf(), -(a @ b), a @ b)
    assert check.errors(opposite, ref).wrong == (0 if value != value else 5)


def test_the_error_rule_keeps_subnormals_and_forgives_an_overflow_on_the_way():
    a, b = torch.full((1, 3), 1e-40), torch.ones(3, 1)
    assert check.errors(a @ b, check.reference(a, b)).wrong == 0
    assert check.errors(torch.zeros(1, 1), check.reference(a, b)).wrong == 1  # flushed to zero
    a, b = torch.tensor([[3e38, 3e38, -3e38, -3e38]]), torch.ones(4, 1)
    for result in (0.0, float("inf"), NAN):
        assert check.errors(torch.tensor([[result]]), check.reference(a, b)).wrong == 0
    a, b = torch.full((1, 2), 2e38), torch.ones(2, 1)  # alpha brings it back into range, too late
    for result in (2e38, float("inf")):
        assert check.errors(torch.tensor([[result]]), check.reference(a, b, alpha=0.5)).wrong == 0


def test_alpha_and_beta_of_zero_read_nothing():
    bad, good, c = torch.full((2, 2), NAN), torch.ones(2, 2), torch.ones(2, 2)
    assert check.reference(bad, good, c, alpha=0, beta=2).exact.eq(2).all()
    assert check.reference(good, good, bad, alpha=1, beta=0).exact.eq(2).all()


# ---- reports -------------------------------------------------------------------------------------


def test_the_ladder_measures_every_stage_and_writes_what_it_says(
    tmp_path, monkeypatch, capsys, quick
):
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0)
    out, picture = tmp_path / "new" / "ladder.csv", tmp_path / "ladder.png"
    arguments = ["20", "30", "40", "--reps", "1", "--device", "cpu"]
    assert ladder.main([*arguments, "--csv", str(out), "--png", str(picture)]) == 0
    rows = report.read_csv(out)
    assert tuple(rows[0]) == report.LADDER_COLUMNS
    assert [row["kernel"] for row in rows] == ["torch.matmul", *torch_sgemm.STAGES]
    assert all((row["M"], row["N"], row["K"]) == (20, 30, 40) for row in rows)
    flop = 2 * 20 * 30 * 40
    for row in rows:
        assert row["tflops"] == pytest.approx(flop / row["time_ms"] / 1e9, rel=1e-3)
        assert 0 < row["rms"] < 1e-6
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    for row in rows:
        assert report.title(row["kernel"]) in table
    assert "M = 20, N = 30, K = 40" in table


def test_a_wrong_row_is_an_error_of_the_program_and_leaves_no_file(
    tmp_path, monkeypatch, capsys, quick
):
    add_contender(monkeypatch, "broken", writes_nothing)
    path = tmp_path / "ladder.csv"
    assert ladder.main(["16", "--device", "cpu", "--csv", str(path)]) == 1
    assert "broken is wrong" in capsys.readouterr().err
    assert not path.exists()


def test_what_is_written_between_markers_replaces_only_that():
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert report.between_markers(text, "x", "new") == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    for broken in ("", "<!-- x -->", "<!-- /x -->\n<!-- x -->", text + text):
        with pytest.raises(ValueError, match="expected one"):
            report.between_markers(broken, "x", "new")


def test_the_documents_say_what_the_results_files_say():
    for path, text in documents.documents().items():
        assert path.read_text() == text, f"{path.name}: run benchmarks/documents.py"


@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in report.RESULTS.glob("*/env.json"))
)
def test_committed_results_are_of_committed_code_and_of_stages_that_there_are(folder):
    for path in (report.RESULTS / folder).glob("*.csv"):
        env = report.read_environment(report.RESULTS / folder, path.name)
        assert env["commit"]
        assert not env["dirty"]
    rows = report.read_csv(report.RESULTS / folder / "ladder.csv")
    measured = [r["kernel"] for r in rows if r["kernel"].startswith("stage")]
    assert measured == [stage for stage in torch_sgemm.STAGES if stage in measured]
    assert len(measured) >= 15  # a new stage is measured when somebody with that device does


def test_env_json_says_what_a_figure_depends_on(tmp_path):
    report.save(tmp_path, "old.csv", [{"a": 1}], {"commit": "another"})
    report.save(tmp_path, "new.csv", [{"a": 1.5}], report.environment("cpu"))
    assert report.read_environment(tmp_path, "old.csv") == {"commit": "another"}  # its own still
    env = json.loads((tmp_path / "env.json").read_text())["new.csv"]
    assert {"cpu", "driver", "cuda", "torch", "commit", "dirty", "date"} <= set(env)
    assert env["torch"] == torch.__version__
    assert env["torch"] in report.describe(env)


def test_the_peaks_count_the_chains_that_the_kernels_have():
    header = (report.ROOT / "csrc" / "peaks.h").read_text()
    assert f"constexpr int kChains = {peaks.CHAINS};" in header


def test_the_measured_peak_is_above_what_torch_reaches():
    # A loop that does not fill the units would refuse honest rows.
    measured = peaks.measure("cpu", reps=3)
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    out = torch.empty(512, 512)
    seconds = timing.interleaved({"mm": lambda i: torch.mm(a, b, out=out)}, "cpu", 3)["mm"].best
    assert 0.2 * measured.ffma < 2 * 512**3 / seconds < 1.1 * measured.ffma
    assert 1e8 < measured.memory < 1e13


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["0"], "sizes must be at least 1, got 0"),
        (["16", "-3", "16"], "sizes must be at least 1, got 16 -3 16"),
        (["4096", "4096"], "give one size, N, or three, M N K; got 2: 4096 4096"),
        (["4", "4", "4", "4"], "got 4: 4 4 4 4"),
        (["many"], "invalid int value: 'many'"),
        (["16", "--reps", "0"], "--reps must be at least 1, got 0"),
        (["300000"], r"takes about [\d.]+ GiB .* has [\d.]+ GiB free; choose a smaller size"),
        (["16", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(capsys, arguments, text):
    with pytest.raises(SystemExit) as exit:
        ladder.parse(["--device", "cpu", *arguments])
    assert exit.value.code == 2
    message = capsys.readouterr().err.strip().split("\n")[-1]
    assert re.search(text, message), message


def test_asking_for_a_gpu_where_there_is_none_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        ladder.parse(["16", "--device", "cuda"])
    assert "torch sees no GPU here; use --device cpu" in capsys.readouterr().err


def test_the_default_is_a_size_for_the_device(monkeypatch):
    assert ladder.DEFAULT_SIZE["cpu"] == ladder.parse(["--device", "cpu"]).M
    args = ladder.parse(["8", "9", "10", "--device", "cpu"])
    assert (args.M, args.N, args.K) == (8, 9, 10)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["stage2", "40", "--device", "cpu"], 0, "stage2, M = 40, N = 40, K = 40"),
        (["stage2", "40", "50", "60", "--device", "cpu"], 0, "M = 40, N = 50, K = 60"),
        (["stage1", "stage2", "40", "--device", "cpu"], 0, "stage1, M = 40, N = 40, K = 40"),
        (["stage99", "40"], 2, "no kernel is called 'stage99'; there are stage0, stage1"),
        (["40"], 2, "name a kernel: stage0, stage1"),
        (["stage2", "40", "stage3"], 2, "kernels come first, then N or M N K"),
        (["stage2", "40", "50"], 2, "give one size, N, or three, M N K"),
        (["cublas", "40", "--device", "cpu"], 2, "there is no cuBLAS on the CPU"),
    ],
)
def test_one_launches_one_kernel_or_says_why_not(arguments, code, text):
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "one.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == code, run.stderr
    assert text in run.stdout + run.stderr


def test_progress_goes_to_stderr_and_the_table_to_stdout():
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "ladder.py", "16", "--reps", "1", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "stage3b register tile 4x4" in run.stdout
    assert "%|" not in run.stdout
    assert "check stage0" in run.stderr
