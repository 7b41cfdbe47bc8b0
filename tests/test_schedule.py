"""Which tiles, and which parts of their K, the blocks of a persistent kernel compute."""

import subprocess

from test_executor import CSRC, CXX, TESTS, needs_compiler


@needs_compiler
def test_every_k_tile_is_computed_once_and_pieces_are_in_order(tmp_path):
    """B70: pieces of a tile that nobody writes, or two write, or that are added up in any order."""
    program = tmp_path / "schedule"
    sources = ["-std=c++20", f"-I{CSRC}", TESTS / "schedule_cases.cpp", "-o", program]
    subprocess.run([CXX, "-O1", "-Wall", "-Werror", *map(str, sources)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "right\n"
