"""Variants of a stage, and the sweep of launch bounds that is made of them."""

import ctypes
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import check
import counters
import launch_bounds
import peaks
import pytest
import report
import torch
import variants
from variants import Built, Resources, Variant, VariantError

CSRC = report.ROOT / "csrc"
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


# ---- a variant's source --------------------------------------------------------------------------


def test_a_variant_is_the_stage_s_source_with_other_constants():
    """Nothing else changes, whatever the order and the length of the new values."""
    stage = report.stage_file("stage3").read_text()
    assert stage in variants.source(Variant("stage3", "same"))
    changed = variants.source(
        Variant("stage3", "other", {"TN": 4, "BM": 128, "MIN_BLOCKS": 2, "BK": 128}, "")
    )
    expected = stage
    for old, new in (
        ("BM = 16, BN = 16, BK = 16,", "BM = 128, BN = 16, BK = 128,"),
        ("TM = 2, TN = 2;", "TM = 2, TN = 4;"),
        ("MIN_BLOCKS = 4;", "MIN_BLOCKS = 2;"),
        ("__launch_bounds__(MAX_THREADS, MIN_BLOCKS) ", ""),
    ):
        assert expected.count(old) == 1
        expected = expected.replace(old, new)
    assert expected in changed
    alone = variants.source(Variant("stage3", "alone", {}, "MAX_THREADS"))
    assert "__global__ __launch_bounds__(MAX_THREADS) void kernel(" in alone


def test_every_stage_s_constants_are_found():
    for name in ("stage0", "stage2", "stage3b"):
        text = report.stage_file(name).read_text()
        found = {key: text[slice(*span)] for key, span in variants.constants(text).items()}
        assert found.keys() & {"BM", "BLOCK", "THREADS"}, name
        assert all(found.values())
    text = (
        "constexpr int A = 1, B = (A + 2) * f(A), C = B / 2;\n  static constexpr bool D = true;\n"
    )
    spans = variants.constants(text).items()
    assert [text[slice(*span)] for _, span in spans] == ["1", "(A + 2) * f(A)", "B / 2", "true"]
    with pytest.raises(VariantError, match="A is declared twice"):
        variants.constants("constexpr int A = 1;\nconstexpr int A = 2;\n")


@pytest.mark.parametrize(
    ("variant", "text"),
    [
        (
            Variant("stage3", "x", {"TM": 4, "WM": 64}),
            "stage3 with TM = 4, WM = 64: csrc/stages/stage03_register_tile.cu has no constant "
            "WM; it has BM, BN, BK, PAD, TM, TN, MAX_THREADS, MIN_BLOCKS",
        ),
        (Variant("stage99", "x"), "there is no stage 'stage99' in csrc/stages"),
        (Variant("cublas", "x"), "there is no stage 'cublas' in csrc/stages"),
    ],
)
def test_what_a_stage_does_not_have_is_an_error_that_names_it(variant, text):
    with pytest.raises(VariantError) as error:
        variants.source(variant)
    assert str(error.value) == text


# ---- compiling -----------------------------------------------------------------------------------

TILE = launch_bounds.TILES["8x8 of 64x64"][1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Some of the sweep, and one that a static_assert forbids."""
    if NVCC is None:
        pytest.skip("nvcc is not on PATH")
    folder = tmp_path_factory.mktemp("variants")
    some = [launch_bounds.Point("2x2 of 16x16", n).variant for n in (4, 8)]
    some.append(launch_bounds.Point("4x4 of 16x16", 8).variant)
    some.append(Variant("stage3", "forbidden", {"BM": 32}))
    variants.compile(some, folder, ["9.0a"])
    return folder


def test_the_sweep_measures_something(folder):
    """More blocks mean fewer registers, and where those do not suffice, spills."""
    found = {b.variant.label: b for b in variants.load(folder)}
    loose, tight, spilling = (
        [found[label].find("sm_90a", r.kernel) for r in found[label].resources]
        for label in ("2x2 of 16x16, (256, 4)", "2x2 of 16x16, (256, 8)", "4x4 of 16x16, (256, 8)")
    )
    for kernels in (loose, tight, spilling):
        assert sorted(k.exact for k in kernels) == [False, True]
    assert all(a.registers > b.registers == 32 for a, b in zip(loose, tight, strict=True))
    assert all(k.spill_bytes == k.stack_bytes == 0 for k in loose + tight)
    assert all(k.spill_bytes > 0 and k.stack_bytes > 0 for k in spilling)
    assert {k.shared_bytes for k in loose} == {4 * 2 * 16 * 17}


def test_a_failing_static_assert_is_an_error_that_names_it_and_fails_no_other(folder):
    found = {b.variant.label: b for b in variants.load(folder)}
    forbidden = found.pop("forbidden")
    assert forbidden.library is None
    assert forbidden.error.startswith(
        "stage3 with BM = 32: it does not compile: csrc/stages/stage03_register_tile.cu("
    )
    assert "static assertion failed" in forbidden.error
    assert "\n" not in forbidden.error
    assert all(b.library.exists() and not b.error for b in found.values())


def test_a_library_exports_its_entries_alone(folder):
    """Libraries of the same stage are in one process together."""
    for b in variants.load(folder):
        if b.library:
            names = subprocess.check_output(["nm", "-D", "--defined-only", b.library], text=True)
            assert {line.split()[-1] for line in names.splitlines()} == {
                *("run", "inspect", "explain"),
            }


def test_the_manifest_goes_there_and_back(folder):
    some = variants.load(folder)
    entries = json.loads((folder / variants.MANIFEST).read_text())["variants"]
    assert [e["variant"]["label"] for e in entries] == [b.variant.label for b in some]
    assert {"the shim", "csrc/gemm.cuh", "csrc/gemm.h"} <= entries[0]["sources"].keys()
    assert not any("host" in name for name in entries[0]["sources"])
    wanted = [some[2].variant, some[0].variant]
    assert variants.load(folder, wanted) == [some[2], some[0]]
    other = replace(some[0].variant, constants={"MIN_BLOCKS": 5})
    with pytest.raises(VariantError, match=r"has no '2x2.*' \(stage3 with MIN_BLOCKS = 5\)"):
        variants.load(folder, [other])


def test_what_is_compiled_already_is_kept(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    first, second = variants.load(copy)[:2]
    before = first.library.stat().st_mtime_ns
    renamed = replace(first.variant, label="renamed")
    (kept,) = variants.compile([renamed], copy, ["9.0a"])
    assert kept.variant == renamed
    assert kept.library.stat().st_mtime_ns == before
    assert not second.library.exists()


def test_a_stale_manifest_is_refused(folder, tmp_path, monkeypatch):
    """Where a header, the stage or the shim has changed since."""
    shutil.copytree(CSRC, tmp_path / "csrc")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    variants.load(folder)
    with (tmp_path / "csrc" / "gemm.cuh").open("a") as header:
        header.write("// changed\n")
    with pytest.raises(
        VariantError, match=r"manifest.json is stale: csrc/gemm.cuh changed since; compile again"
    ):
        variants.load(folder)
    monkeypatch.setattr(variants, "SHIM", "")
    with pytest.raises(VariantError, match=r"csrc/gemm.cuh, the shim changed since"):
        variants.load(folder)


def test_a_folder_without_a_manifest_or_with_another_file_is_refused(tmp_path):
    with pytest.raises(VariantError, match=r"there is no .*manifest.json: write it with --compile"):
        variants.load(tmp_path)
    for text in ("{}", "[]", "nonsense"):
        (tmp_path / variants.MANIFEST).write_text(text)
        with pytest.raises(VariantError, match="is no manifest"):
            variants.load(tmp_path)


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(VariantError, match="there is no nvcc on PATH"):
        variants.compile([Variant("stage3", "x")], tmp_path)


@needs_nvcc
def test_a_wrong_architecture_and_a_label_given_twice_are_refused(tmp_path):
    with pytest.raises(VariantError, match=r"expected an architecture like 9.0a or 8.0, got '90'"):
        variants.compile([Variant("stage3", "x")], tmp_path, ["90"])
    with pytest.raises(VariantError, match="two variants have the same label"):
        variants.compile([Variant("stage3", "x"), Variant("stage2", "x")], tmp_path)


def test_what_ptxas_says_is_read_for_each_architecture():
    said = "".join(
        f"ptxas info    : Compiling entry function '{name}' for '{arch}'\n"
        f"ptxas info    : Function properties for {name}\n"
        f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers{smem}\n"
        for name, arch, stack, stores, loads, registers, smem in (
            ("kEdgeE0E", "sm_80", 0, 0, 0, 63, ", 2176 bytes smem, 400 bytes cmem[0]"),
            ("kEdgeE1E", "sm_90a", 8, 4, 12, 40, ", 8 bytes cumulative stack size"),
        )
    )
    assert variants.ptxas(said) == [
        Resources("sm_80", "kEdgeE0E", 63, 0, 0, 2176),
        Resources("sm_90a", "kEdgeE1E", 40, 16, 8, 0),
    ]
    with pytest.raises(VariantError, match="unknown form"):
        variants.ptxas("Compiling entry function 'k' for 'sm_90a'\nUsed a few registers")


def test_the_architecture_is_the_device_s(monkeypatch):
    built = [
        Built(Variant("stage3", "x"), None, (Resources("sm_80", "k", 1, 0, 0, 0),)),
        Built(Variant("stage3", "y"), None, (Resources("sm_90a", "k", 1, 0, 0, 0),)),
    ]
    monkeypatch.setattr(report, "device_name", lambda device: "a GPU")
    for capability, arch in (((9, 0), "sm_90a"), ((8, 0), "sm_80"), ((8, 6), "sm_80")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert variants.arch_of("cuda", built) == arch
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    with pytest.raises(VariantError, match=r"compiled for sm_80, sm_90a, and a GPU is sm_120:"):
        variants.arch_of("cuda", built)


# ---- measuring -----------------------------------------------------------------------------------

# A variant for the CPU: what a library looks like from outside, and what may go wrong with one.
FAKE = r"""
#include <unistd.h>
#include <csignal>
#include <cstdlib>
#include "gemm.h"
struct Launch { const char* kernel; int threads, registers, blocks, max_threads; };
extern "C" int run(const sgemm::Problem* p, void*) {
  static int calls = 0;
  ++calls;
  if (MODE == CRASH || (MODE == CRASH_LATER && calls > 3)) raise(SIGSEGV);
  if (MODE == HANG) sleep(1000);
  if (MODE == ERROR) return 701;
  for (int64_t i = 0; i < p->M; ++i)
    for (int64_t j = 0; j < p->N; ++j) {
      double sum = MODE == WRONG && j == 3;
      for (int64_t k = 0; k < p->K; ++k) sum += double(p->A[i * p->lda + k]) * p->B[k * p->ldb + j];
      p->out[i * p->ldo + j] = p->alpha * sum + (p->c ? p->beta : 0);
    }
  return 0;
}
extern "C" int inspect(const sgemm::Problem*, Launch* l) {
  *l = {"kEdgeE0E", 48, MODE == OTHER ? 31 : 32, 10, 2048};
  return MODE == UNKNOWN ? 1 : 0;
}
extern "C" const char* explain(int) { return "too many resources requested"; }
"""
MODES = ("FINE", "CRASH", "CRASH_LATER", "HANG", "ERROR", "WRONG", "OTHER", "UNKNOWN")


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fakes")
    (folder / "fake.cpp").write_text(FAKE)
    built = {}
    for mode in MODES:
        library = folder / f"{mode}.so"
        names = [f"-D{name}={value}" for value, name in enumerate(MODES)]
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{CSRC}", *names, f"-DMODE={mode}"]
        subprocess.run([*command, "-o", library, folder / "fake.cpp"], check=True)
        resources = (Resources("cpu", "kEdgeE0E", 32, 4, 8, 0),)
        built[mode] = Built(Variant("stage3", mode), library, resources)
    return built


@needs_gxx
def test_a_variant_that_fails_loses_nothing_of_the_others(fakes):
    absent = Built(Variant("stage3", "absent"), Path("/nowhere.so"), fakes["FINE"].resources)
    broken = Built(Variant("stage3", "broken"), None, (), "it does not compile")
    some = [*fakes.values(), absent, broken]
    found = variants.measure(some, (24, 20, 28), reps=2, device="cpu", patience=4)
    by_label = {m.built.variant.label: m for m in found}
    assert list(by_label) == [*MODES, "absent", "broken"]
    failures = {label: m.failure for label, m in by_label.items() if m.failure}
    assert failures.pop("WRONG").startswith("its result is wrong in 24 of 480 entries: C[0, 3]")
    assert "31 registers and its manifest says 32" in failures.pop("OTHER")
    assert "/nowhere.so: cannot open" in failures.pop("absent")
    assert failures == {
        "CRASH": "crashed (SIGSEGV)",
        "CRASH_LATER": "crashed (SIGSEGV)",
        "HANG": "did not end within 4 s",
        "ERROR": "its launch failed: too many resources requested (CUDA error 701)",
        "broken": "it does not compile",
    }
    assert [label for label, m in by_label.items() if m.time] == ["FINE", "UNKNOWN"]
    fine, unknown = by_label["FINE"], by_label["UNKNOWN"]
    assert len(fine.time.samples) == len(unknown.time.samples) == 2
    assert (fine.threads, fine.resources) == (48, fakes["FINE"].resources[0])
    assert fine.occupancy == 10 * 2 / 64
    assert 0 < fine.errors.rms < 1e-6
    assert (unknown.resources, unknown.occupancy) == (None, None)
    assert "asking how it launches failed" in unknown.note


@needs_gxx
def test_a_time_that_cannot_be_true_is_a_failure(fakes):
    (found,) = variants.measure([fakes["FINE"]], (8, 8, 8), 1, "cpu", peak=1.0)
    assert found.time is None
    assert "cannot be true" in found.failure


@needs_gxx
def test_the_mirrors_of_structs_have_their_layout(tmp_path):
    """variants.Problem is csrc/gemm.h's, variants.Launch the shim's."""
    shim = variants.SHIM
    struct = shim[shim.index("struct Launch") : shim.index("};") + 2]
    lines = []
    for name, mirror in (("sgemm::Problem", variants.Problem), ("Launch", variants.Launch)):
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        for field, _ in mirror._fields_:
            arguments = f"offsetof({name}, {field}), sizeof({name}::{field})"
            lines.append(f'printf("%zu %zu\\n", {arguments});')
    program = tmp_path / "layout.cpp"
    program.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "gemm.h"\n'
        f"{struct}\nint main() {{\n{chr(10).join(lines)}\n}}\n"
    )
    subprocess.run(
        ["g++", "-std=c++20", f"-I{CSRC}", "-o", tmp_path / "layout", program], check=True
    )
    expected = []
    for mirror in (variants.Problem, variants.Launch):
        expected.append(str(ctypes.sizeof(mirror)))
        for field, _ in mirror._fields_:
            place = getattr(mirror, field)
            expected.append(f"{place.offset} {place.size}")
    assert subprocess.check_output([tmp_path / "layout"], text=True).splitlines() == expected


@needs_gxx
def test_achieved_occupancy_is_of_each_variant(fakes, tmp_path, monkeypatch):
    """By an ncu that counts nothing, but runs what it is given."""
    metric = counters.METRICS["occupancy_pct"]
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    lines += [f'"{i}","kernel","{metric}","%","{v}"' for i, v in ((1, "49.5"), (0, "25"))]
    ncu = tmp_path / "ncu"
    ncu.write_text('#!/bin/sh\nshift 9\n"$@" || exit\ncat <<E\n' + "\n".join(lines) + "\nE\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    both = [fakes["FINE"], fakes["OTHER"]]
    found = variants.achieved_occupancy(both, (8, 9, 10), "cpu")
    assert found == {"FINE": 0.25, "OTHER": 0.495}
    with pytest.raises(counters.CountersError, match="ncu saw 2 launches of 1 variants"):
        variants.achieved_occupancy(both[:1], (8, 9, 10), "cpu")
    with pytest.raises(counters.CountersError, match="too many resources requested"):
        variants.achieved_occupancy([fakes["ERROR"]], (8, 9, 10), "cpu")


# ---- the sweep -----------------------------------------------------------------------------------


def test_the_sweep_is_section_9_6_s():
    points = launch_bounds.sweep()
    assert len({p.variant.label for p in points}) == len(points) == 24
    assert points[0].variant == Variant("stage3", "2x2 of 16x16, no bounds", {}, "")
    assert points[1].variant == Variant("stage3", "2x2 of 16x16, (256)", {}, "MAX_THREADS")
    assert points[2].variant.constants == {"MIN_BLOCKS": 2}
    assert [p.min_blocks for p in points[:6]] == ["no bounds", "none", 2, 4, 6, 8]
    for point in points:
        variants.source(point.variant)


def test_a_sweep_whose_registers_are_all_the_same_is_refused():
    points = [launch_bounds.Point("2x2 of 16x16", n) for n in ("no bounds", 2, 4)]

    def built(*registers):
        kernels = [(Resources("sm_90a", "EdgeE0E", r, 0, 0, 0),) for r in registers]
        return [Built(p.variant, None, k) for p, k in zip(points, kernels, strict=True)]

    launch_bounds.require_different(points, built(40, 40, 32))
    with pytest.raises(check.CheckError, match=r"measures nothing: .* 2x2 .* 32 registers on sm_9"):
        launch_bounds.require_different(points, built(40, 32, 32))


def test_the_document_s_table_is_the_csv_s(tmp_path):
    rows = [
        dict(zip(launch_bounds.COLUMNS, row, strict=True))
        for row in (
            ("stage3", "2x2 of 16x16", "no bounds", 17.25, 32, 0, 0.991),
            ("stage3", "2x2 of 16x16", "none", 17.5, 32, 0, None),
            ("stage3b", "4x4 of 16x16", 8, None, None, None, None),
        )
    ]
    report.write_csv(tmp_path / "launch_bounds.csv", rows)
    read = report.read_csv(tmp_path / "launch_bounds.csv")
    assert read == rows
    env = report.environment("cpu")
    assert launch_bounds.markdown(read, env).splitlines()[2:] == [
        "| 2x2 of 16x16 | no bounds | 32 | 0 | 99.1% | 17.25 |",
        "| 2x2 of 16x16 | (256) | 32 | 0 | - | 17.50 |",
        "| 4x4 of 16x16 | (256, 8) | - | - | - | - |",
        "",
        f"M = N = K = 4096. {report.describe(env)}.",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["0"], "sizes must be at least 1, got 0"),
        (["--reps", "0"], "--reps must be at least 1, got 0"),
        (["--compile", "a", "--measure", "b"], "not allowed with argument"),
        (["--measure", "a", "--arch", "8.0"], "--measure compiles nothing"),
        (["1024", "--save"], "launch_bounds.csv is of size 4096"),
        ([], "measuring needs a GPU and torch sees none here; --compile DIR needs none"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(capsys, monkeypatch, arguments, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        launch_bounds.parse(arguments)
    assert exit.value.code == 2
    assert text in capsys.readouterr().err.strip().split("\n")[-1]


def test_what_is_in_the_folder_already_is_measured_without_a_compiler(folder, monkeypatch):
    """As long as it is fresh, whole, and for this GPU."""
    points = [launch_bounds.Point("2x2 of 16x16", n) for n in (4, 8)]
    args = SimpleNamespace(measure=None, compile=None, arch=None)
    monkeypatch.setattr(launch_bounds, "FOLDER", folder)
    monkeypatch.setattr(variants, "compile", lambda *args: "compiled")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = launch_bounds.prepare(args, points)
    assert found == variants.load(folder, [p.variant for p in points])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(report, "device_name", lambda device: "a GPU")
    assert launch_bounds.prepare(args, points) == "compiled"
    points.append(launch_bounds.Point("2x2 of 16x16", 6))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert launch_bounds.prepare(args, points) == "compiled"
    args.measure = folder
    with pytest.raises(VariantError, match="has no '2x2 of 16x16, \\(256, 6\\)'"):
        launch_bounds.prepare(args, points)


def test_compile_prints_the_resources_and_fails_for_what_does_not_compile(
    folder, monkeypatch, capsys
):
    """From the libraries that are there already; one of them is missing."""
    points = [launch_bounds.Point("2x2 of 16x16", n) for n in (4, 8)]
    monkeypatch.setattr(launch_bounds, "sweep", lambda: points)
    found = variants.load(folder, [p.variant for p in points])
    monkeypatch.setattr(variants, "compile", lambda *args: found)
    assert launch_bounds.main(["--compile", str(folder)]) == 0
    assert "2x2 of 16x16       (256, 8)  sm_90a" in capsys.readouterr().out
    found[1] = replace(found[1], library=None, resources=(), error="it does not compile: why")
    assert launch_bounds.main(["--compile", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "(256, 4)" in captured.out
    assert captured.err.endswith("launch_bounds.py: it does not compile: why\n")


@needs_gxx
def test_the_table_and_the_file_have_every_row_and_a_failure_is_told(
    fakes, tmp_path, monkeypatch, capsys
):
    points = [launch_bounds.Point("4x4 of 16x16", n) for n in ("no bounds", 2, "none")]
    built = [fakes["FINE"], fakes["WRONG"], fakes["UNKNOWN"]]
    path = tmp_path / "launch_bounds.csv"
    args = SimpleNamespace(
        size=16, shape=(16, 16, 16), reps=1, compile=None, ncu=True, save=False, csv=path
    )
    measure, environment = variants.measure, report.environment
    monkeypatch.setattr(launch_bounds, "parse", lambda argv: args)
    monkeypatch.setattr(launch_bounds, "sweep", lambda: points)
    monkeypatch.setattr(launch_bounds, "prepare", lambda *args: built)
    monkeypatch.setattr(peaks, "measure", lambda device: peaks.Peaks(1e15, 1e15))
    monkeypatch.setattr(
        variants,
        "measure",
        lambda built, size, reps, device, *more: measure(built, size, reps, "cpu", *more),
    )
    monkeypatch.setattr(report, "environment", lambda device: environment("cpu"))
    monkeypatch.setattr(variants, "achieved_occupancy", lambda built, size: {"FINE": 0.25})
    assert launch_bounds.main([]) == 1
    captured = capsys.readouterr()
    fine, wrong, unknown = captured.out.splitlines()[-3:]
    assert "no bounds       48         32            4  31.2%      25.0%" in fine
    assert wrong.split() == ["4x4", "of", "16x16", "(256,", "2)", *"-------"]
    assert unknown.split()[:-2] == ["4x4", "of", "16x16", "(256)", *"-----"]
    errors = captured.err.splitlines()
    assert any("UNKNOWN: asking how it launches failed" in line for line in errors)
    assert errors[-1].startswith("launch_bounds.py: WRONG: its result is wrong in 16 of 256")
    rows = report.read_csv(path)
    assert tuple(rows[0]) == launch_bounds.COLUMNS
    assert rows[0] | {"time_ms": 0} == {
        **{"kernel": "stage3", "tile": "4x4 of 16x16", "min_blocks": "no bounds", "time_ms": 0},
        **{"registers": 32, "spill_bytes": 4, "occupancy": 0.25},
    }
    assert [row["time_ms"] is None for row in rows] == [False, True, False]


@pytest.mark.gpu
def test_the_sweep_is_right_on_the_gpu(tmp_path):
    """With the libraries of build/launch_bounds where they are fresh, else with two made here."""
    folder, points = launch_bounds.FOLDER, launch_bounds.sweep()
    try:
        variants.load(folder, [p.variant for p in points])
    except VariantError as error:
        if NVCC is None:
            pytest.skip(f"there is no nvcc, and {error}")
        folder, points = tmp_path, [launch_bounds.Point("2x2 of 16x16", n) for n in (4, 8)]
        variants.compile([p.variant for p in points], folder)
    path = tmp_path / "launch_bounds.csv"
    arguments = ["200", "--reps", "1", "--measure", str(folder), "--csv", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_bounds, "sweep", lambda: points)
        assert launch_bounds.main(arguments) == 0
    rows = report.read_csv(path)
    assert len(rows) == len(points)
    assert tuple(rows[0]) == launch_bounds.COLUMNS
    for point, row in zip(points, rows, strict=True):
        assert (row["tile"], row["min_blocks"]) == (point.tile, point.min_blocks)
        assert row["time_ms"] > 0
        assert 16 < row["registers"] <= 255
        assert row["spill_bytes"] >= 0
