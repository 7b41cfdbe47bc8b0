"""A stage as a diff against its parent: the idea of its file.

    python3 benchmarks/ladder_diff.py 6          stage 6 against stage 5
    make ladder-diff N=9b                        stage 9b against stage 9

On a terminal the diff is coloured and paged, as git does it.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: The tree of docs and design: each stage's parent, by number. A new stage is entered here.
PARENT = {
    **{"0": None, "1": "0", "1b": "1", "2": "1", "2b": "2", "3": "2", "3b": "3", "4": "2b"},
    **{"5": "4", "6": "5", "7": "6", "8": "7", "9": "8", "9b": "9", "10": "9"},
}


def stage_file(number: str) -> str:
    """ "2b" -> csrc/stages/stage02b_tile32.cu, as seen from ROOT."""
    digits, letter = re.fullmatch(r"(\d+)(\w?)", number).groups()
    (file,) = ROOT.glob(f"csrc/stages/stage{int(digits):02}{letter}_*.cu")
    return str(file.relative_to(ROOT))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", nargs="?", default="", metavar="N", help=", ".join(PARENT))
    number = parser.parse_args(argv).number.removeprefix("stage")
    if number not in PARENT:
        asked = f"there is no stage '{number}'" if number else "name a stage"
        parser.error(f"{asked}; there are {', '.join(PARENT)}")
    if PARENT[number] is None:
        parser.error(f"stage {number} has no parent: the ladder begins there")
    files = stage_file(PARENT[number]), stage_file(number)
    try:
        done = subprocess.run(["git", "diff", "--no-index", "--", *files], cwd=ROOT)
    except FileNotFoundError:
        parser.error(f"git was not found, which shows the diff: {' '.join(files)}")
    return int(done.returncode > 1)  # 1: they differ


if __name__ == "__main__":
    sys.exit(main())
