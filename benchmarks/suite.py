"""The product ops beside torch's, at the shapes that FP32 is multiplied in.

    python benchmarks/suite.py                           every shape of suites/shapes.json
    python benchmarks/suite.py --precision ieee,auto     these precisions (default ieee)
    python benchmarks/suite.py --suite linear,batched    these suites
    python benchmarks/suite.py --name 'router.* M=1$'    shapes whose name has this in it
    python benchmarks/suite.py --save                    writes suite_<precision>.csv to the results

FP32, random normal data, inputs out of cache. torch.mm, F.linear or torch.bmm (TF32 off, proven
before and after) and each precision take turns at a shape, after all of them were compared with
float64: whole, or where that takes too long in some rows and columns. floor is the time that the
measured peak of multiply-adds allows, or the measured bandwidth if that is longer; x torch is
torch's time over the row's. A row is slower than torch where the upper 95 % bound of its
interleaved ratios is under 0.97. The table goes to stdout, progress to stderr.

Without a GPU (or with --device cpu) only the small shapes run: enough to test with, no more.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import check
import peaks
import report
import timing
import torch
from torch import Tensor
from tqdm import tqdm

import torch_sgemm

SHAPES = Path(__file__).with_name("suites") / "shapes.json"
COLUMNS = (
    *("suite", "name", "op", "layout", "batch", "M", "N", "K", "precision", "time_us", "torch_us"),
    *("speedup", "tflops", "floor_us", "rms", "torch_rms"),
)
REFERENCE = "torch"  # beside the precisions
SLOWER = 0.97
FEWEST_RATIOS = 7  # that a row is called slower by
WORST, BEST = 10, 5

# Shorter than timing's: there are thousands of samples.
WARM_SECONDS = 0.01
SAMPLE_SECONDS = 0.01
CPU_WORK = 2 * 10**7  # multiply-adds
ALIGNMENT = 128  # floats: where an allocation of its own would begin


@dataclass(frozen=True)
class Shape:
    """A matrix product. layout: a letter for A and one for B, t for the view of a transposed."""

    suite: str
    name: str
    op: str
    layout: str
    batch: int
    M: int
    N: int
    K: int

    @property
    def label(self) -> str:
        return f"{self.suite} {self.name}"

    @property
    def work(self) -> int:
        return self.batch * self.M * self.N * self.K

    @property
    def input_bytes(self) -> int:
        return 4 * self.batch * self.K * (self.M + self.N)

    @property
    def output_bytes(self) -> int:
        return 4 * self.batch * self.M * self.N

    def floor(self, limits: peaks.Peaks) -> float:
        """Seconds: what no FP32 multiply-adds and no traffic can be faster than."""
        traffic = self.input_bytes + self.output_bytes
        return max(2 * self.work / limits.ffma, traffic / limits.memory)


def shapes() -> list[Shape]:
    return [Shape(**entry) for entry in json.loads(SHAPES.read_text())["shapes"]]


class Problem:
    """The inputs of a shape, as many sets as keep them out of cache, and its output."""

    def __init__(self, shape: Shape, device: str):
        self.shape = shape
        self.sets = timing.rotation(shape.input_bytes, device)
        torch.manual_seed(0)
        self.a = self._matrices(shape.M, shape.K, shape.layout[0], device)
        self.b = self._matrices(shape.K, shape.N, shape.layout[1], device)
        size = (shape.M, shape.N)
        self.size = (shape.batch, *size) if shape.op == "bmm" else size
        self.out = None if shape.op == "linear" else torch.empty(self.size, device=device)

    def _matrices(self, rows: int, columns: int, layout: str, device: str) -> list[Tensor]:
        size = (columns, rows) if layout == "t" else (rows, columns)
        if self.shape.op == "bmm":
            size = (self.shape.batch, *size)
        count = self.shape.batch * rows * columns
        pitch = -(-count // ALIGNMENT) * ALIGNMENT
        found = [row[:count].view(size) for row in torch.randn(self.sets, pitch, device=device)]
        return [m.mT for m in found] if layout == "t" else found

    def call(self, matmul: Callable) -> timing.Call:
        sets = self.sets
        if self.out is None:
            weights = [b.mT for b in self.b]
            return lambda i: matmul(self.a[i % sets], weights[i % sets])
        return lambda i: matmul(self.a[i % sets], self.b[i % sets], out=self.out)

    def result(self, matmul: Callable) -> Tensor:
        """From poison, so that an entry which is not written cannot be right by chance."""
        if self.out is None:  # torch's allocator gives again what was freed last
            torch.full(self.size, float("nan"), device=self.a[0].device)
            return self.call(matmul)(0)
        self.out.fill_(float("nan"))
        self.call(matmul)(0)
        return self.out


def contenders(op: str, precisions: Iterable[str]) -> dict[str, Callable]:
    """torch's op, and ours of that name in each precision."""
    reference = getattr(torch.nn.functional if op == "linear" else torch, op)
    ours = getattr(torch_sgemm, op)
    return {REFERENCE: reference} | {p: partial(ours, precision=p) for p in precisions}


def require_fp32(device: str, precisions: Iterable[str]) -> None:
    for name, matmul in contenders("mm", precisions).items():
        check.require_fp32(matmul, device, "torch.mm" if name == REFERENCE else f"mm, {name},")


class Suite:
    """The rows of suite_<precision>.csv, shape after shape, and what went wrong."""

    def __init__(
        self,
        wanted: Sequence[Shape],
        precisions: Sequence[str],
        device: str,
        reps: int,
        limits: peaks.Peaks,
        progress: Callable[[str], None] = lambda name: None,
    ):
        self.wanted, self.precisions, self.device, self.reps = wanted, precisions, device, reps
        self.limits, self.progress = limits, progress
        self.rows: list[dict] = []
        self.failures = check.Failures()

    def run(self) -> None:
        """One shape's failure is told, and the others are worth having."""
        for shape in self.wanted:
            with self.failures.noted(shape.label):
                self.rows += self.measure(shape)
                if self.device != "cpu":
                    torch.cuda.empty_cache()
        with self.failures.noted("after the run"):
            require_fp32(self.device, self.precisions)

    def measure(self, shape: Shape) -> list[dict]:
        problem = Problem(shape, self.device)
        refs = check.references(problem.a[0], problem.b[0])
        errors, calls = {}, {}
        for name, matmul in contenders(shape.op, self.precisions).items():
            self.progress(f"check {name}, {shape.label}")
            with self.failures.noted(shape.label):
                allowed = 0.0 if name == REFERENCE else check.PRECISIONS[name].cw
                result = problem.result(matmul)
                errors[name] = check.require_all(result, refs, name, allowed)
                calls[name] = problem.call(matmul)
            result = None  # its memory is needed
        del refs
        if REFERENCE not in calls or len(calls) == 1:
            return []
        timings = timing.interleaved(
            calls,
            self.device,
            self.reps,
            lambda name: self.progress(f"{name}, {shape.label}"),
            problem.sets,
            WARM_SECONDS,
            SAMPLE_SECONDS,
        )
        rows = []
        self.believe(shape, REFERENCE, timings[REFERENCE], 1)
        for name in list(calls)[1:]:
            with self.failures.noted(shape.label):
                self.believe(shape, name, timings[name], check.PRECISIONS[name].peak)
                rows.append(row(shape, name, timings, errors, self.limits))
        return rows

    def believe(self, shape: Shape, name: str, time: timing.Timing, peak: float) -> None:
        """check.CheckError for a time that the device cannot reach."""
        rate = 2 * shape.work / time.median
        check.require_below_peak(rate / 1e12, peak * self.limits.ffma / 1e12, name)
        if self.limits.l2 is not None:  # each byte of the inputs is read at least once
            rate = shape.input_bytes / time.median
            check.require_below_peak(rate / 1e12, self.limits.l2 / 1e12, name, "TB/s")


def row(
    shape: Shape,
    precision: str,
    timings: dict[str, timing.Timing],
    errors: dict[str, check.Errors],
    limits: peaks.Peaks,
) -> dict:
    """A row of the CSV file, and with it what only the table and JSON have."""
    ours, reference = timings[precision], timings[REFERENCE]
    ratios = [b / a for a, b in zip(ours.samples, reference.samples, strict=True)]
    return asdict(shape) | {
        "precision": precision,
        "time_us": 1e6 * ours.median,
        "torch_us": 1e6 * reference.median,
        "speedup": reference.median / ours.median,
        "tflops": 2 * shape.work / ours.median / 1e12,
        "floor_us": 1e6 * shape.floor(limits),
        "rms": errors[precision].rms,
        "torch_rms": errors[REFERENCE].rms,
        "spread": ours.spread,
        "torch_spread": reference.spread,
        "slower": len(ratios) >= FEWEST_RATIOS and timing.upper_bound(ratios) < SLOWER,
    }


def csv_rows(rows: list[dict]) -> list[dict]:
    return [{column: r[column] for column in COLUMNS} for r in rows]


# ---- tables --------------------------------------------------------------------------------------


def groups(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows by suite, and all of them."""
    found: dict[str, list[dict]] = {}
    for r in rows:
        found.setdefault(r["suite"], []).append(r)
    return found | {"all": rows}


def speeds(rows: list[dict]) -> tuple[float, float, float]:
    """x torch: the geometric mean, the worst and the best."""
    speedups = [r["speedup"] for r in rows]
    return statistics.geometric_mean(speedups), min(speedups), max(speedups)


def by_speedup(rows: list[dict]) -> list[dict]:
    return sorted(rows, key=lambda r: r["speedup"])


def of_floor(r: dict) -> str:
    return report.percent(100 * r["floor_us"] / r["time_us"])


def size(r: dict) -> str:
    batch = f"{r['batch']} x " if r["op"] == "bmm" else ""
    return f"{batch}{r['M']} x {r['N']} x {r['K']}"


TABLE = {  # heading: the row's cell
    "shape": lambda r: f"{r['suite']:8}{r['name']}",
    "op": lambda r: f"{r['op']} {r['layout']}",
    "time (us)": lambda r: f"{r['time_us']:.2f}",
    "spread": lambda r: report.percent(100 * r["spread"]),
    "torch (us)": lambda r: f"{r['torch_us']:.2f}",
    "its spread": lambda r: report.percent(100 * r["torch_spread"]),
    "x torch": lambda r: f"{r['speedup']:.3f}",
    "TFLOP/s": lambda r: f"{r['tflops']:.3g}",
    "% floor": of_floor,
    "rms error": lambda r: report.error(r["rms"]),
    "torch's": lambda r: report.error(r["torch_rms"]),
    "": lambda r: "slower" if r["slower"] else "",
}


def text(rows: list[dict], reps: int) -> str:
    """The table of a precision, and what it comes to."""
    put = report.aligned([list(TABLE), *([cell(r) for cell in TABLE.values()] for r in rows)])
    by_speed = [put[2 + rows.index(r)] for r in by_speedup(rows)]
    means = [["geometric mean", "x torch", "worst", "best", "shapes"]]
    for name, group in groups(rows).items():
        means.append([name, *map("{:.3f}".format, speeds(group)), str(len(group))])
    if reps < FEWEST_RATIOS:
        verdict = f"{reps} ratios a row are too few to call one slower; take {FEWEST_RATIOS}"
    else:
        verdict = (
            f"slower than torch (upper 95 % bound of {reps} ratios under {SLOWER}): "
            f"{sum(r['slower'] for r in rows)} of {len(rows)}"
        )
    put += ["", *report.aligned(means), "", "  the worst", *by_speed[:WORST]]
    put += ["", "  the best", *by_speed[::-1][:BEST], "", f"  {verdict}"]
    return "\n".join(line.rstrip() for line in put)


def markdown(rows: list[dict], env: dict) -> str:
    """A suite_<precision>.csv for the documents."""
    means = [["suite", "x torch, geometric mean", "worst", "best", "shapes"]]
    for name, group in groups(rows).items():
        means.append([name, *map("{:.2f}".format, speeds(group)), str(len(group))])
    worst = [["the worst", "op", "size", "time (µs)", "torch (µs)", "x torch", "% floor"]]
    worst[0] += ["rms error", "torch's"]
    for r in by_speedup(rows)[:WORST]:
        figures = [f"{r['time_us']:.1f}", f"{r['torch_us']:.1f}", f"{r['speedup']:.2f}"]
        errors = [report.error(r["rms"]), report.error(r["torch_rms"])]
        what = [f"{r['suite']} {r['name']}", f"{r['op']} {r['layout']}", size(r)]
        worst.append([*what, *figures, of_floor(r), *errors])
    note = f'Precision "{rows[0]["precision"]}", inputs out of cache. {report.describe(env)}.'
    return "\n".join([*report.markdown_table(means), "", *report.markdown_table(worst), "", note])


# ---- the command ---------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--precision", default="ieee", metavar="NAME[,NAME]", help=", ".join(check.PRECISIONS)
    )
    parser.add_argument("--suite", metavar="NAME[,NAME]", help="default: all of them")
    parser.add_argument("--name", metavar="REGEX", help="shapes whose name has this in it")
    parser.add_argument("--reps", type=int, default=7, help="timing repetitions (default 7)")
    report.add_device_argument(parser)
    parser.add_argument("--csv", help="write the rows to this file")
    parser.add_argument("--json", help="write them, with their spreads, to this file")
    parser.add_argument(
        "--save", action="store_true", help="write suite_<precision>.csv to the results"
    )
    args = parser.parse_args(argv)
    args.device = report.pick_device(parser, args.device)
    if args.reps < 1:
        parser.error(f"--reps must be at least 1, got {args.reps}")
    args.precisions = report.names(parser, "--precision", args.precision, check.PRECISIONS)
    known = shapes()
    suites = list(dict.fromkeys(shape.suite for shape in known))
    wanted = report.names(parser, "--suite", args.suite, suites) if args.suite else suites
    pattern = report.pattern(parser, "--name", args.name or "")
    args.shapes = [s for s in known if s.suite in wanted and pattern.search(s.name)]
    if not args.shapes:
        parser.error(f"--name: no shape of {', '.join(wanted)} has '{args.name}' in its name")
    args.too_large = 0
    if args.device == "cpu":
        small = [shape for shape in args.shapes if shape.work <= CPU_WORK]
        args.too_large = len(args.shapes) - len(small)
        args.shapes = small
        if not small:
            parser.error(
                f"--device cpu: all {args.too_large} of these shapes have more than the "
                f"{CPU_WORK:,} multiply-adds that are run on a CPU"
            )
    if args.save and (args.suite or args.name):
        parser.error("--save writes the whole suite: leave out --suite and --name, or take --csv")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    turns = len(args.shapes) * (1 + len(args.precisions)) * (1 + args.reps)
    with tqdm(total=turns, file=sys.stderr, leave=False) as bar:

        def progress(name: str) -> None:
            bar.set_description(f"{name:40}", refresh=False)
            bar.update()

        try:
            require_fp32(args.device, args.precisions)
            limits = peaks.measure(args.device)
            suite = Suite(args.shapes, args.precisions, args.device, args.reps, limits, progress)
            suite.run()
        except check.CheckError as error:
            bar.close()
            print(f"suite.py: {error}", file=sys.stderr)
            return 1
    environment = report.environment(args.device)
    tables = {p: [r for r in suite.rows if r["precision"] == p] for p in args.precisions}
    print(
        f"\nFP32, normal data; median of {args.reps} interleaved samples, inputs out of cache\n"
        f"{report.describe(environment)}\n"
        f"measured peaks: {limits.ffma / 1e12:.2f} TFLOP/s of multiply-adds, "
        f"{limits.memory / 1e12:.3f} TB/s of memory traffic"
    )
    if args.too_large:
        print(f"{args.too_large} shapes are left out: they are too large for a CPU")
    for precision, rows in tables.items():
        if rows:
            print(f"\n{precision}\n\n{text(rows, args.reps)}")
    if args.csv and suite.rows:
        report.write_csv(args.csv, csv_rows(suite.rows))
    if args.json:
        report.write_json(args.json, suite.rows)
    for failure in suite.failures.texts:
        print(f"suite.py: {failure}", file=sys.stderr)
    if args.save:
        if suite.failures.texts:
            print("suite.py: --save wrote nothing, for rows are missing", file=sys.stderr)
        else:
            folder = report.results_folder(args.device)
            for precision, rows in tables.items():
                report.save(folder, f"suite_{precision}.csv", csv_rows(rows), environment)
    return 1 if suite.failures.texts else 0


if __name__ == "__main__":
    sys.exit(main())
