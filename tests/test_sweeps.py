"""The command line that benchmarks of variants share."""

import ablation
import check
import grid_order
import matrix_cost
import pytest
import report
import sweeps
import torch
import variants
from sweeps import Sweep
from variants import Built, Variant

VARIANTS = [Variant("stage3", "one"), Variant("stage3", "two")]
GOOD = [Built(variant, None) for variant in VARIANTS]
BROKEN = [GOOD[0], Built(VARIANTS[1], None, error="two does not compile")]


def sweep(**changes):
    parts = {
        "name": "toy",
        "doc": "A toy.",
        "variants": lambda: VARIANTS,
        "resources": lambda built: f"{len(built)} kernels",
        "measure": lambda built: ([{"kernel": b.variant.label} for b in built], []),
        "markdown": lambda rows, env: f"{len(rows)} rows",
    }
    return Sweep(**parts | changes)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """As if there were one, and two libraries in every folder; the folder of the results."""
    environment = report.environment
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "environment", lambda device: environment("cpu"))
    monkeypatch.setattr(report, "results_folder", lambda device: tmp_path)
    monkeypatch.setattr(variants, "load", lambda folder, wanted: GOOD)
    monkeypatch.setattr(variants, "compile", lambda *args, **more: GOOD)
    return tmp_path


def test_measuring_needs_no_compiler_and_compiling_no_gpu(gpu, monkeypatch, capsys):
    monkeypatch.setattr(variants, "compile", lambda *args, **more: pytest.fail("it compiled"))
    assert sweep().main(["--measure", "folder"]) == 0
    assert capsys.readouterr().out == "2 rows\n"
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(variants, "compile", lambda *args, **more: GOOD)
    fails = sweep(measure=lambda built: pytest.fail("it measured"))
    assert fails.main(["--compile", "folder"]) == 0
    assert capsys.readouterr().out == "2 kernels\n"


def test_the_file_is_written_only_when_asked_for(gpu):
    assert sweep().main([]) == 0
    assert not list(gpu.iterdir())
    assert sweep().main(["--save"]) == 0
    assert report.read_csv(gpu / "toy.csv") == [{"kernel": "one"}, {"kernel": "two"}]
    assert report.read_environment(gpu, "toy.csv")["torch"] == torch.__version__


def test_what_does_not_compile_is_told_before_the_device_is_used(gpu, monkeypatch, capsys):
    monkeypatch.setattr(variants, "load", lambda folder, wanted: BROKEN)
    fails = sweep(measure=lambda built: pytest.fail("it measured"))
    assert fails.main(["--measure", "folder", "--save"]) == 1
    assert capsys.readouterr().err == "toy.py: two does not compile\n"
    assert sweep(expected=lambda built: bool(built.error)).main(["--measure", "folder"]) == 0


@pytest.mark.parametrize("error", [variants.VariantError("it is stale"), check.CheckError("why")])
def test_a_failure_is_a_sentence_and_leaves_no_file(gpu, capsys, error):
    def measure(built):
        raise error

    assert sweep(measure=measure).main(["--save"]) == 1
    assert capsys.readouterr().err.endswith(f"toy.py: {error}\n")
    assert not list(gpu.iterdir())


def test_complaints_make_the_status_and_the_rows_are_kept(gpu, capsys):
    """One variant's failure does not throw the others' time on the device away."""
    rows = [{"kernel": "one"}]
    assert sweep(measure=lambda built: (rows, ["two crashed"])).main(["--save"]) == 1
    assert capsys.readouterr().err.endswith("toy.py: two crashed\n")
    assert (gpu / "toy.csv").exists()


@pytest.mark.parametrize("script", [ablation, matrix_cost, grid_order])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--compile", "a", "--measure", "b"], "not allowed with argument"),
        (["--compile", "a", "--save"], "--compile measures nothing that could be saved"),
        ([], "measuring needs a GPU and torch sees none here; --compile DIR needs none"),
        (["4096"], "unrecognized arguments: 4096"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(capsys, monkeypatch, script, arguments, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        script.SWEEP.main(arguments)
    assert exit.value.code == 2
    message = capsys.readouterr().err.strip().split("\n")[-1]
    assert message.startswith(f"{script.__name__}.py: error: ")
    assert text in message


def test_the_progress_counts_what_is_measured(monkeypatch, capsys):
    def measure(built, shape, reps, device, limit, progress):
        assert (shape, reps, device, limit) == ((64, 64, 64), sweeps.REPS, "cuda", 1e13)
        for _ in range(2 + reps):
            progress("one", "time")
        return "found"

    monkeypatch.setattr(variants, "measure", measure)
    assert sweeps.measured(BROKEN, 64, 1e13) == "found"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "time one" in captured.err
    assert "0/9" in captured.err
