"""Speed over size: every stage beside cublasSgemm and torch.matmul, M = N = K.

    python benchmarks/sizes.py                          256 to 16384 on a GPU, 64 to 256 on the CPU
    python benchmarks/sizes.py 1000 2000                these sizes
    python benchmarks/sizes.py --kernels stage9 stage10
    python benchmarks/sizes.py --budget 1               skips a stage where a launch takes over 1 s
    python benchmarks/sizes.py --save                   writes sizes.csv and sizes.png

The contenders of a size take turns, with inputs out of cache, and are checked before, as in
ladder.py. A stage is skipped, and that is told, at a size where one launch would take longer than
the budget at the best speed that it has reached at the smaller sizes. The table of TFLOP/s goes to
stdout, progress to stderr.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import check
import ladder
import peaks
import report
import timing
import torch
from tqdm import tqdm

import torch_sgemm

DEFAULT_SIZES = {
    "cuda": (256, 512, 1024, 1536, 2048, 3000, 4095, 4096, 4097, 8192, 16384),
    "cpu": (64, 128, 256),
}
#: A size at which every stage fills the device and none takes long.
PROBE = {"cuda": 2048, "cpu": 64}
BUDGET_SECONDS = 0.25  # a launch
WARM_SECONDS = 0.02  # instead of timing's: there are more than a thousand samples
COLUMNS = (
    *("M", "N", "K", "kernel", "time_ms", "spread", "tflops", "pct_cublas", "pct_peak"),
    *("rms", "cw"),
)
REFERENCES = ("cublasSgemm", "torch.matmul")


class Some(ladder.Ladder):
    """A square problem for some of the stages, and what they are measured against."""

    def __init__(self, size: int, stages: Sequence[str], device: str):
        sets = ladder.input_sets(size, size, size, device)
        super().__init__(size, size, size, device, sets)
        self.stages = stages

    def fp32(self) -> dict:
        every = super().fp32()
        return {name: every[name] for name in every if name in (*REFERENCES, *self.stages)}

    def for_scale(self) -> dict:
        return {}


class Sizes:
    """The rows of sizes.csv, size after size."""

    def __init__(self, args: argparse.Namespace, bar: tqdm):
        self.args, self.bar = args, bar
        self.speeds: dict[str, float] = {}  # a stage's best so far, in FLOP/s
        self.turns = len(args.sizes) * (1 + args.reps)  # of a contender
        references = 2 if args.device != "cpu" else 1
        bar.reset(total=1 + self.turns * (len(args.kernels) + references))

    def progress(self, name: str) -> None:
        self.bar.set_description(f"{name:20}")
        self.bar.update()

    def measure(self) -> Iterator[list[dict]]:
        """The rows of a size, or check.CheckError where one is wrong or cannot be true."""
        device = self.args.device
        self.progress("peaks")
        limits = peaks.measure(device)
        large = [size for size in self.args.sizes if size >= PROBE[device]]
        for size in sorted(self.args.sizes):
            if size == min(large, default=None) != PROBE[device]:
                self.probe(PROBE[device])
            stages = [stage for stage in self.args.kernels if self.affordable(stage, size)]
            problem = Some(size, stages, device)
            found, _ = ladder.measure(
                problem, self.args.reps, lambda n, s=size: self.progress(f"{s} {n}"), limits,
                WARM_SECONDS,
            )  # fmt: skip
            del problem
            if device != "cpu":
                torch.cuda.empty_cache()  # the next size's tensors are larger
            for row in found:
                speed = 1e12 * row["tflops"]
                self.speeds[row["kernel"]] = max(speed, self.speeds.get(row["kernel"], 0))
            yield [{column: row[column] for column in COLUMNS} for row in found]

    def probe(self, size: int) -> None:
        """Speeds that foretell those at the first large size, where only small ones are known."""
        problem = Some(size, self.args.kernels, self.args.device)
        calls = {name: problem.call(matmul) for name, matmul in problem.fp32().items()}
        timings = timing.interleaved(calls, self.args.device, 1, warm=0)
        self.speeds |= {name: 2 * size**3 / time.median for name, time in timings.items()}

    def affordable(self, stage: str, size: int) -> bool:
        if stage not in self.speeds:
            return True
        seconds = 2 * size**3 / self.speeds[stage]
        if seconds <= self.args.budget:
            return True
        self.bar.total -= 1 + self.args.reps
        tqdm.write(
            f"sizes.py: {stage} is skipped at {size}: a launch would take about {seconds:.2g} s, "
            f"and --budget is {self.args.budget:g}",
            file=sys.stderr,
        )
        return False


# ---- tables --------------------------------------------------------------------------------------


def by_kernel(rows: list[dict]) -> dict[str, dict[int, dict]]:
    """kernel -> size -> its row, in the order of the ladder, the references first."""
    names = dict.fromkeys(row["kernel"] for row in rows)
    order = [*REFERENCES, *torch_sgemm.STAGES]
    table = {name: {} for name in sorted(names, key=order.index)}
    for row in rows:
        table[row["kernel"]][row["M"]] = row
    return table


def cells(rows: list[dict], title=report.title) -> list[list[str]]:
    """The table of TFLOP/s, its heading first, and the last stage in % of cuBLAS below."""
    sizes = sorted({row["M"] for row in rows})
    table = by_kernel(rows)
    lines = [["TFLOP/s at M = N = K =", *map(str, sizes)]]
    for name, found in table.items():
        speeds = (found[size]["tflops"] if size in found else None for size in sizes)
        lines.append([title(name), *("-" if s is None else f"{s:.3g}" for s in speeds)])
    stages = [name for name in table if name not in REFERENCES]
    if stages and REFERENCES[0] in table:
        found = table[stages[-1]]
        percents = (found[size]["pct_cublas"] if size in found else None for size in sizes)
        lines.append([f"{stages[-1]}, % of cuBLAS", *map(report.percent, percents)])
    return lines


def text(rows: list[dict]) -> str:
    return "\n".join(report.aligned(cells(rows)))


def markdown(rows: list[dict], env: dict) -> str:
    """sizes.csv for the documents."""
    table = cells(rows)
    missing = any("-" in line[1:] for line in table[1:])
    why = " A dash: too slow to be measured at that size." if missing else ""
    note = f"Inputs out of cache.{why} {report.describe(env)}."
    return "\n".join([*report.markdown_table(table), "", note])


# ---- the picture ---------------------------------------------------------------------------------


def neighbours(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sizes for the axis, and those around one of them that it could not tell apart.

    Of sizes within 1 % of one another the roundest in binary is on the axis.
    """
    groups: list[list[int]] = []
    for size in sorted(sizes):
        if groups and size <= 1.01 * groups[-1][0]:
            groups[-1].append(size)
        else:
            groups.append([size])
    axis = [max(group, key=lambda size: size & -size) for group in groups]
    return axis, max(groups, key=len) if len(groups) < len(sizes) else []


def styles(names: Sequence[str]) -> dict[str, dict]:
    """How each kernel's line looks: the main path from light to dark, side branches dashed."""
    import matplotlib

    main = [name for name in names if name not in REFERENCES and name[-1].isdigit()]
    shades = matplotlib.colormaps["viridis_r"]
    found = {
        "cublasSgemm": {"color": "black", "linewidth": 2.2},
        "torch.matmul": {"color": "#8a8a8a", "linewidth": 1.4},
    }
    for name in names:
        if name in found:
            continue
        trunk = name if name in main else name[:-1]
        place = main.index(trunk) if trunk in main else len(main)
        colour = shades(0.2 + 0.8 * place / max(1, len(main) - 1))
        found[name] = {"color": colour, "linewidth": 1.7}
        if name not in main:
            found[name] |= {"linewidth": 0.9, "linestyle": (0, (4, 2))}
    return found


def picture(rows: list[dict], env: dict, path: Path) -> None:
    """TFLOP/s over size; sizes that lie together on that axis have a panel of their own."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    table = by_kernel(rows)
    axis, around = neighbours(sorted({row["M"] for row in rows}))
    style = styles(list(table))
    top = 1.06 * max(row["tflops"] for row in rows)
    figure, (wide, narrow) = pyplot.subplots(
        1, 2, figsize=(12, 6.2), width_ratios=(1, 0.26 if around else 0.001)
    )
    figure.subplots_adjust(left=0.05, right=0.98, top=0.92, bottom=0.1, wspace=0.4)
    ends = []  # (kernel, the last size on the axis, its TFLOP/s)
    for name, found in table.items():
        shown = [size for size in axis if size in found]
        if shown:
            speeds = [found[size]["tflops"] for size in shown]
            wide.plot(shown, speeds, marker="o", markersize=2.8, **style[name])
            ends.append((name, shown[-1], speeds[-1]))
        if around:
            here = [i for i, size in enumerate(around) if size in found]
            speeds = [found[around[i]]["tflops"] for i in here]
            narrow.plot(here, speeds, marker="o", markersize=3.5, **style[name])
    wide.set_xscale("log", base=2)
    wide.set_xticks(axis, map(str, axis))
    wide.xaxis.set_minor_locator(NullLocator())
    wide.set_xlim(axis[0] / 1.1, axis[-1] * 1.06)
    wide.set_xlabel("M = N = K")
    wide.set_ylabel("TFLOP/s, FP32")
    label(wide, ends, style, top)
    if around:
        names = [str(size) for size in around]
        narrow.set_xticks(range(len(around)), names)
        narrow.set_xlim(-0.3, len(around) - 0.7)
        narrow.set_title(f"around {max(around, key=lambda size: size & -size)}", fontsize=10)
    else:
        narrow.set_visible(False)
    for axes in (wide, narrow):
        axes.set_ylim(0, top)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    wide.set_title(
        f"Speed over size, {env.get('gpu') or env['cpu']}; dashed: side branches",
        fontsize=10,
        loc="left",
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def label(axes, ends: list[tuple[str, int, float]], style: dict, top: float) -> None:
    """The kernels' names on the right, each with a thin line from where its own ends."""
    places = report.spread([speed for _, _, speed in ends], gap=top / 31, low=top / 80)
    right = axes.get_xlim()[1]
    for (name, size, speed), place in zip(ends, places, strict=True):
        colour = style[name]["color"]
        axes.annotate(
            report.title(name),
            (size, speed),
            xytext=(right * 1.12, place),
            va="center",
            fontsize=8.5,
            color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6}
            | {"relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3},
        )


# ---- the command ---------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", type=int, metavar="N", help="M = N = K")
    parser.add_argument(
        "--kernels", nargs="+", metavar="STAGE", help="default: all; cuBLAS and torch are there too"
    )
    parser.add_argument("--reps", type=int, default=7, help="timing repetitions (default 7)")
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_SECONDS,
        metavar="SECONDS",
        help=f"the longest launch of a stage (default {BUDGET_SECONDS})",
    )
    report.add_device_argument(parser)
    parser.add_argument("--csv", help="write the rows to this file")
    parser.add_argument("--png", help="draw them into this file")
    parser.add_argument(
        "--save", action="store_true", help="write sizes.csv and sizes.png to the results"
    )
    args = parser.parse_args(argv)
    args.device = report.pick_device(parser, args.device)
    if args.reps < 1:
        parser.error(f"--reps must be at least 1, got {args.reps}")
    if not args.budget > 0:
        parser.error(f"--budget must be more than 0 seconds, got {args.budget:g}")
    for name in args.kernels or ():
        report.check_kernel(parser, name)
    wanted = args.kernels or torch_sgemm.STAGES
    args.kernels = [name for name in torch_sgemm.STAGES if name in wanted]
    args.sizes = sorted(set(args.sizes or DEFAULT_SIZES[args.device]))
    if args.sizes[0] < 1:
        parser.error(f"sizes must be at least 1, got {args.sizes[0]}")
    for size in args.sizes:
        shape = (size, size, size)
        needed = ladder.memory_needed(*shape, ladder.input_sets(*shape, args.device))
        if needed > (free := report.memory_free(args.device)):
            parser.error(
                f"size {size} takes about {needed / 2**30:.1f} GiB with its float64 reference, and "
                f"{report.device_name(args.device)} has {free / 2**30:.1f} GiB free; leave it out"
            )
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows, failure = [], ""
    with tqdm(file=sys.stderr, leave=False) as bar:
        try:
            for found in Sizes(args, bar).measure():
                rows += found
        except (check.CheckError, torch.OutOfMemoryError) as error:
            failure = str(error)
    environment = report.environment(args.device)
    if rows:
        print(
            f"\nalpha = 1, beta = 0, FP32, normal data; median of {args.reps} interleaved samples\n"
            f"{report.describe(environment)}\n\n{text(rows)}"
        )
    if failure:  # the sizes before it are printed, for they took their time, and not written
        print(f"sizes.py: {failure}", file=sys.stderr)
        return 1
    if args.csv:
        report.write_csv(args.csv, rows)
    if args.png:
        picture(rows, environment, args.png)
    if args.save:
        folder = report.results_folder(args.device)
        report.save(folder, "sizes.csv", rows, environment)
        picture(rows, environment, folder / "sizes.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
