"""What the order of the blocks costs: each stage with its blocks down M first, in place of N.

    python benchmarks/grid_order.py                  compiles the variants and measures them
    python benchmarks/grid_order.py --compile DIR    compiles into DIR only, without a GPU
    python benchmarks/grid_order.py --measure DIR    measures what is in DIR, without a compiler
    python benchmarks/grid_order.py --save           writes grid_order.csv to the results

A stage's neighbouring blocks lie side by side along N, and share rows of A; optimized-GEMM (at its
kernel 5) asks what the other order does. The variant is the stage's own source, in which a block
takes the tile that the other order would give it. ratio is the other order's time / the stage's.
"""

import sys
from collections.abc import Sequence

import matrix_cost
import report
import sweeps
from matrix_cost import PARAMETERS, size_of, written
from sweeps import Sweep
from variants import Built, Measured, Variant

COLUMNS = ("kernel", "M", "N", "K", "time_ms", "other_ms", "ratio")


def other(stage: str) -> Variant:
    changes = (
        (PARAMETERS, PARAMETERS + "  const int tile = blockIdx.y * gridDim.x + blockIdx.x;\n"),
        ("blockIdx.y * BM", "tile % gridDim.y * BM"),
        ("blockIdx.x * BN", "tile / gridDim.y * BN"),
    )
    return Variant(stage, f"{stage} down M first", replace=changes)


def pairs() -> list[Variant]:
    """Each stage beside its other order, whose turn comes next."""
    stages = [variant.stage for variant in matrix_cost.pairs()[::2]]
    return [variant(stage) for stage in stages for variant in (written, other)]


def rows_of(found: Sequence[tuple[Measured, Measured]]) -> list[dict]:
    """The rows of grid_order.csv, from pairs of a stage and its other order."""
    rows = []
    for m, o in found:
        stage = m.built.variant.stage
        if (m.built.variant, o.built.variant) != (written(stage), other(stage)):
            raise ValueError(f"no pair: {m.built.variant.label}, {o.built.variant.label}")
        times = 1e3 * m.time.median, 1e3 * o.time.median
        values = stage, *(size_of(stage),) * 3, *times, times[1] / times[0]
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def markdown(rows: list[dict], env: dict) -> str:
    """grid_order.csv for docs/ladder.md."""
    heading = "kernel", "M = N = K", "along N first (ms)", "down M first (ms)", "down M / along N"
    table = [heading]
    for row in rows:
        times = (f"{row[key]:.3f}" for key in ("time_ms", "other_ms", "ratio"))
        table.append((report.title(row["kernel"]), str(row["M"]), *times))
    return "\n".join([*report.markdown_table(table), "", f"{report.describe(env)}."])


def measure(built: Sequence[Built]) -> tuple[list[dict], list[str]]:
    return rows_of(sweeps.measured_pairs(built, size_of)), []


SWEEP = Sweep("grid_order", __doc__, pairs, matrix_cost.registers, measure, markdown)

if __name__ == "__main__":
    sys.exit(SWEEP.main())
