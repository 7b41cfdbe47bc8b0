"""What each change of stage 10 is worth: alone, added to stage 9, and taken away from stage 10.

    python benchmarks/ablation.py                    compiles the variants, measures them at 4096
    python benchmarks/ablation.py --compile DIR      compiles into DIR only, without a GPU
    python benchmarks/ablation.py --measure DIR      measures what is in DIR, without a compiler
    python benchmarks/ablation.py --save             writes ablation.csv to the results

The variants are the two stages' own source, and the changes are read from it: constants that
differ, and launch bounds. One more change was tried and left out, beta == 0 at compile time: it is
added to both. A tile that cannot be alone is a row without a time, whose note says why. Occupancy
is the theoretical one: the warps that fit on a multiprocessor together, of those that it can hold.
cuBLAS is timed by itself, before.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import check
import ladder
import report
import sweeps
import timing
import variants
from sweeps import REPS, Sweep
from variants import Built, Measured, Variant

OLD, NEW = "stage9", "stage10"
SIZE = 4096
COLUMNS = (
    *("kernel", "variant", "M", "N", "K", "time_ms", "spread", "tflops"),
    *("registers", "spill_bytes", "occupancy", "note"),
)

#: Which constants are one change. A constant that differs and is not here is one by itself.
GROUPS = {
    "block tile": ("BM", "BN", "BK"),
    "thread tile": ("TM", "TN", "WM", "WN"),  # a warp tile is 32 thread tiles
    "padding": ("PAD",),
}

#: What makes beta == 0 known at compile time. The variants run without a c, so that it is right.
EPILOGUE = "  // registers -> global\n"
WITHOUT_C = (EPILOGUE, EPILOGUE + "  C.c = nullptr;\n")

#: What ptxas says of a tile that is too large, which is no mistake in here.
TOO_LARGE = re.compile(r"uses too much shared data.*")


@dataclass(frozen=True)
class Change:
    """From the old stage to the new one, and back."""

    name: str
    old: dict[str, int] = field(default_factory=dict)
    new: dict[str, int] = field(default_factory=dict)
    bounds: tuple[str, str] | None = None  # launch bounds: for the new stage, for the old one

    def added(self) -> Variant:
        """The old stage with this change alone."""
        label = f"{OLD} + {self.name}{_list(self.new)}"
        return Variant(OLD, label, self.new, self.bounds and self.bounds[1])

    def removed(self) -> Variant:
        """The new stage without this change."""
        label = f"{NEW} - {self.name}{_list(self.old)}"
        return Variant(NEW, label, self.old, self.bounds and self.bounds[0])


def _list(values: dict[str, int]) -> str:
    return f" ({', '.join(f'{name} = {value}' for name, value in values.items())})" * bool(values)


def numbers(text: str) -> dict[str, int]:
    """A stage's constants that are numbers; the others follow from them."""
    found = {name: text[slice(*span)] for name, span in variants.constants(text).items()}
    return {name: int(value) for name, value in found.items() if value.isdigit()}


def changes() -> list[Change]:
    """Every difference between the two stages' constants and launch bounds, in groups."""
    old_text, new_text = (variants.stage_file(stage).read_text() for stage in (OLD, NEW))
    old, new = numbers(old_text), numbers(new_text)
    differ = [name for name in new if name in old and old[name] != new[name]]

    def change(what: str, names: Sequence[str]) -> Change:
        names = [name for name in differ if name in names]
        return Change(what, {n: old[n] for n in names}, {n: new[n] for n in names})

    grouped = {name: what for what, names in GROUPS.items() for name in names}
    found = [change(w, GROUPS[w]) for w in GROUPS if any(grouped.get(n) == w for n in differ)]
    tiles = [c.name for c in found if c.name != "padding"]
    if len(tiles) > 1:  # of which one may be no tile without the other
        found.append(change("both tiles", [name for what in tiles for name in GROUPS[what]]))
    if tiles and "PAD" in differ:  # nor with the other stage's padding, in shared memory
        names = [name for names in GROUPS.values() for name in names]
        found.append(change("tiles and padding", names))
    found += [change(name, [name]) for name in differ if name not in grouped]
    before, after = (_launch_bounds(text) for text in (old_text, new_text))
    if before != after:
        known = re.sub(r"\bTile::(\w+)", lambda m: _value(m, old, new), after)
        shown = known.replace("Tile::", "")
        found.append(Change(f"launch bounds ({shown})", bounds=(before, known)))
    return found


def _launch_bounds(text: str) -> str:
    (found,) = re.findall(r"__launch_bounds__\(([^()]*)\)", text)
    return found


def _value(constant: re.Match, old: dict[str, int], new: dict[str, int]) -> str:
    """As it stands in both stages, or its value where only the new one has it."""
    name = constant[1]
    return str(new[name]) if name in new and name not in old else constant[0]


def left_out(stage: str) -> Variant:
    return Variant(stage, f"{stage} + beta == 0 at compile time", replace=(WITHOUT_C,))


def variants_of() -> list[Variant]:
    steps = changes()
    return [
        Variant(OLD, f"{OLD} as it is"),
        *(step.added() for step in steps),
        left_out(OLD),
        *(step.removed() for step in steps),
        left_out(NEW),
        Variant(NEW, f"{NEW} as it is"),
    ]


# ---- rows and tables -----------------------------------------------------------------------------


def illegal(built: Built) -> str:
    """Why this is no legal tile; nothing where it is one, or the mistake is another."""
    large = TOO_LARGE.search(built.error)
    why = variants.broken_assertion(built.error) or (large[0] if large else "")
    return f"no legal tile: {why}" if why else ""


def rows_of(found: Sequence[Measured], cublas: timing.Timing) -> list[dict]:
    """The rows of ablation.csv."""
    flop = 2 * SIZE**3
    rows = []

    def add(kernel: str, label: str, time: timing.Timing | None, *rest: object) -> None:
        figures = (None,) * 3
        if time:
            figures = (1e3 * time.median, time.spread, flop / time.median / 1e12)
        values = (kernel, label, *(SIZE,) * 3, *figures, *rest)
        rows.append(dict(zip(COLUMNS, values, strict=True)))

    add("cublas", "cublasSgemm", cublas, None, None, None, "for scale")
    for m in found:
        used = m.resources
        registers, spills = (used.registers, used.spill_bytes) if used else (None, None)
        note = illegal(m.built) or m.failure or m.note or None
        variant = m.built.variant
        add(variant.stage, variant.label, m.time, registers, spills, m.occupancy, note)
    return rows


def markdown(rows: list[dict], env: dict) -> str:
    """ablation.csv for docs/ladder.md."""
    base = {row["kernel"]: row["time_ms"] for row in rows if row["variant"].endswith("as it is")}
    lines = [
        "| variant | time (ms) | TFLOP/s | speed / its stage's | registers | spilled bytes "
        "| occupancy | |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        cells = [row["variant"], *["-"] * 6, row["note"] or ""]
        if (time := row["time_ms"]) is not None:
            own = base.get(row["kernel"])
            occupancy = row["occupancy"]
            cells[1:4] = f"{time:.3f}", f"{row['tflops']:.3g}", f"{own / time:.3f}" if own else "-"
            cells[4:6] = ("-" if row[key] is None else row[key] for key in COLUMNS[8:10])
            cells[6] = report.percent(None if occupancy is None else 100 * occupancy)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", f"M = N = K = {SIZE}. {report.describe(env)}."])


# ---- measuring -----------------------------------------------------------------------------------


def time_cublas(limit: float) -> timing.Timing:
    shape = (SIZE,) * 3
    problem = ladder.Ladder(*shape, "cuda", ladder.input_sets(*shape, "cuda"))
    ladder.require_fp32_baselines("cuda")
    call = problem.call(problem.fp32()["cublasSgemm"])
    time = timing.interleaved({"cublas": call}, "cuda", REPS, period=len(problem.a))["cublas"]
    check.require_below_peak(2 * SIZE**3 / time.median / 1e12, limit / 1e12, "cublasSgemm")
    return time


def measure(built: Sequence[Built]) -> tuple[list[dict], list[str]]:
    """The rows of ablation.csv, and what failed that should not."""
    limit = sweeps.peak()
    cublas = time_cublas(limit)
    found = sweeps.measured(built, SIZE, limit)
    failed = [m for m in found if m.failure and not illegal(m.built)]
    return rows_of(found, cublas), [f"{m.built.variant.label}: {m.failure}" for m in failed]


def resources(built: Sequence[Built]) -> str:
    """What ptxas says of the kernels for exact matrices, a line each."""
    lines = []
    for b in built:
        used = [
            f"{r.arch}: {r.registers} registers, {r.spill_bytes} bytes spilled"
            for r in {r.arch: r for r in b.resources if r.exact}.values()
        ]
        lines.append(f"{b.variant.label:56}  {'; '.join(used) or illegal(b)}")
    return "\n".join(lines)


SWEEP = Sweep("ablation", __doc__, variants_of, resources, measure, markdown, illegal)

if __name__ == "__main__":
    sys.exit(SWEEP.main())
