"""The bottleneck moves: hardware counters of every stage, read by ncu.

    python benchmarks/counters.py                    every stage and cuBLAS at 4096, and at 128
    python benchmarks/counters.py stage2 stage3      these
    python benchmarks/counters.py --sizes 1024       at this size (M = N = K)
    python benchmarks/counters.py --save             writes profile.csv to the results

The large size shows where a kernel's time goes; the small one is where the CPU executor counts the
same requests and sectors (tests/test_sanitize.py compares them). Not called profile.py: that would
hide Python's own module of this name from everything that is run beside it.
"""

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import report

_L1 = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
_COPY = "smsp__sass_l1tex_t_{}_pipe_lsu_mem_global_op_ldgsts.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

#: What is asked of ncu, by the name it has in profile.csv.
METRICS = {
    "time": "gpu__time_duration.sum",
    "global_load_requests": _L1.format("requests", "ld"),
    "global_load_sectors": _L1.format("sectors", "ld"),
    # Of these loads, those by cp.async.
    "global_copy_requests": _COPY.format("requests"),
    "global_copy_sectors": _COPY.format("sectors"),
    "global_store_requests": _L1.format("requests", "st"),
    "global_store_sectors": _L1.format("sectors", "st"),
    "shared_loads": "smsp__sass_inst_executed_op_shared_ld.sum",
    "shared_stores": "smsp__sass_inst_executed_op_shared_st.sum",
    "shared_load_wavefronts": _WAVEFRONTS.format("ld"),
    "shared_store_wavefronts": _WAVEFRONTS.format("st"),
    "shared_load_conflicts": _CONFLICTS.format("ld"),
    "shared_store_conflicts": _CONFLICTS.format("st"),
    "multiply_adds": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "l1_wavefronts": "l1tex__data_pipe_lsu_wavefronts.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "dram_bytes": "dram__bytes.sum",
    "l1_pct": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "fma_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "threads_per_instruction": "smsp__thread_inst_executed_per_inst_executed.ratio",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_static",
}
#: Why warps wait, in warps per issue slot used: the largest two are shown.
STALLS = (
    *("long_scoreboard", "short_scoreboard", "mio_throttle", "lg_throttle", "barrier"),
    *("math_pipe_throttle", "wait", "not_selected", "dispatch_stall", "no_instruction"),
)
METRICS |= {f"stall_{reason}": _STALL.format(reason) for reason in STALLS}

NCU_SECONDS = 540

OURS = re.compile(r"\b(stage\w+)::kernel\b")


class CountersError(Exception):
    """ncu is missing, or did not count what was asked for; the text says why."""


@dataclass(frozen=True)
class Launch:
    """What ncu counted of one launch."""

    kernel: str  # as ncu names it: void stage2::kernel<0>(...)
    values: dict[str, float]  # by ncu's names
    units: dict[str, str]


def ncu(program: Sequence[str], kernels: str, metrics: Sequence[str]) -> list[Launch]:
    """Runs a Python program (script and arguments) and counts the launches of kernels, in order.

    `kernels` is a regular expression for a kernel's name without namespaces and arguments.
    """
    if shutil.which("ncu") is None:
        raise CountersError("ncu was not found: install Nsight Compute, or put it on PATH")
    command = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none"]
    command += ["--kernel-name", f"regex:{kernels}", "--metrics", ",".join(metrics)]
    command += [sys.executable, *program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NCU_SECONDS)
    except subprocess.TimeoutExpired:
        raise CountersError(f"ncu took more than {NCU_SECONDS} s") from None
    if done.returncode != 0 or '"ID","' not in done.stdout:
        said = done.stdout.strip().split("\n")[-5:] + done.stderr.strip().split("\n")[-5:]
        raise CountersError("ncu failed: " + "\n".join(said))
    launches = parse(done.stdout)
    for launch in launches:
        if missing := [metric for metric in metrics if metric not in launch.values]:
            raise CountersError(f"ncu did not count {', '.join(missing)} of {launch.kernel}")
    return launches


def parse(output: str) -> list[Launch]:
    """ncu's CSV: one line for each launch and metric, after what the program printed."""
    launches: dict[int, Launch] = {}
    for line in csv.DictReader(io.StringIO(output[output.index('"ID","') :])):
        launch = launches.setdefault(int(line["ID"]), Launch(line["Kernel Name"], {}, {}))
        launch.values[line["Metric Name"]] = float(line["Metric Value"].replace(",", ""))
        launch.units[line["Metric Name"]] = line["Metric Unit"]
    return [launches[number] for number in sorted(launches)]


def measure(kernels: Sequence[str], size: int) -> list[dict]:
    """The rows of profile.csv for one launch of each kernel."""
    script = str(Path(__file__).with_name("one.py"))
    # Ours are all called kernel; what cuBLAS launches has gemm in its name.
    program = [script, *kernels, str(size)]
    return rows_of(ncu(program, "^kernel$|gemm", list(METRICS.values())), size)


def rows_of(launches: Sequence[Launch], size: int) -> list[dict]:
    rows: dict[tuple[str, str], dict] = {}
    for launch in launches:
        ours = OURS.search(launch.kernel)
        kernel = ours[1] if ours else "cublas"
        for name, metric in METRICS.items():
            if metric not in launch.values:
                continue
            row = {"kernel": kernel, "M": size, "N": size, "K": size, "metric": name}
            row |= {"unit": launch.units[metric], "value": launch.values[metric]}
            seen = rows.setdefault((kernel, name), row)
            if seen is not row and metric.endswith(".sum"):
                seen["value"] += row["value"]  # cuBLAS may launch two: its totals add up
    return list(rows.values())


def by_kernel(rows: list[dict], size: int) -> dict[str, dict[str, float]]:
    """kernel -> metric -> value, at one size."""
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["M"] == row["N"] == row["K"] == size:
            table[row["kernel"]][row["metric"]] = row["value"]
    return dict(table)


def top_stalls(values: dict[str, float], count: int = 2) -> str:
    waits = {name[6:]: value for name, value in values.items() if name.startswith("stall_")}
    largest = sorted(waits, key=waits.get, reverse=True)[:count]
    return ", ".join(f"{name.replace('_', ' ')} {waits[name]:.1f}" for name in largest)


def _ratio(values: dict[str, float], above: str, below: str) -> str:
    return f"{values[above] / values[below]:.3g}" if values.get(below) else "-"


def _per_multiply_add(values: dict[str, float], instructions: str) -> float:
    return 32 * values[instructions] / values["multiply_adds"]


#: heading: a cell from a kernel's values.
COLUMNS = {
    "TFLOP/s": lambda v: f"{2 * v['multiply_adds'] / v['time'] / 1e3:.3g}",  # time in ns
    "sectors / load": lambda v: _ratio(v, "global_load_sectors", "global_load_requests"),
    "sectors / store": lambda v: _ratio(v, "global_store_sectors", "global_store_requests"),
    "global loads / FMA": lambda v: f"{_per_multiply_add(v, 'global_load_requests'):.3f}",
    "shared loads / FMA": lambda v: f"{_per_multiply_add(v, 'shared_loads'):.3f}",
    "wavefronts / shared load": lambda v: _ratio(v, "shared_load_wavefronts", "shared_loads"),
    "wavefronts / shared store": lambda v: _ratio(v, "shared_store_wavefronts", "shared_stores"),
    "L1 %": lambda v: f"{v['l1_pct']:.0f}",
    "L2 %": lambda v: f"{v['l2_pct']:.0f}",
    "DRAM %": lambda v: f"{v['dram_pct']:.0f}",
    "issue slots %": lambda v: f"{v['issue_pct']:.0f}",
    "FMA pipe %": lambda v: f"{v['fma_pct']:.0f}",
    "lanes": lambda v: f"{v['threads_per_instruction']:.0f}",
    "warps wait for": top_stalls,
    "registers": lambda v: f"{v['registers']:.0f}",
    "occupancy %": lambda v: f"{v['occupancy_pct']:.0f}",
}


def markdown(rows: list[dict], size: int, env: dict) -> str:
    lines = ["| kernel | " + " | ".join(COLUMNS) + " |", "|---|" + "--:|" * len(COLUMNS)]
    for kernel, values in by_kernel(rows, size).items():
        cells = " | ".join(cell(values) for cell in COLUMNS.values())
        lines.append(f"| {report.title(kernel)} | {cells} |")
    return "\n".join([*lines, "", f"M = N = K = {size}. {report.describe(env)}."])


def text(rows: list[dict], size: int) -> str:
    """Transposed: a terminal has more lines than columns."""
    table = by_kernel(rows, size)
    width = max(18, *(len(top_stalls(values)) + 2 for values in table.values()))
    lines = [f"M = N = K = {size}", " " * 26 + "".join(f"{kernel:>{width}}" for kernel in table)]
    for heading, cell in COLUMNS.items():
        lines.append(
            f"{heading:26}" + "".join(f"{cell(values):>{width}}" for values in table.values())
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(report.KERNELS)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=names)
    parser.add_argument("--sizes", nargs="+", type=int, default=[4096, 128], metavar="N")
    parser.add_argument("--save", action="store_true", help="write profile.csv to the results")
    args = parser.parse_args()
    for kernel in args.kernels:
        report.check_kernel(parser, kernel)
    if min(args.sizes) < 1:
        parser.error(f"sizes must be at least 1, got {' '.join(map(str, args.sizes))}")
    device = report.pick_device(parser, None)
    if device == "cpu":
        parser.error("hardware counters need a GPU and a build with CUDA; there is none here")
    rows = []
    for size in args.sizes:
        try:
            found = measure(args.kernels or list(report.KERNELS), size)
        except CountersError as error:
            sys.exit(f"counters.py: {error}")
        print(text(found, size), end="\n\n")
        rows += found
    if args.save:
        folder = report.results_folder(device)
        report.save(folder, "profile.csv", rows, report.environment(device))


if __name__ == "__main__":
    main()
