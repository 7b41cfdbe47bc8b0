"""How often the multiply-adds of main loops wait for a register, counted in the machine code.

    python benchmarks/register_banks.py            every large loop of the built library
    python benchmarks/register_banks.py FILE...    of these libraries, object files or cubins

No GPU is needed. On NVIDIA GPUs since Volta, registers lie in two banks, the even and the odd ones,
and an instruction reads one of each a cycle. An operand that is marked .reuse is kept for the
next instruction of the same kind, in its place among the operands, and is then not read. So an
FFMA that has to read two or three registers of one bank waits a cycle or two: a conflict. That
model is from Scott Gray's notes on maxas, and from Jia et al., Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking (2018). A main loop is a kernel's smallest that has at least 500
FFMAs. Spills are loads and stores of local memory within it.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import report

LEAST = 500  # FFMAs of a main loop
LIBRARY = Path(__file__).parents[1] / "torch_sgemm" / "_C.abi3.so"
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
JUMP = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)\s*$")
REGISTER = re.compile(r"(?<![\w.])R(\d+)(\.reuse)?")


@dataclass(frozen=True)
class Loop:
    kernel: str  #: mangled
    instructions: int
    ffmas: int
    conflicts: int  #: cycles that all of its FFMAs wait
    spills: int

    @property
    def rate(self) -> float:
        return self.conflicts / self.ffmas


def conflicts(ffmas: Iterable[str]) -> int:
    """Cycles that FFMAs wait for registers, one after the other."""
    kept: dict[int, int] = {}  # {place among the operands: register}
    waited = 0
    for text in ffmas:
        read = [0, 0]
        keep = {}
        for place, (number, reuse) in enumerate(REGISTER.findall(text)[1:]):
            register = int(number)
            if kept.get(place) != register:
                read[register % 2] += 1
            if reuse:
                keep[place] = register
        waited += max(max(read) - 1, 0)
        kept = keep
    return waited


def main_loop(kernel: str, sass: Iterable[str]) -> Loop | None:
    """The main loop of a kernel's lines as cuobjdump writes them; None if it has none."""
    code = [(int(m[1], 16), m[2]) for line in sass if (m := INSTRUCTION.match(line))]
    best: Loop | None = None
    for end, text in code:
        jump = JUMP.search(text)
        if not jump or int(jump[1], 16) > end:
            continue
        body = [t for address, t in code if int(jump[1], 16) <= address <= end]
        ffmas = [t for t in body if opcode(t) == "FFMA"]
        if len(ffmas) < LEAST or (best and len(body) >= best.instructions):
            continue
        spills = sum(opcode(t) in ("LDL", "STL") for t in body)
        best = Loop(kernel, len(body), len(ffmas), conflicts(ffmas), spills)
    return best


def opcode(text: str) -> str:
    words = text.split()
    return words[words[0].startswith("@")].split(".")[0]


def cuobjdump() -> Path | None:
    """NVIDIA's tool: on PATH, beside nvcc, or as Triton brings it."""
    if found := shutil.which("cuobjdump"):
        return Path(found)
    from torch.utils.cpp_extension import CUDA_HOME

    places = [Path(CUDA_HOME or "/nonexistent") / "bin"]
    try:
        import triton
    except ImportError:
        pass
    else:
        places.append(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    return next((p / "cuobjdump" for p in places if (p / "cuobjdump").exists()), None)


def loops(file: Path, tool: Path) -> list[Loop]:
    """The main loops of all kernels in a file."""
    done = subprocess.run([tool, "-sass", file], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump could not read {file}: {done.stderr.strip()}")
    found = []
    for part in re.split(r"^\s*Function : ", done.stdout, flags=re.MULTILINE)[1:]:
        name, *lines = part.splitlines()
        loop = main_loop(name.strip(), lines)
        if loop:
            found.append(loop)
    return found


def text(found: Sequence[Loop]) -> str:
    table = [["kernel", "instructions", "FFMAs", "conflicts per FFMA", "spills"]]
    for loop in sorted(found, key=lambda loop: loop.kernel):
        figures = [loop.instructions, loop.ffmas, f"{loop.rate:.3f}", loop.spills]
        table.append([short(loop.kernel), *map(str, figures)])
    return "\n".join(report.aligned(table))


def short(kernel: str) -> str:
    """A kernel's name and template arguments, as far as they tell kernels apart."""
    if tool := shutil.which("c++filt"):
        kernel = subprocess.run([tool, kernel], capture_output=True, text=True).stdout.strip()
    return re.sub(
        r"\(CUtensorMap.*|\(sgemm::.*|sgemm::(matmul::)?|^void |\((int|bool)\)", "", kernel
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=[LIBRARY])
    files = parser.parse_args(argv).files
    if missing := [str(file) for file in files if not file.exists()]:
        parser.error(f"there is no file {missing[0]}")
    tool = cuobjdump()
    if tool is None:
        parser.error("cuobjdump was not found: not on PATH, not beside nvcc, not in triton")
    found = [loop for file in files for loop in loops(file, tool)]
    if not found:
        sys.exit(f"no kernel has a loop of {LEAST} FFMAs")
    print(text(found))


if __name__ == "__main__":
    main()
