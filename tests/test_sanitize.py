"""Every stage on the CPU under AddressSanitizer and UBSan, at every edge, in four schedules (`make
sanitize`); broken copies of stages, which show that each of these checks can fail; and how many
sectors of global memory a stage's warps ask for.

The program is executor_stage.cpp. Beside the ladder's stages it runs stage_async_copy.cu, a stage
made of what the ladder does not use yet.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path
from typing import NamedTuple

import counters
import pytest
import report

H200 = report.RESULTS / "nvidia-h200"
TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
MATMUL = CSRC / "matmul"
ASYNC = TESTS / "stage_async_copy.cu"
SOURCES = [*sorted((CSRC / "stages").glob("*.cu")), ASYNC]
HARNESS = [TESTS / "executor_stage.cpp"] + [
    CSRC / "host" / name for name in ("simt.cpp", "sectors.cpp", "stages.cpp")
]

GXX = shutil.which("g++")
NVCC = shutil.which("nvcc")
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fdata-sections"]
FLAGS = [
    *("-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-Wall", "-Wno-unknown-pragmas"),
    *("-DSGEMM_HOST=", "-DSGEMM_COUNT_SECTORS", f"-I{CSRC}", f"-I{CSRC}/stages", "-x", "c++"),
]

needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++ on PATH")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")


def name(source):
    """ "stage2" of stage02_shared_tile.cu, as the program calls it."""
    (found,) = re.findall(r"namespace sgemm::(\w+) \{", source.read_text())
    return found


def tile(source):
    """[BM, BN, BK]"""
    text = source.read_text()
    return [int(re.search(rf"\b{size} = (\d+)", text)[1]) for size in ("BM", "BN", "BK")]


def find(stage):
    (source,) = (source for source in SOURCES if name(source) == stage)
    return source


def gxx(*arguments):
    done = subprocess.run([GXX, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr


def compile_stage(source, folder, *flags):
    gxx(*SANITIZERS, *FLAGS, *flags, "-c", source, "-o", folder / f"{source.stem}.o")
    return folder / f"{source.stem}.o"


def link(program, objects):
    gxx(*SANITIZERS, f"-Wl,-T,{CSRC}/host/shared_memory.ld", *objects, "-o", program)
    return program


def run(program, *arguments):
    """What it prints, with the sanitizer's report if there is one; it ends in time."""
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        # The stages allocate nothing, and looking for leaks needs ptrace.
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    """{source: its object file}"""
    folder = tmp_path_factory.mktemp("sanitize")
    sources = [*HARNESS, *SOURCES]
    with ThreadPoolExecutor(2) as pool:
        return dict(
            zip(sources, pool.map(lambda s: compile_stage(s, folder), sources), strict=True)
        )


@pytest.fixture(scope="session")
def program(objects):
    return link(next(iter(objects.values())).parent / "executor_stage", objects.values())


# ---- the stages are clean -----------------------------------------------------------------------


@needs_gxx
@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_edges(source, program):
    """M, N and K around each of 1, a tile and several, with rows that are multiples of 16 bytes and
    that are not: nothing is read or written out of bounds, four schedules give the same bits, and
    those are right."""
    assert run(program, name(source), "edges", *tile(source)) == "right\n"


# ---- nor are the product ops' kernels ------------------------------------------------------------

#: A tile and what its kernels move with the least: 0 chunks, 1 neighbours, 2 any elements.
TILES = {
    found[1]: ["kVector", "kAdjacent", "kStrided"].index(found[2])
    for found in re.finditer(r'{"(\w+)", \d+, .*Access::(\w+), ', (MATMUL / "select.h").read_text())
}
KERNELS = [
    *(
        (tile, a, b, access)
        for tile, least in TILES.items()
        for a in (0, 1)
        for b in (0, 1)
        for access in range(least + 1)
    ),
    *(
        (method, a, b, access)
        for method, b in (("dot", 1), ("axpy", 0))
        for a in (0, 1)
        for access in (0, 1, 2)
    ),
]


@pytest.fixture(scope="session")
def matmul_objects(tmp_path_factory):
    """{source: its object file}"""
    folder = tmp_path_factory.mktemp("sanitize_matmul")
    sources = [
        *(TESTS / "executor_matmul.cpp", CSRC / "host" / "simt.cpp", CSRC / "host" / "sectors.cpp"),
        # The ring kernels are for compute capability 9.0 alone.
        *(path for path in sorted(MATMUL.glob("**/*.cu")) if not path.stem.startswith("ring_")),
    ]
    with ThreadPoolExecutor(2) as pool:
        objects = pool.map(lambda source: compile_stage(source, folder), sources)
        return dict(zip(sources, objects, strict=True))


@pytest.fixture(scope="session")
def matmul_program(matmul_objects):
    objects = matmul_objects.values()
    return link(next(iter(objects)).parent / "executor_matmul", objects)


def test_every_tile_is_known():
    assert TILES == {
        **{"128x256": 0, "64x128": 1, "64x64": 2, "32x128": 1, "128x32": 1, "32x32": 1}
    }


@needs_gxx
@pytest.mark.parametrize(("kernel", "a", "b", "access"), KERNELS)
def test_product_kernels(matmul_program, kernel, a, b, access):
    """Each layout and access, at sizes around the tile's, with K in parts, batches, every kind of
    addend and out: nothing is read or written out of bounds, four schedules give the same bits, and
    those are right."""
    assert run(matmul_program, kernel, a, b, access) == "right\n"


BARRIER = (
    "    __syncthreads();  // everybody's loads have landed, and nobody reads the other stage\n"
)
TILE = "ieee/tile_64x64.cu"

#: What is broken: the file with the mistake, old and new, the file to compile, and the report.
BROKEN_PRODUCTS = {
    "no barrier": ("ieee/tiled.cuh", BARRIER, "", TILE, "schedules differ"),
    "no wait": ("ieee/tiled.cuh", "    copy_wait<0>();\n", "", TILE, "cp.async in flight"),
    "one element too many of a line": (
        *("ieee/tiled.cuh", "x_left_(extent - x -", "x_left_(1 + extent - x -"),
        *(TILE, "AddressSanitizer"),
    ),
    "a column beyond the last": (
        *("kernel.cuh", "if (col + j < g.N) out[", "if (col + j <= g.N) out["),
        *(TILE, "that is not the result"),
    ),
    "a part forgotten": (
        *("launch.cu", "int s = adder;", "int s = adder + ADDERS;"),
        *("launch.cu", "wrong at"),
    ),
    "a row taken for another": (
        *("ieee/tiled.cuh", "(swizzle(k) & ~FOURS)", "(swizzle(k + 4) & ~FOURS)"),
        *(TILE, "wrong at"),
    ),
}


@needs_gxx
@pytest.mark.parametrize("mistake", BROKEN_PRODUCTS)
def test_a_broken_product_kernel_is_reported(mistake, matmul_objects, tmp_path):
    file, old, new, compiled, expected = BROKEN_PRODUCTS[mistake]
    shutil.copytree(CSRC, tmp_path / "csrc")
    broken = tmp_path / "csrc" / "matmul" / file
    assert old in broken.read_text()
    broken.write_text(broken.read_text().replace(old, new))
    recompiled = compile_stage(tmp_path / "csrc" / "matmul" / compiled, tmp_path)
    objects = {**matmul_objects, MATMUL / compiled: recompiled}
    program = link(tmp_path / "broken", objects.values())
    found = [
        run(program, "64x64", a, b, access) for a in (0, 1) for b in (0, 1) for access in (0, 1)
    ]
    assert any(expected in text for text in found), found


# ---- broken stages are not ----------------------------------------------------------------------


class Broken(NamedTuple):
    """A stage with one mistake, and the report of it.

    In the report " ... " stands for anything, and a text in << >> for FILE:LINE of the line in the
    broken stage that has it.
    """

    stage: str
    mistake: list[tuple[str, str]]  # (old, new) in the stage's file
    shape: tuple[int, int, int] | Callable  # M, N, K, or tiles() of them
    report: str
    flags: tuple[str, ...] = ()


def tiles(m, n, k):
    """The shape of so many tiles of a stage whose tile is tuned."""
    return lambda BM, BN, BK: (m * BM, n * BN, k * BK)


# UBSan knows the dimensions of an array; without these checks it is left to the red zones.
RED_ZONES_ONLY = ("-fno-sanitize=bounds,object-size",)

FILLED = "    __syncthreads();  // nobody computes on a half-filled tile\n"
READ = "    __syncthreads();  // nobody overwrites a tile that others still read\n"
WAIT = "    copy_wait<0>();\n"
LANDED = (
    "    __syncthreads();  // everybody's copies have landed, and nobody reads the other tile\n"
)
LOADED = (
    "    __syncthreads();  // everybody's loads have landed, and nobody reads the other stage\n"
)
ANOTHER = "if (k0 + BK < A.cols) "
EXIT = (
    "  float acc = 0.0f;\n",
    "  float acc = 0.0f;\n"
    "  if (block_row + thread_row >= C.rows || block_col + thread_col >= C.cols) return;\n",
)

MISALIGNED = "of block (0, 0, 0): a copy of 16 bytes at an address that is not a multiple of them\n"

BROKEN = {
    # shared memory
    "shared index, UBSan": Broken(
        "stage2",
        [("* Bs[k][thread_col]", "* Bs[k + 1][thread_col]")],
        (16, 16, 16),
        "<<Bs[k + 1]>> ... runtime error: index 16 out of bounds for type 'float [16][17]'",
    ),
    "shared index, read": Broken(
        "stage2",
        [("* Bs[k][thread_col]", "* Bs[k + 1][thread_col]")],
        (16, 16, 16),
        "AddressSanitizer: global-buffer-overflow ... READ of size 4 ... <<Bs[k + 1]>> ... "
        "after global variable 'Bs'",
        RED_ZONES_ONLY,
    ),
    "shared index, write": Broken(
        "stage3",
        [("As[tile_row][tile_col] =", "As[tile_row][tile_col + TN] =")],
        (16, 16, 16),
        "AddressSanitizer: global-buffer-overflow ... WRITE of size 4 ... <<tile_col + TN]>> ... "
        "after global variable 'As'",
        RED_ZONES_ONLY,
    ),
    "shared place of a cp.async": Broken(
        "async_copy",
        [("&Bs[next][thread_row][thread_col],", "&Bs[next][thread_row][thread_col] + BN,")],
        (16, 16, 32),
        "AddressSanitizer: global-buffer-overflow ... <<+ BN,>> ... after global variable 'Bs'",
    ),
    "shared memory that nobody wrote": Broken(
        "stage2",
        [
            (
                "As[thread_row][thread_col] =",
                "if (k0 + thread_col < A.cols) As[thread_row][thread_col] =",
            )
        ],
        (16, 16, 15),
        "wrong at (0, 0): nan, expected ",
    ),
    "one row of a thread's tile on": Broken(
        "stage4",
        [("As[thread_row + i][k]", "As[thread_row + i + 1][k]")],
        (64, 64, 8),
        "<<thread_row + i + 1>> ... runtime error: index 64 out of bounds for type 'float [64][8]'",
    ),
    # The last but in its own row: no red zone is there.
    "one column of a thread's tile on": Broken(
        "stage5",
        [("Bs[k][thread_col + j]", "Bs[k][thread_col + j + 1]")],
        (128, 128, 8),
        "<<thread_col + j + 1>> ... runtime error: index 128 out of bounds for type 'float [128]'",
    ),
    "a step of the copy left out": Broken(
        "stage5",
        [("i < BM; i += A_ROWS", "i < BM - A_ROWS; i += A_ROWS")],
        (128, 128, 8),
        "wrong at (96, 0): nan, expected ",
    ),
    "stored as it came, not transposed": Broken(
        "stage6",
        [("As[a_col + k][a_row + i] =", "As[a_row + i][a_col + k] =")],
        (128, 128, 8),
        "<<As[a_row + i]>> ... runtime error: index ... out of bounds for type 'float [8][128]'",
    ),
    "one element stored for two": Broken(
        "stage6",
        [("[a_row + i] = a[k]", "[a_row + i] = a[k / 2 * 2]")],
        (128, 128, 8),
        "wrong at (0, 0): ",
    ),
    "the next k of the last": Broken(
        "stage9b",
        [("if (k + 1 < BK) read", "read")],
        tiles(1, 1, 1),
        "<<&As[now][k]>> ... runtime error: index ... out of bounds for type 'float [",
    ),
    # 16 bytes at once
    "rows of shared memory that are no multiple of 16 bytes": Broken(
        "stage6",
        [("As[BK][BM];", "As[BK][BM + 1];")],
        (1, 1, 2),
        f"1 x 1 x 2, padded: error: thread (0, 0, 0) {MISALIGNED}",
    ),
    "rows of A that are no multiple of 16 bytes": Broken(
        "stage6",
        [("BN, BK, 4>", "BN, BK>")],
        (128, 128, 8),
        f"128 x 128 x 8, padded: error: thread (2, 0, 0) {MISALIGNED}",
    ),
    "every other column of shared memory": Broken(
        "stage7",
        [("&Bs[k][col(j)]", "&Bs[k][col(j) / 2]")],
        tiles(1, 1, 1),
        f"padded: error: thread (1, 0, 0) {MISALIGNED}",
    ),
    # registers
    "index of a thread's own array": Broken(
        "stage3",
        [("acc[i][j] += a[i]", "acc[i + 1][j] += a[i]")],
        (16, 16, 16),
        "AddressSanitizer: stack-buffer-overflow ... <<acc[i + 1][j]>> ... in stack of thread T0 "
        "... 'acc' ... overflows this variable",
        RED_ZONES_ONLY,
    ),
    # global memory
    "one column on": Broken(
        "stage1",
        [("A.load(row, k)", "A.load(row, k + 1)")],
        (32, 32, 4),
        "AddressSanitizer: use-after-poison ... READ of size 4 ... <<A.load(row, k + 1)>>",
    ),
    "one row on": Broken(
        "stage0",
        [("A.load(row, k)", "A.load(row + 1, k)")],
        (32, 32, 4),
        "AddressSanitizer: heap-buffer-overflow ... READ of size 4 ... "
        "<<A.load(row + 1, k)>> ... after ",
    ),
    "one column back": Broken(
        "stage1b",
        [("A.load(row, k)", "A.load(row, k - 1)")],
        (32, 32, 4),
        "AddressSanitizer: heap-buffer-overflow ... READ of size 4 ... "
        "<<A.load(row, k - 1)>> ... before ",
    ),
    "no guard where K is no multiple of BK": Broken(
        "stage2b",
        [("launch_tiles<BM, BN, BK>", "launch_tiles<BM, BN, 1>")],
        (32, 32, 31),
        "AddressSanitizer: use-after-poison ... READ of size 4 ... <<= A.load(>>",
    ),
    "stored one column on": Broken(
        "stage3b",
        [("block_col + thread_col + j, acc", "block_col + thread_col + j + 1, acc")],
        (16, 16, 16),
        "AddressSanitizer: use-after-poison ... WRITE of size 4 ... <<+ j + 1, acc>>",
    ),
    "stored one row on": Broken(
        "stage1",
        [("C.store(row, col", "C.store(row + 1, col")],
        (32, 32, 4),
        "AddressSanitizer: heap-buffer-overflow ... WRITE of size 4 ... "
        "<<C.store(row + 1>> ... after ",
    ),
    "source of a cp.async": Broken(
        "async_copy",
        [("block_row + thread_row, next_k0", "block_row + thread_row + 1, next_k0")],
        (16, 16, 32),
        "AddressSanitizer: heap-buffer-overflow ... READ of size 4 ... "
        "<<thread_row + 1, next_k0>> ... after ",
    ),
    "not stored": Broken(
        "stage3",
        [("j < TN; ++j) C.store", "j < TN - 1; ++j) C.store")],
        (16, 16, 16),
        "wrong at (0, 1): nan, expected ",
    ),
    "thread tiles that overlap": Broken(
        "stage4",
        [("threadIdx.x / BN * TM", "threadIdx.x / BN * (TM - 1)")],
        (64, 64, 8),
        "wrong at (57, 0): nan, expected ",
    ),
    "two warps with one rectangle": Broken(
        "stage7",
        [("warp = threadIdx.x / WARP,", "warp = threadIdx.x / WARP / 2,")],
        tiles(1, 1, 1),
        "padded: wrong at ... nan, expected ",
    ),
    "c forgotten": Broken(
        "stage10",
        [("  // registers -> global\n", "  // registers -> global\n  C.c = nullptr;\n")],
        tiles(1, 1, 1),
        ", whole: wrong at (0, 0): ",
    ),
    "a tile more than there are": Broken(
        "stage9",
        [(ANOTHER + "start_loads", "start_loads"), (ANOTHER + "finish_loads", "finish_loads")],
        tiles(1, 1, 2),
        "AddressSanitizer: heap-buffer-overflow ... READ of size 16 ... "
        "<<start_loads(1 - now, k0 + BK)>> ... after ",
    ),
    # barriers
    **{
        f"no {which} barrier in {stage}": Broken(
            stage, [(barrier, "")], (33, 31, 70), "33 x 31 x 70, padded: schedules differ at "
        )
        for stage in ("stage2", "stage2b", "stage3", "stage3b", *[f"stage{n}" for n in range(4, 9)])
        for which, barrier in (("first", FILLED), ("second", READ))
    },
    "no barrier before a tile is read": Broken(
        "async_copy", [(LANDED, "")], (16, 16, 16), "16 x 16 x 16, padded: schedules differ at "
    ),
    "no barrier before a stage is read": Broken(
        "stage9", [(LOADED, "")], tiles(1, 1, 1), ", padded: schedules differ at "
    ),
    "one stage of As": Broken(
        "stage9",
        [("As[stage][a_col", "As[0][a_col"), ("&As[now][k]", "&As[0][k]")],
        tiles(1, 1, 2),
        ", padded: schedules differ at ",
    ),
    "one stage of Bs": Broken(
        "stage9",
        [("&Bs[stage][b_row", "&Bs[0][b_row"), ("&Bs[now][k]", "&Bs[0][k]")],
        tiles(1, 1, 2),
        ", padded: schedules differ at ",
    ),
    "finished into the stage that is read": Broken(
        "stage9",
        [("finish_loads(1 - now)", "finish_loads(now)")],
        tiles(1, 1, 2),
        ", padded: wrong at (0, 0): nan, expected ",
    ),
    "started into the stage that is read": Broken(
        "stage9",
        [("start_loads(1 - now", "start_loads(now")],
        tiles(1, 1, 2),
        ", padded: wrong at (0, 0): nan, expected ",
    ),
    "early exit": Broken(  # of the second tile's 256 threads 16 are inside
        "stage2",
        [EXIT],
        (17, 16, 16),
        "17 x 16 x 16, padded: error: divergent barrier in block (0, 1, 0): thread (0, 0, 0) waits "
        "at the __syncthreads() in <<half-filled>>, and 240 of the 256 threads have ended without "
        "reaching it\n",
    ),
    "early exit with a cp.async in flight": Broken(
        "async_copy",
        [
            (
                "  copy_commit();\n\n  for",
                "  copy_commit();\n  if (thread_col >= C.cols) return;\n\n  for",
            )
        ],
        (16, 4, 16),
        "error: thread (4, 0, 0) of block (0, 0, 0) ended with 2 cp.async in flight\n",
    ),
    "a barrier for half the block": Broken(
        "stage2",
        [(READ, READ.replace("__syncthreads", "if (thread_col < BN / 2) __syncthreads"))],
        (16, 16, 32),
        "error: divergent barrier in block (0, 0, 0): thread (0, 0, 0) waits at the "
        "__syncthreads() in <<if (thread_col>>, thread (15, 15, 0) at the one in <<half-filled>>\n",
    ),
    # cp.async
    "read before the wait": Broken(
        "async_copy",
        [(WAIT, ""), ("Bs[now][k][thread_col];\n", "Bs[now][k][thread_col];\n" + WAIT)],
        (16, 16, 16),
        "schedules differ at (0, 0): nan forward, copies landing at the wait, ... forward, copies "
        "landing at issue\n",
    ),
    "one group too few waited for": Broken(
        "async_copy",
        [(WAIT, WAIT.replace("0", "1")), ("  // registers -> global\n", WAIT)],
        (16, 16, 40),
        "schedules differ at (0, 0): nan forward, copies landing at the wait, ... forward, copies "
        "landing at issue\n",
    ),
    "no wait": Broken(
        "async_copy",
        [(WAIT, "")],
        (16, 16, 40),
        "error: thread (0, 0, 0) of block (0, 0, 0) ended with 6 cp.async in flight\n",
    ),
    "no wait in stage9": Broken(
        "stage9",
        [(WAIT, "")],
        tiles(1, 1, 2),
        "error: thread (0, 0, 0) of block (0, 0, 0) ended with ... cp.async in flight\n",
    ),
    "no commit": Broken(
        "stage9",
        [("    copy_commit();\n", "")],
        tiles(1, 1, 2),
        "error: thread (0, 0, 0) of block (0, 0, 0) ended with ... cp.async in flight\n",
    ),
    "a tile started that nobody finishes": Broken(
        "stage9",
        [(ANOTHER + "start_loads", "start_loads")],
        tiles(1, 1, 1),
        "error: thread (0, 0, 0) of block (0, 0, 0) ended with ... cp.async in flight\n",
    ),
    # Right where copies land late, as the reference finds: only another schedule shows it.
    "copied before all have read": Broken(
        "async_copy",
        [
            (LANDED, ""),
            (
                "    copy_commit();\n\n    // shared",
                "    copy_commit();\n" + LANDED + "\n    // shared",
            ),
        ],
        (16, 16, 70),
        "schedules differ at (0, 1): ... forward, copies landing at the wait, ... forward, copies "
        "landing at issue\n",
    ),
}


def expected(report, file, text):
    """The report as a regular expression."""

    def place(match):
        found = [n for n, line in enumerate(text.splitlines(), 1) if match[1] in line]
        assert len(found) == 1, f"{match[1]!r} is on lines {found}"
        return f"{file}:{found[0]}"

    report = re.escape(re.sub(r"<<(.*?)>>", place, report)).replace(r"\ \.\.\.\ ", ".*?")
    # What g++ 12 says, and later ones.
    report = report.replace(r"after\ ", "(?:after|to the right of) ")
    return report.replace(r"before\ ", "(?:before|to the left of) ")


@needs_gxx
@pytest.mark.parametrize("mistake", BROKEN)
def test_broken_stage_is_reported(mistake, objects, program, tmp_path):
    """Each mistake for its own reason, at its own line; and the stage without it is clean."""
    broken = BROKEN[mistake]
    original = find(broken.stage)
    text = original.read_text()
    for old, new in broken.mistake:
        assert text.count(old) == 1, (
            f"{original.name} has {old!r} {text.count(old)} times, not once"
        )
        text = text.replace(old, new)
    source = tmp_path / original.name
    source.write_text(text)
    compiled = {**objects, original: compile_stage(source, tmp_path, *broken.flags)}
    shape = broken.shape(*tile(original)) if callable(broken.shape) else broken.shape
    check = broken.stage, "check", *shape

    report = run(link(tmp_path / "broken", compiled.values()), *check)
    assert re.search(expected(broken.report, original.name, text), report, re.DOTALL), report
    assert run(program, *check) == "right\n"


# ---- sectors ------------------------------------------------------------------------------------


def sectors(program, stage, M, N, K):
    """{operand: (requests, sectors)}"""
    lines = run(program, stage, "sectors", M, N, K).splitlines()
    return {operand: (int(n), int(m)) for operand, n, m in map(str.split, lines)}


# Sectors a request of A, B, and c and out, where the tiles cover the matrices exactly.
SECTORS = {
    "stage0": (32, 1, 32),
    "stage1": (1, 4, 4),
    "stage1b": (1, 4, 4),
    "stage2": (4, 4, 4),  # a warp has two rows of 16 floats
    "stage2b": (4, 4, 4),
    "stage3": (8, 8, 8),  # four rows of 8 floats, every other one
    "stage3b": (8, 8, 8),  # four rows of 4 floats, 16 bytes apart
    "stage4": (4, 4, 4),  # four rows of A of BK = 8 floats
    "stage5": (4, 4, 32),  # a lane has the 8 floats of a row of C, which are a sector, to itself
    "stage6": (16, 16, 32),  # 16 bytes a lane, beside one another in A and B
    # Whatever the tile: BK is a multiple of 8, and an even number of lanes share a row of C.
    **dict.fromkeys(("stage7", "stage8", "stage9", "stage9b", "stage10"), (16, 16, 16)),
    "async_copy": (4, 4, 4),
}


@needs_gxx
@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_sectors(source, program):
    """A stage's warps ask for as many sectors as its header says (stage0: A in 32 a request)."""
    text = source.read_text()
    BM, BN, BK = tile(source)
    M, N, K = (ceil(size / of) * of for size, of in ((64, BM), (96, BN), (128, BK)))
    counts = sectors(program, name(source), M, N, K)
    a, b, c = SECTORS[name(source)]
    # Each multiply-add loads both operands, or each tile of the other operand one tile of this.
    reuse = (BN, BM) if "__shared__" in text else (1, 1)
    lanes = 16 if name(source) == "stage3b" else 32  # its blocks are half a warp
    vector = re.search(r"(?:launch_tiles|covers)<.*, (\d)>", text)
    floats = int(vector[1]) if vector else 1  # of a lane at once; c's come one by one
    for operand, each, requests in (
        ("A", a, M * N * K // reuse[0] // lanes // floats),
        ("B", b, M * N * K // reuse[1] // lanes // floats),
        ("c", c, M * N // lanes),
        ("out", c, M * N // lanes // floats),
    ):
        assert counts[operand] == (requests, requests * each), operand


@needs_gxx
def test_sectors_at_an_edge(program):
    """Lanes outside touch nothing, a warp of such lanes asks for nothing, and rows that begin
    anywhere take as many sectors as they lie in."""
    M, N, K = 33, 33, 2
    row = [len({(N * i + j) // 8 for j in range(32)}) + 1 for i in range(M)]  # 32 columns, and one
    assert sectors(program, "stage1", M, N, K) == {
        "A": (M * 2 * K, M * 2 * K),
        "B": (64 * 2 * K, 64 * sum(row[:K])),
        "c": (M * 2, sum(row)),
        "out": (M * 2, sum(row)),
    }


@needs_gxx
@pytest.mark.parametrize("source", [s for s in SOURCES if s != ASYNC], ids=name)
def test_sectors_are_those_that_ncu_counts(source, program):
    """Requests and sectors of all loads and stores at 128, here and by an H200's counters."""
    table = counters.by_kernel(report.read_csv(H200 / "profile.csv"), 128)
    if name(source) not in table:
        pytest.skip("profile.csv has no such stage yet: make gpu-bench on an H200 counts it")
    measured = table[name(source)]
    counts = sectors(program, name(source), 128, 128, 128)
    loads = [sum(pair) for pair in zip(counts["A"], counts["B"], strict=True)]
    stores = list(counts["out"])
    for found, kind in ((loads, "load"), (stores, "store")):
        wanted = [measured[f"global_{kind}_{what}"] for what in ("requests", "sectors")]
        assert found == wanted, kind


# ---- the stage of this test is a CUDA stage -----------------------------------------------------


@needs_nvcc
def test_async_stage_compiles_for_a_gpu(tmp_path):
    """nvcc takes it, makes cp.async of it, and can copy 8 and 16 bytes as well."""
    source = tmp_path / ASYNC.name
    more = "copy_async<8>(to, from), copy_async<16>(to, from);"
    more = f"__global__ void more(const float* from) {{ __shared__ float to[4]; {more} }}"
    source.write_text(f"{ASYNC.read_text()}\nnamespace sgemm {{ {more} }}\n")
    flags = ["-std=c++20", "-gencode=arch=compute_80,code=sm_80", f"-I{CSRC}/stages", "--keep"]
    done = subprocess.run(
        [NVCC, *flags, "-cubin", source], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    found = set(re.findall(r"cp\.async\.[^;]*;", source.with_suffix(".ptx").read_text()))
    found = {re.sub(r"%\w+", "%", text) for text in found}
    assert found == {
        "cp.async.ca.shared.global [%], [%], 4, %;",
        "cp.async.ca.shared.global [%], [%], 8, %;",
        "cp.async.cg.shared.global [%], [%], 16, %;",
        "cp.async.commit_group;",
        "cp.async.wait_group 0;",
    }
