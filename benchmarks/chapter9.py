"""Two claims of Chapter 9, measured: its padding avoids conflicts, its unroll is worth 10-20 %.

    python benchmarks/chapter9.py                    compiles the variants, measures them at 4096
    python benchmarks/chapter9.py --compile DIR      compiles into DIR only, without a GPU
    python benchmarks/chapter9.py --measure DIR      measures what is in DIR, without a compiler
    python benchmarks/chapter9.py --save             writes chapter9.csv to the results

The variants are stage 2's and stage 3's own source without the padding, and stage 2's with other
unrolling. Wavefronts are counted by ncu: passes through the shared memory's banks for each load and
store, of which one without conflicts takes one for every 128 bytes.
"""

import argparse
import sys
from pathlib import Path

import counters
import report
import sweeps
import torch
import variants
from variants import Variant

FOLDER = report.ROOT / "build" / "chapter9"
SIZE = 4096

#: As Chapter 9 has them, and what is asked about each.
VARIANTS = [
    Variant("stage2", "stage2 as written"),
    Variant("stage2", "stage2 without padding", {"PAD": 0}),
    Variant("stage2", "stage2 without the pragma", unroll=""),
    Variant("stage2", "stage2 not unrolled", unroll="#pragma unroll 1"),
    Variant("stage3", "stage3 as written"),
    Variant("stage3", "stage3 without padding", {"PAD": 0}),
]
COUNTED = ("shared_loads", "shared_load_wavefronts", "shared_stores", "shared_store_wavefronts")


def markdown(rows: list[dict], env: dict) -> str:
    """chapter9.csv for docs/ladder.md."""
    lines = [
        "| variant | time (ms) | as written / this | wavefronts / shared load | / shared store |",
        "|---|--:|--:|--:|--:|",
    ]
    base = {row["kernel"]: row["time_ms"] for row in rows if row["variant"].endswith("as written")}
    for row in rows:
        lines.append(
            f"| {row['variant']} | {row['time_ms']:.2f} "
            f"| {base[row['kernel']] / row['time_ms']:.3f} "
            f"| {row['wavefronts_per_load']:.2f} | {row['wavefronts_per_store']:.2f} |"
        )
    return "\n".join([*lines, "", f"M = N = K = {SIZE}. {report.describe(env)}."])


def measure(built: list[variants.Built]) -> list[dict]:
    """The rows of chapter9.csv."""
    shape = (SIZE, SIZE, SIZE)
    found = sweeps.measured(built, SIZE, sweeps.peak())
    for m in found:
        if m.failure:
            raise variants.VariantError(f"{m.built.variant.label}: {m.failure}")
    metrics = [counters.METRICS[name] for name in COUNTED]
    counted = variants.count(built, shape, metrics)
    rows = []
    for m in found:
        loads, load_wavefronts, stores, store_wavefronts = (
            counted[m.built.variant.label][metric] for metric in metrics
        )
        rows.append(
            {
                "kernel": m.built.variant.stage,
                "variant": m.built.variant.label,
                **dict.fromkeys("MNK", SIZE),
                "time_ms": 1e3 * m.time.median,
                "spread": m.time.spread,
                "registers": m.resources.registers,
                "wavefronts_per_load": load_wavefronts / loads,
                "wavefronts_per_store": store_wavefronts / stores,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--compile", metavar="DIR", type=Path, help="compile only; needs no GPU")
    steps.add_argument("--measure", metavar="DIR", type=Path, help="measure only; needs no nvcc")
    parser.add_argument("--save", action="store_true", help="write chapter9.csv to the results")
    args = parser.parse_args()
    if not args.compile and not torch.cuda.is_available():
        parser.error("measuring needs a GPU and torch sees none here; --compile DIR needs none")
    try:
        if args.measure:
            built = variants.load(args.measure, VARIANTS)
        else:
            built = variants.compile(VARIANTS, args.compile or FOLDER)
        if args.compile:
            errors = [b.error for b in built if b.error]
            print("\n".join(errors) or f"{len(built)} variants are in {args.compile}")
            return int(bool(errors))
        rows = measure(built)
    except (variants.VariantError, counters.CountersError) as error:
        print(f"chapter9.py: {error}", file=sys.stderr)
        return 1
    env = report.environment("cuda")
    print(markdown(rows, env))
    if args.save:
        report.save(report.results_folder("cuda"), "chapter9.csv", rows, env)
    return 0


if __name__ == "__main__":
    sys.exit(main())
