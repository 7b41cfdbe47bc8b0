"""Tries other tiles in a stage's own source, and says which is fastest at which size.

    python benchmarks/tune.py stage7 stage10                the whole sweep of these stages
    python benchmarks/tune.py stage7 --sizes 1024 4096      at these sizes (M = N = K)
    python benchmarks/tune.py stage7 --tile BM=64,WM=32     one tile, given by what differs from the
                                                            shipped one; more with more --tile
    python benchmarks/tune.py stage7 --compile DIR          compiles into DIR only, without a GPU
    python benchmarks/tune.py stage7 --measure DIR          measures DIR only, without a compiler
    python benchmarks/tune.py stage7 --save                 writes tune.csv to the results

A tile that is not possible is in the table with the reason: the stage's own static_assert, or what
the compiler says. Each tile's result is checked against float64 before it is timed; one that
crashes, hangs or is wrong is put down as such, and the others go on. Sizes are measured in two
rounds: all tiles with --quick samples each, then the --best of them and the shipped one with
--reps, all interleaved. With --save the file is written after every round, so that an interrupted
sweep keeps what it has.
"""

import argparse
import itertools
import re
import sys
from pathlib import Path

import check
import peaks
import report
import torch
import variants
from tqdm import tqdm
from variants import Built, Variant

FOLDER = report.ROOT / "build" / "tune"
STAGES = ("stage7", "stage10")
SIZES = (1024, 2048, 4096, 8192)
WARP = 32

#: The constants that a tile is named by, where the stage has them.
NAMES = ("BM", "BN", "BK", "WM", "WN", "TM", "TN", "PAD", "MIN_BLOCKS")


# ---- tiles ---------------------------------------------------------------------------------------


def shipped(stage: str) -> dict[str, int]:
    """The tile in the stage's source; VariantError where it has none to tune."""
    text = variants.stage_file(stage).read_text()
    spans = variants.constants(text)
    values = {name: text[slice(*spans[name])] for name in NAMES if name in spans}
    if "struct Shipped" not in text or not all(re.fullmatch(r"\d+", v) for v in values.values()):
        raise variants.VariantError(
            f"{stage} has no struct Shipped with a tile to tune; stages from stage7 on have"
        )
    return {name: int(value) for name, value in values.items()}


def label(tile: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in tile.items())


def variant(stage: str, tile: dict[str, int]) -> Variant:
    base = shipped(stage)
    changes = {name: value for name, value in tile.items() if base[name] != value}
    return Variant(stage, f"{stage} {label(tile)}", changes)


def space(stage: str) -> list[dict[str, int]]:
    """The tiles of a sweep: those of two to sixteen warps a block, and the shipped one.

    The lanes of a warp are 4 x 8 or 8 x 4 of them: WM = 4 TM, WN = 8 TN or the reverse. A stage
    with launch bounds is tuned among large tiles, which leave one block or two on a multiprocessor.
    """
    base = shipped(stage)
    large = "MIN_BLOCKS" in base
    sides = (128, 256) if large else (64, 128, 256)
    threads = [(8, 8), (16, 8), (8, 16)] if large else [(4, 4), (8, 4), (4, 8), (8, 8)]
    found = []
    for BM, BN, BK, (TM, TN), lanes in itertools.product(sides, sides, (8, 16), threads, (4, 8)):
        tile = dict(BM=BM, BN=BN, BK=BK, WM=lanes * TM, WN=WARP // lanes * TN, TM=TM, TN=TN)
        if BM % tile["WM"] or BN % tile["WN"]:
            continue
        warps = BM * BN // (tile["WM"] * tile["WN"])
        if not 2 <= warps <= 16:
            continue
        if large:  # two blocks where their accumulators leave registers for them
            tile |= {"PAD": 0, "MIN_BLOCKS": 2 if warps * TM * TN <= 512 else 1}
        found.append(tile)
        if large:
            found.append(tile | {"PAD": 4})
    return found if base in found else [base, *found]


def parse_tile(stage: str, text: str) -> dict[str, int]:
    """The shipped tile with "BM=64,WM=32" in it."""
    tile = shipped(stage)
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if not match or match[1] not in tile:
            raise variants.VariantError(
                f"--tile takes NAME=NUMBER,... with the names {', '.join(tile)}; got '{part}'"
            )
        tile[match[1]] = int(match[2])
    return tile


def reason(error: str) -> str:
    """Why a tile does not compile, in the words of the stage's static_assert if there are any."""
    broken = variants.broken_assertion(error)
    return f"illegal: {broken}" if broken else error.split(": ", 1)[-1]


# ---- measuring -----------------------------------------------------------------------------------


class Sweep:
    """What is known so far, a row for each tile and size."""

    def __init__(self, built: list[Built], sizes: list[int], save: bool):
        self.built, self.sizes, self.save = built, sizes, save
        self.rows: dict[tuple[str, int], dict] = {}
        for size, b in itertools.product(sizes, built):
            note = reason(b.error) if b.error else "not measured"
            self.put(b, size, note=note)

    def put(self, b: Built, size: int, seconds: float | None = None, samples=0, note="") -> None:
        self.rows[b.variant.label, size] = {
            "kernel": b.variant.stage,
            "tile": b.variant.label.split(" ", 1)[1],
            **dict.fromkeys("MNK", size),
            "time_ms": seconds and 1e3 * seconds,
            "tflops": seconds and 2 * size**3 / seconds / 1e12,
            "samples": samples,
            "note": note,
        }

    def ranking(self, stage: str, size: int) -> list[dict]:
        """The rows of a size that have a time, those with most samples first, then the fastest."""
        rows = [row for (_, n), row in self.rows.items() if n == size and row["kernel"] == stage]
        rows = [row for row in rows if row["time_ms"]]
        return sorted(rows, key=lambda row: (-row["samples"], row["time_ms"]))

    def round(self, built: list[Built], size: int, reps: int, peak: float, progress) -> None:
        found = variants.measure(built, (size,) * 3, reps, "cuda", peak, progress)
        for m in found:
            seconds = m.time.median if m.time else None
            self.put(m.built, size, seconds, reps if m.time else 0, m.failure)
        if self.save:
            env = report.environment("cuda")
            report.save(report.results_folder("cuda"), "tune.csv", list(self.rows.values()), env)

    def run(self, quick: int, best: int, reps: int, peak: float, bar: tqdm) -> None:
        def progress(name: str, what: str) -> None:
            bar.set_description(f"{what} {name:60}")
            bar.update()

        able = [b for b in self.built if not b.error]
        stages = list(dict.fromkeys(b.variant.stage for b in able))
        for size in self.sizes:
            self.round(able, size, quick, peak, progress)
            short = set()
            for stage in stages:
                short |= {row["tile"] for row in self.ranking(stage, size)[:best]}
                short.add(label(shipped(stage)))
            finalists = [b for b in able if b.variant.label.split(" ", 1)[1] in short]
            self.round(finalists, size, reps, peak, progress)


def summary(sweep: Sweep, stage: str) -> str:
    """The best of each size, and what the shipped tile does there."""
    ours = label(shipped(stage))
    lines = [f"{stage}, shipped: {ours}"]
    for size in sweep.sizes:
        ranking = sweep.ranking(stage, size)
        if not ranking:
            lines.append(f"  {size:6}  nothing could be measured")
            continue
        base = next((row for row in ranking if row["tile"] == ours), None)
        for place, row in enumerate(ranking[:3], 1):
            than = f"{base['time_ms'] / row['time_ms']:.3f} x the shipped" if base else ""
            lines.append(
                f"  {size:6}  {place}. {row['tflops']:6.2f} TFLOP/s  {row['tile']}  {than}"
            )
        if base:
            place = ranking.index(base) + 1
            lines.append(f"  {size:6}  {place:2}. {base['tflops']:6.2f} TFLOP/s  shipped")
    return "\n".join(lines)


def problems(sweep: Sweep) -> str:
    """Tiles without a time, by reason."""
    why: dict[str, list[str]] = {}
    for row in sweep.rows.values():
        if row["note"]:
            why.setdefault(row["note"], []).append(f"{row['kernel']} {row['tile']}")
    return "\n".join(
        f"{len(set(tiles))} tiles: {note}; as {tiles[0]}" for note, tiles in sorted(why.items())
    )


def markdown(rows: list[dict], env: dict) -> str:
    """tune.csv for docs/ladder.md: the best and the shipped tile of each stage and size."""
    lines = ["| stage | N | best tile | TFLOP/s | shipped, TFLOP/s | shipped / best |"]
    lines.append("|---|--:|---|--:|--:|--:|")
    for stage in dict.fromkeys(row["kernel"] for row in rows):
        ours = label(shipped(stage))
        for size in dict.fromkeys(row["M"] for row in rows):
            timed = [r for r in rows if r["kernel"] == stage and r["M"] == size and r["time_ms"]]
            finalists = [r for r in timed if r["samples"] == max(x["samples"] for x in timed)]
            best = max(finalists, key=lambda r: r["tflops"])
            base = next(r for r in finalists if r["tile"] == ours)
            speeds = best["tflops"], base["tflops"]
            lines.append(
                f"| {stage} | {size} | {best['tile']} | {speeds[0]:.1f} | {speeds[1]:.1f} "
                f"| {speeds[1] / speeds[0]:.3f} |"
            )
    tiles = len({(row["kernel"], row["tile"]) for row in rows})
    return "\n".join([*lines, "", f"Of {tiles} tiles. {report.describe(env)}."])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: {' '.join(STAGES)}")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="N")
    parser.add_argument("--tile", action="append", metavar="NAME=NUMBER,...")
    parser.add_argument("--quick", type=int, default=1, help="samples of each tile (default 1)")
    parser.add_argument("--best", type=int, default=8, help="finalists of each size (default 8)")
    parser.add_argument("--reps", type=int, default=7, help="samples of finalists (default 7)")
    parser.add_argument("--arch", action="append", help="as in TORCH_CUDA_ARCH_LIST, for --compile")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--compile", metavar="DIR", type=Path, help="compile only; needs no GPU")
    steps.add_argument("--measure", metavar="DIR", type=Path, help="measure only; needs no nvcc")
    parser.add_argument("--save", action="store_true", help="write tune.csv to the results")
    args = parser.parse_args(argv)
    for name in ("quick", "best", "reps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if min(args.sizes) < 1:
        parser.error(f"sizes must be at least 1, got {' '.join(map(str, args.sizes))}")
    if not args.compile and not torch.cuda.is_available():
        parser.error("measuring needs a GPU and torch sees none here; --compile DIR needs none")
    stages = args.stages or list(STAGES)
    try:
        wanted = [variant(stage, tile) for stage in stages for tile in _tiles(stage, args.tile)]
        if args.measure:
            built = variants.load(args.measure, wanted)
        else:
            with tqdm(total=len(wanted), file=sys.stderr, leave=False) as bar:
                built = variants.compile(
                    wanted, args.compile or FOLDER, args.arch, lambda name: bar.update()
                )
        sweep = Sweep(built, args.sizes, args.save)
        if args.compile:
            legal = sum(not b.error for b in built)
            print(f"{legal} of {len(built)} tiles are in {args.compile}")
            for note in sorted({reason(b.error) for b in built if b.error}):
                print(f"  {note}")
            return int(not legal)
        limit = peaks.measure("cuda").ffma
        torch.cuda.empty_cache()  # for the process that measures
        total = len(built) * len(args.sizes) * (2 + args.quick)
        with tqdm(total=total, file=sys.stderr, leave=False) as bar:
            sweep.run(args.quick, args.best, args.reps, limit, bar)
    except (variants.VariantError, check.CheckError) as error:
        print(f"tune.py: {error}", file=sys.stderr)
        return 1
    for stage in stages:
        print(summary(sweep, stage), end="\n\n")
    print(problems(sweep))
    return 0


def _tiles(stage: str, given: list[str] | None) -> list[dict[str, int]]:
    if not given:
        return space(stage)
    tiles = [shipped(stage), *(parse_tile(stage, text) for text in given)]
    return [tile for i, tile in enumerate(tiles) if tile not in tiles[:i]]


if __name__ == "__main__":
    sys.exit(main())
