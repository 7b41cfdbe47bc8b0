"""What Matrix<Edge> costs: each stage as written against itself on raw pointers.

    python benchmarks/matrix_cost.py                 compiles the variants and measures them
    python benchmarks/matrix_cost.py --compile DIR   compiles into DIR only, without a GPU
    python benchmarks/matrix_cost.py --measure DIR   measures what is in DIR, without a compiler
    python benchmarks/matrix_cost.py --save          writes matrix_cost.csv to the results

The raw variant is the stage's own source, in which A, B and C become a bare pointer and an int for
the leading dimension, with 32-bit indices: no edges, no alpha, no beta, no C to be read. It is
right only where the tiles cover the matrices, and is measured there: at 4096, and stages 0 to 3 at
2048. cost is time / raw time - 1; where it is over 3 % that is told on stderr.
"""

import re
import sys
from collections.abc import Sequence

import ladder_diff
import report
import sweeps
import variants
from sweeps import Sweep
from variants import Built, Measured, Variant, VariantError

SIZE, SLOW_SIZE = 4096, 2048
LIMIT = 0.03
COLUMNS = (*("kernel", "M", "N", "K", "time_ms", "raw_ms", "cost", "registers", "raw_registers"),)

#: What a kernel on raw pointers has in place of In and Out, under the names that the stages use.
RAW = """
struct RawIn {
  const float* data;
  int rows, cols, ld;

  __device__ __forceinline__ float load(int row, int col) const { return data[row * ld + col]; }
  __device__ __forceinline__ void load4(float* to, int row, int col) const {
    copy4(to, &data[row * ld + col]);
  }
  __device__ __forceinline__ void copy_async(float* shared, int row, int col) const {
    sgemm::copy_async<sizeof(float)>(shared, &data[row * ld + col]);
  }
  __device__ __forceinline__ void copy4_async(float* shared, int row, int col) const {
    sgemm::copy_async<4 * sizeof(float)>(shared, &data[row * ld + col]);
  }
};

struct RawOut {
  float* data;
  int rows, cols, ld;
  const float* c;  // null, and never read: a stage may say so

  __device__ __forceinline__ void store(int row, int col, float acc) const {
    data[row * ld + col] = acc;
  }
  __device__ __forceinline__ void store4(int row, int col, const float* acc) const {
    copy4(&data[row * ld + col], acc);
  }
};
"""
PARAMETERS = "void kernel(In<E> A, In<E> B, Out<E> C) {\n"
RAW_PARAMETERS = """void kernel(In<E> A_, In<E> B_, Out<E> C_) {
  const RawIn A{A_.data, A_.rows, A_.cols, static_cast<int>(A_.ld)};
  const RawIn B{B_.data, B_.rows, B_.cols, static_cast<int>(B_.ld)};
  RawOut C{C_.data, C_.rows, C_.cols, static_cast<int>(C_.ld), nullptr};
"""


def written(stage: str) -> Variant:
    return Variant(stage, f"{stage} as written")


def raw(stage: str) -> Variant:
    text = variants.stage_file(stage).read_text()
    for name in ("BM", "BN", "BK"):
        tile = int(text[slice(*variants.constants(text)[name])])
        if size_of(stage) % tile:
            raise VariantError(
                f"{stage} on raw pointers has no edges, and its {name} = {tile} does not divide "
                f"{size_of(stage)}"
            )
    namespace = f"namespace sgemm::{stage} {{\n"
    changes = ((namespace, namespace + RAW), (PARAMETERS, RAW_PARAMETERS))
    return Variant(stage, f"{stage} raw", replace=changes)


def size_of(stage: str) -> int:
    """Stages 0 to 3 take their time."""
    return SLOW_SIZE if int(re.match(r"stage(\d+)", stage)[1]) <= 3 else SIZE


def pairs() -> list[Variant]:
    """Each stage beside its raw self, whose turn comes next."""
    stages = [f"stage{number}" for number in ladder_diff.PARENT]
    return [variant(stage) for stage in stages for variant in (written, raw)]


# ---- rows and tables -----------------------------------------------------------------------------


def rows_of(found: Sequence[tuple[Measured, Measured]]) -> list[dict]:
    """The rows of matrix_cost.csv, from pairs of a stage and its raw self."""
    rows = []
    for m, r in found:
        stage = m.built.variant.stage
        if (m.built.variant, r.built.variant) != (written(stage), raw(stage)):
            raise ValueError(f"no pair: {m.built.variant.label}, {r.built.variant.label}")
        registers = (x.resources and x.resources.registers for x in (m, r))
        values = (
            *(stage, *(size_of(stage),) * 3, 1e3 * m.time.median, 1e3 * r.time.median),
            *(m.time.median / r.time.median - 1, *registers),
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def markdown(rows: list[dict], env: dict) -> str:
    """matrix_cost.csv for docs/ladder.md."""
    lines = [
        "| kernel | M = N = K | time (ms) | on raw pointers (ms) | cost | registers "
        "| on raw pointers |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        registers = ("-" if row[key] is None else row[key] for key in COLUMNS[-2:])
        cells = (
            *(report.title(row["kernel"]), row["M"], f"{row['time_ms']:.3f}"),
            *(f"{row['raw_ms']:.3f}", f"{100 * row['cost']:+.1f}%", *registers),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", f"{report.describe(env)}."])


def too_dear(rows: list[dict]) -> list[str]:
    return [
        f"{row['kernel']}: Matrix costs {100 * row['cost']:.1f} % against raw pointers, "
        f"more than {100 * LIMIT:g} %"
        for row in rows
        if not row["cost"] <= LIMIT
    ]


# ---- measuring -----------------------------------------------------------------------------------


def measure(built: Sequence[Built]) -> tuple[list[dict], list[str]]:
    """The rows of matrix_cost.csv; where Matrix costs too much is told."""
    rows = rows_of(sweeps.measured_pairs(built, size_of))
    for text in too_dear(rows):  # a finding, and no failure to measure
        print(f"matrix_cost.py: {text}", file=sys.stderr)
    return rows, []


def registers(built: Sequence[Built]) -> str:
    """By ptxas, of a pair's kernels for exact matrices; the largest where there are two."""
    lines = [f"{'kernel':28}{'arch':>8}{'registers':>11}{'other':>7}"]
    for b, r in zip(built[::2], built[1::2], strict=True):
        for arch in sorted({found.arch for found in b.resources}):
            most = (
                max((x.registers for x in side.resources if x.arch == arch and x.exact), default=0)
                for side in (b, r)
            )
            lines.append("{:28}{:>8}{:>11}{:>7}".format(report.title(b.variant.stage), arch, *most))
    return "\n".join(lines)


SWEEP = Sweep("matrix_cost", __doc__, pairs, registers, measure, markdown)

if __name__ == "__main__":
    sys.exit(SWEEP.main())
