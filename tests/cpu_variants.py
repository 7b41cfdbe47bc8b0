"""Variants of stages, compiled for the CPU executor."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import report
import variants
from variants import Variant

CSRC = report.ROOT / "csrc"
MAIN = """
struct CallingThread : simt::Stream {
  void parallel(const std::function<void()>& work) override { work(); }
};
#define ENTRY(stage) \\
  extern "C" int run_##stage(const sgemm_cpu::Problem* p, void*) { \\
    CallingThread stream; \\
    return static_cast<int>(sgemm_cpu::stage::launch(*p, &stream)); \\
  }
"""


def compiled(wanted: dict[str, Variant], folder: Path) -> Callable:
    """launch(stage, a, b, out) of one variant a stage."""
    parts = []
    for variant in wanted.values():
        text = variants.source(variant)
        parts.append(text[: text.index('#line 1 "the shim')])
    entries = "".join(f"ENTRY({stage})\n" for stage in wanted)
    (folder / "all.cu").write_text("\n".join(["#include <functional>", *parts, MAIN, entries]))
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-DSGEMM_HOST="]
    sources = [folder / "all.cu", CSRC / "host" / "simt.cpp", CSRC / "host" / "sectors.cpp"]
    library = folder / "all.so"
    command = [
        *("g++", *flags, f"-I{CSRC}", f"-I{CSRC}/stages", f"-Wl,-T,{CSRC}/host/shared_memory.ld"),
        *("-x", "c++", *sources, "-o", library),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    functions = ctypes.CDLL(str(library))

    def launch(stage, a, b, out):
        problem = variants._problem(a, b, out)
        return getattr(functions, f"run_{stage}")(ctypes.byref(problem), None)

    return launch
