"""The one way to report: results files, and from them the tables and pictures of the documents.

Results are CSV files under benchmarks/results/<device>/, with env.json beside them. A figure in the
README comes from such a file, never from a keyboard.
"""

import argparse
import csv
import datetime
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

import torch_sgemm
from torch_sgemm import _build_info

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

LADDER_COLUMNS = (
    *("M", "N", "K", "kernel", "time_ms", "spread", "tflops", "pct_cublas", "pct_peak"),
    *("rms", "cw", "max_rel_err_cublas"),
)


#: What can be launched by its name: the stages, and the reference.
KERNELS = {**torch_sgemm.STAGES, "cublas": torch_sgemm.cublas}


# ---- the command line, and the device ------------------------------------------------------------


def sizes(parser: argparse.ArgumentParser, given: list[int]) -> tuple[int, int, int]:
    """M, N, K from `N` or `M N K`."""
    if len(given) not in (1, 3):
        parser.error(
            f"give one size, N, or three, M N K; got {len(given)}: {' '.join(map(str, given))}"
        )
    if min(given) < 1:
        parser.error(f"sizes must be at least 1, got {' '.join(map(str, given))}")
    M, N, K = given if len(given) == 3 else given * 3
    return M, N, K


def check_kernel(parser: argparse.ArgumentParser, name: str) -> None:
    """One of the stages, or cublas."""
    if name not in KERNELS:
        parser.error(f"no kernel is called '{name}'; there are {', '.join(KERNELS)}")


def names(
    parser: argparse.ArgumentParser, option: str, given: str, known: Collection[str]
) -> list[str]:
    """What is given with commas between, each of them known."""
    found = given.split(",")
    for name in found:
        if name not in known:
            parser.error(f"{option}: there is no '{name}'; there are {', '.join(known)}")
    return list(dict.fromkeys(found))


def pattern(parser: argparse.ArgumentParser, option: str, given: str) -> re.Pattern:
    try:
        return re.compile(given)
    except re.error as error:
        parser.error(f"{option}: '{given}' is no regular expression: {error}")


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda if this machine has one, else cpu"
    )


def pick_device(parser: argparse.ArgumentParser, wanted: str | None) -> str:
    if wanted == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return "cpu"
    if _build_info.CUDA:
        return "cuda"
    if wanted == "cuda":
        parser.error(f"--device cuda: this build has no CUDA kernels: {_build_info.NO_CUDA}")
    return "cpu"


def device_name(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    try:
        model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def results_folder(device: str) -> Path:
    name = "cpu" if device == "cpu" else device_name(device)
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment(device: str) -> dict:
    """What a figure depends on besides the kernel. The commit is the one that was built."""
    on_gpu = device != "cpu"
    return {
        "gpu" if on_gpu else "cpu": device_name(device),
        "driver": _driver() if on_gpu else None,
        "cuda": _build_info.CUDA if on_gpu else None,
        "torch": torch.__version__,
        "fp32_precision": torch.backends.cuda.matmul.fp32_precision if on_gpu else None,
        "built_with_torch": _build_info.TORCH,
        "commit": _build_info.COMMIT,
        "dirty": _build_info.DIRTY,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def memory_free(device: str) -> int:
    """Bytes that can be allocated."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    try:
        available = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        available = None
    if available:
        return 1024 * int(available[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip()


def describe(env: dict) -> str:
    commit = (env["commit"] or "no commit")[:10] + ("+changes" if env["dirty"] else "")
    parts = [
        env.get("gpu") or env["cpu"],
        env["driver"] and f"driver {env['driver']}",
        env["cuda"] and f"CUDA {env['cuda']}",
        f"torch {env['torch']}",
        f"commit {commit}",
        env["date"],
    ]
    return ", ".join(part for part in parts if part)


# ---- files ---------------------------------------------------------------------------------------


def write_csv(path: Path, rows: list[dict]) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _cell(value) for key, value in row.items()})


def write_json(path: Path, rows: list[dict]) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


def _cell(value) -> object:
    if isinstance(value, float):
        return int(value) if value.is_integer() else f"{value:.5g}"  # counts are exact
    return "" if value is None else value


def read_csv(path: Path) -> list[dict]:
    """Numbers as numbers, empty cells as None."""
    with Path(path).open(newline="") as file:
        return [{key: _value(cell) for key, cell in row.items()} for row in csv.DictReader(file)]


def _value(cell: str) -> object:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell or None


def save(folder: Path, name: str, rows: list[dict], env: dict) -> None:
    """A file of results, and in env.json beside it what it was measured on."""
    write_csv(folder / name, rows)
    path = folder / "env.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {name: env}, indent=2, sort_keys=True) + "\n")


def read_environment(folder: Path, name: str) -> dict:
    """What a file of results was measured on."""
    return json.loads((folder / "env.json").read_text())[name]


# ---- tables and pictures -------------------------------------------------------------------------


def stage_file(name: str) -> Path | None:
    """stage1b -> csrc/stages/stage01b_....cu; None for what is not a stage."""
    parts = re.fullmatch(r"stage(\d+)(\w?)", name)
    if not parts:
        return None
    return next(ROOT.glob(f"csrc/stages/stage{int(parts[1]):02}{parts[2]}_*.cu"), None)


def title(name: str) -> str:
    """stage1b -> 'stage1b flat block'."""
    file = stage_file(name)
    return f"{name} {file.stem.split('_', 1)[1].replace('_', ' ')}" if file else name


def reference(device: str) -> str:
    """What 100 % is in the column pct_cublas."""
    return "torch" if device == "cpu" else "cuBLAS"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


def error(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first line is its heading: the first column on the left."""
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    put = []
    for first, *others in table:
        right = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        put.append("  ".join(("", f"{first:{widths[0]}}", *right)))
    return [put[0], "  " + "-" * (len(put[0]) - 2), *put[1:]]


def markdown_table(table: Sequence[Sequence[str]]) -> list[str]:
    """The same in Markdown."""
    heading, *lines = (f"| {' | '.join(line)} |" for line in table)
    return [heading, "|---|" + "--:|" * (len(table[0]) - 1), *lines]


def ladder_markdown(rows: list[dict], env: dict) -> str:
    hundred_percent = reference("cpu" if "cpu" in env else "cuda")
    lines = [
        f"| kernel | time (ms) | spread | TFLOP/s | % {hundred_percent} | % peak | x torch "
        "| rms error | cw error |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    torch_ms = next(row["time_ms"] for row in rows if row["kernel"] == "torch.matmul")
    for row in rows:
        file = stage_file(row["kernel"])
        name = f"[{title(row['kernel'])}]({file.relative_to(ROOT)})" if file else row["kernel"]
        lines.append(
            f"| {name} | {row['time_ms']:.3f} | {percent(100 * row['spread'])} "
            f"| {row['tflops']:.3g} | {percent(row['pct_cublas'])} | {percent(row['pct_peak'])} "
            f"| {torch_ms / row['time_ms']:.3g} | {error(row['rms'])} | {error(row['cw'])} |"
        )
    return "\n".join([*lines, "", f"{_size(rows)}. {describe(env)}."])


def ladder_picture(rows: list[dict], env: dict, path: Path) -> None:
    """Bars of TFLOP/s, the stages apart from what they are measured against."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # FP32 only: the tensor cores' bars would dwarf it.
    shown = [row for row in rows if row["pct_cublas"] is not None]
    names = [title(row["kernel"]) for row in shown]
    speeds = [row["tflops"] for row in shown]
    colours = ["#3b6fb6" if stage_file(row["kernel"]) else "#9a9a9a" for row in shown]
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.34 * len(shown)), layout="constrained")
    bars = axes.barh(names, speeds, color=colours)
    axes.bar_label(bars, [f"{speed:.3g}" for speed in speeds], padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, max(speeds) * 1.12)
    axes.set_xlabel("TFLOP/s, FP32")
    axes.set_title(f"{_size(rows)}, {env.get('gpu') or env['cpu']}", fontsize=10, loc="left")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def spread(wanted: list[float], gap: float, low: float = -math.inf) -> list[float]:
    """Places for labels, as near to where they are wanted as they can be `gap` apart above low."""
    runs: list[list[int]] = []  # neighbours that touch; each run is centred where it is wanted

    def bottom(run: list[int]) -> float:
        middle = sum(wanted[i] for i in run) / len(run)
        return max(low, middle - gap * (len(run) - 1) / 2)

    for i in sorted(range(len(wanted)), key=wanted.__getitem__):
        runs.append([i])
        while len(runs) > 1 and bottom(runs[-1]) < bottom(runs[-2]) + gap * len(runs[-2]):
            runs[-2:] = [runs[-2] + runs[-1]]
    places = [0.0] * len(wanted)
    for run in runs:
        for step, i in enumerate(run):
            places[i] = bottom(run) + gap * step
    return places


def claims_markdown(rows: list[dict], env: dict) -> str:
    """What stages 2 and 3 reach of the ceilings that docs/ladder.md counts for them."""
    reached = {row["kernel"]: percent(row["pct_peak"]) for row in rows}
    return (
        f"Measured at {_size(rows)}: stage 2 reaches {reached['stage2']} of the peak that "
        f"`benchmarks/peaks.py` measures, stage 3 {reached['stage3']}. ({describe(env)}.)"
    )


def _size(rows: list[dict]) -> str:
    return "M x N x K = " + " x ".join(str(rows[0][key]) for key in "MNK")


def between_markers(text: str, name: str, content: str) -> str:
    """text with what stands between <!-- name --> and <!-- /name --> replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected one '{begin}' and one '{end}' after it")
    head, rest = text.split(begin)
    return head + begin + "\n" + content + "\n" + end + rest.split(end)[1]
