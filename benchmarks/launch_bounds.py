"""What __launch_bounds__(256, minBlocks) does to stage 3: Chapter 9, section 9.6.

    python benchmarks/launch_bounds.py                  measures the sweep at 4096, and compiles it
                                                        before, where build/launch_bounds has none
    python benchmarks/launch_bounds.py 1024 --reps 5    M = N = K = 1024, 5 samples each (default 7)
    python benchmarks/launch_bounds.py --compile DIR    compiles into DIR only, without a GPU
    python benchmarks/launch_bounds.py --measure DIR    measures what is in DIR, without a compiler
    python benchmarks/launch_bounds.py --save           writes launch_bounds.csv, at 4096, with ncu

The kernels are stage 3's own source with other constants. The table goes to stdout, progress to
stderr. Registers and spilled bytes (stores and loads together) are ptxas's, of the kernel that ran.
`fits` is the theoretical occupancy, of the CUDA occupancy API: the warps that fit on a
multiprocessor together, of those that it can hold. `occupancy` is the achieved one, which ncu
counts (--ncu, --save), and what launch_bounds.csv has: empty where ncu could not count.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import check
import counters
import ladder
import report
import sweeps
import torch
import variants
from tqdm import tqdm
from variants import Built, Measured, Variant

FOLDER = report.ROOT / "build" / "launch_bounds"
SIZE = 4096
COLUMNS = ("kernel", "tile", "min_blocks", "time_ms", "registers", "spill_bytes", "occupancy")

_LARGE = {"BM": 64, "BN": 64, "BK": 64}
#: tile: (stage, its constants). Chapter 9's block tile leaves 64 and 16 threads a block. The larger
#: is as large as stage 3's square tile can be in 48 KiB: once with the 256 threads that the bounds
#: speak of, and once with more accumulators than most of them leave registers.
TILES = {
    "2x2 of 16x16": ("stage3", {}),
    "4x4 of 16x16": ("stage3b", {}),
    "4x4 of 64x64": ("stage3", _LARGE | {"TM": 4, "TN": 4}),
    "8x8 of 64x64": ("stage3", _LARGE | {"TM": 8, "TN": 8}),
}

#: The column min_blocks: (launch bounds, constants).
BOUNDS: dict[str | int, tuple[str | None, dict[str, int]]] = {
    "no bounds": ("", {}),
    "none": ("MAX_THREADS", {}),
    **{n: (None, {"MIN_BLOCKS": n}) for n in (2, 4, 6, 8)},
}


@dataclass(frozen=True)
class Point:
    """One row of the sweep."""

    tile: str
    min_blocks: str | int

    @property
    def variant(self) -> Variant:
        stage, constants = TILES[self.tile]
        bounds, more = BOUNDS[self.min_blocks]
        label = f"{self.tile}, {attribute(self.min_blocks)}"
        return Variant(stage, label, constants | more, bounds)


def sweep() -> list[Point]:
    return [Point(tile, min_blocks) for tile in TILES for min_blocks in BOUNDS]


def attribute(min_blocks: str | int) -> str:
    """The column min_blocks as the kernel has it."""
    if min_blocks == "no bounds":
        return "no bounds"
    return "(256)" if min_blocks == "none" else f"(256, {min_blocks})"


def require_different(points: Sequence[Point], built: Sequence[Built]) -> None:
    """The minBlocks of a tile that all come out with as many registers would measure nothing."""
    for tile in dict.fromkeys(point.tile for point in points):
        for arch in sorted({r.arch for b in built for r in b.resources}):
            rows = [
                b.find(arch).registers
                for point, b in zip(points, built, strict=True)
                if point.tile == tile and isinstance(point.min_blocks, int) and b.resources
            ]
            if len(rows) > 1 and len(set(rows)) == 1:
                raise check.CheckError(
                    f"the sweep measures nothing: with every minBlocks the {tile} tile has "
                    f"{rows[0]} registers on {arch}"
                )


# ---- tables --------------------------------------------------------------------------------------


def _aligned(rows: list[tuple]) -> str:
    """The first column to the left, the others to the right; the first row is the heading."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{row[0]:{widths[0]}}"]
        cells += [f"{cell!s:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells))
    return "\n".join([lines[0], "  " + "-" * (len(lines[0]) - 2), *lines[1:]])


def resources_table(points: Sequence[Point], built: Sequence[Built]) -> str:
    """What ptxas says, for matrices that the tiles cover exactly and (in brackets) for others."""
    heading = ("tile", "launch bounds", "arch", "registers", "spill bytes", "stack bytes", "shared")
    rows = [heading]
    for point, b in zip(points, built, strict=True):
        for arch in sorted({r.arch for r in b.resources}):
            exact, other = sorted((r for r in b.resources if r.arch == arch), key=_guarded)
            cells = (
                f"{getattr(exact, name)} ({getattr(other, name)})"
                for name in ("registers", "spill_bytes", "stack_bytes")
            )
            rows.append((point.tile, attribute(point.min_blocks), arch, *cells, exact.shared_bytes))
    return _aligned(rows)


def _guarded(resources: variants.Resources) -> bool:
    return not resources.exact


def table(points: Sequence[Point], rows: list[dict], found: Sequence[Measured]) -> str:
    heading = ("tile", "launch bounds", "threads", "registers", "spill bytes", "fits", "occupancy")
    lines = [(*heading, "time (ms)", "spread")]
    for point, row, measured in zip(points, rows, found, strict=True):
        lines.append(
            (
                *(point.tile, attribute(point.min_blocks)),
                *(_or_dash(v) for v in (measured.threads, row["registers"], row["spill_bytes"])),
                *(_percent(v) for v in (measured.occupancy, row["occupancy"])),
                "-" if row["time_ms"] is None else f"{row['time_ms']:.3f}",
                _percent(measured.time and measured.time.spread),
            )
        )
    return _aligned(lines)


def _or_dash(value: object) -> object:
    return "-" if value is None else value


def _percent(fraction: float | None) -> str:
    return report.percent(None if fraction is None else 100 * fraction)


def markdown(rows: list[dict], env: dict) -> str:
    """launch_bounds.csv for docs/ladder.md."""
    lines = [
        "| stage 3 with a tile of | `__launch_bounds__` | registers | spilled bytes | occupancy "
        "| time (ms) |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        time = "-" if row["time_ms"] is None else f"{row['time_ms']:.2f}"
        figures = (_or_dash(row[key]) for key in ("registers", "spill_bytes"))
        cells = (row["tile"], attribute(row["min_blocks"]), *figures, _percent(row["occupancy"]))
        lines.append(f"| {' | '.join(map(str, cells))} | {time} |")
    return "\n".join([*lines, "", f"M = N = K = {SIZE}. {report.describe(env)}."])


# ---- the command ---------------------------------------------------------------------------------


def rows_of(
    points: Sequence[Point], found: Sequence[Measured], achieved: dict[str, float]
) -> list[dict]:
    """The rows of launch_bounds.csv."""
    rows = []
    for point, m in zip(points, found, strict=True):
        values = (
            m.built.variant.stage,
            point.tile,
            point.min_blocks,
            m.time and 1e3 * m.time.median,
            m.resources and m.resources.registers,
            m.resources and m.resources.spill_bytes,
            achieved.get(m.built.variant.label),
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", nargs="?", type=int, default=SIZE, metavar="N")
    parser.add_argument("--reps", type=int, default=7, help="timing repetitions (default 7)")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--compile", metavar="DIR", type=Path, help="compile only; needs no GPU")
    steps.add_argument("--measure", metavar="DIR", type=Path, help="measure only; needs no nvcc")
    parser.add_argument(
        "--arch", nargs="+", metavar="X.Y", help="architectures to compile for: 9.0a 8.0 ..."
    )
    parser.add_argument("--ncu", action="store_true", help="achieved occupancy, by Nsight Compute")
    parser.add_argument("--csv", help="write the rows to this file")
    parser.add_argument(
        "--save", action="store_true", help="--ncu, and write launch_bounds.csv to the results"
    )
    args = parser.parse_args(argv)
    if args.reps < 1:
        parser.error(f"--reps must be at least 1, got {args.reps}")
    args.shape = report.sizes(parser, [args.size])
    if args.measure and args.arch:
        parser.error("--arch is for compiling, and --measure compiles nothing")
    if args.compile:
        return args
    if args.save and args.size != SIZE:
        parser.error(f"launch_bounds.csv is of size {SIZE}: leave the size out, or use --csv")
    if not torch.cuda.is_available():
        parser.error("measuring needs a GPU and torch sees none here; --compile DIR needs none")
    sets = ladder.input_sets(*args.shape, "cuda")
    needed, free = ladder.memory_needed(*args.shape, sets), report.memory_free("cuda")
    if needed > free:
        parser.error(
            f"size {args.size} takes about {needed / 2**30:.1f} GiB with its float64 reference, "
            f"and {free / 2**30:.1f} GiB are free; choose a smaller size"
        )
    return args


def prepare(args: argparse.Namespace, points: list[Point]) -> list[Built]:
    wanted = [point.variant for point in points]
    if args.measure:
        return variants.load(args.measure, wanted)
    if not (args.compile or args.arch):
        try:
            built = variants.load(FOLDER, wanted)
            variants.arch_of("cuda", built)
        except variants.VariantError:
            built = []
        if built and not any(b.error for b in built):
            return built
    with tqdm(total=len(wanted), file=sys.stderr, leave=False, desc="compile") as bar:
        folder = args.compile or FOLDER
        return variants.compile(wanted, folder, args.arch, lambda label: bar.update())


def measure(args: argparse.Namespace, built: list[Built]) -> list[Measured]:
    return sweeps.measured(built, args.size, sweeps.peak(), args.reps)


def count_warps(args: argparse.Namespace, found: list[Measured]) -> dict[str, float]:
    """Achieved occupancies; a warning where ncu has none."""
    if not (args.ncu or args.save):
        return {}
    try:
        return variants.achieved_occupancy([m.built for m in found if m.time], args.shape)
    except counters.CountersError as error:
        print(f"launch_bounds.py: no achieved occupancy: {error}", file=sys.stderr)
        return {}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    points = sweep()
    try:
        built = prepare(args, points)
        require_different(points, built)
        if args.compile:
            print(resources_table(points, built))
            return complain(b.error for b in built)
        found = measure(args, built)
    except (variants.VariantError, check.CheckError) as error:
        return complain([str(error)])
    rows = rows_of(points, found, count_warps(args, found))
    environment = report.environment("cuda")
    print(
        f"\nM = N = K = {args.size}, alpha = 1, beta = 0, FP32, normal data; median of {args.reps} "
        f"interleaved samples, inputs out of cache\n{report.describe(report.environment('cuda'))}\n"
    )
    print(table(points, rows, found))
    if args.csv:
        report.write_csv(args.csv, rows)
    if args.save:
        report.save(report.results_folder("cuda"), "launch_bounds.csv", rows, environment)
    for m in found:
        if m.note:
            print(f"launch_bounds.py: {m.built.variant.label}: {m.note}", file=sys.stderr)
    return complain(m.failure and f"{m.built.variant.label}: {m.failure}" for m in found)


def complain(errors) -> int:
    """The exit status after these errors, of which the empty ones are none."""
    status = 0
    for error in filter(None, errors):
        print(f"launch_bounds.py: {error}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
