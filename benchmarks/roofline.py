"""Where each stage stands under the roofs: its speed against the FLOP it does for each byte.

    python benchmarks/roofline.py [RESULTS_FOLDER]     default: benchmarks/results/nvidia-h200

Reads ladder.csv (speed), profile.csv (bytes) and peaks.csv (roofs) of a results folder, and writes
roofline.csv and roofline.png into it. It measures nothing, and needs no GPU.

A kernel has one intensity for each level of memory: FLOP for each byte that crosses it. The roof of
a level is its measured bandwidth times the intensity, up to the peak of the multiply-adds.
"""

import argparse
import re
from pathlib import Path

import counters
import report

SECTOR_BYTES = 32
WAVEFRONT_BYTES = 128

#: level: (its peak in peaks.csv, bytes from a kernel's counters)
LEVELS = {
    "HBM": ("memory", lambda v: v["dram_bytes"]),
    "L2": ("l2", lambda v: v["l2_bytes"]),
    "L1 and shared": ("shared", lambda v: WAVEFRONT_BYTES * v["l1_wavefronts"]),
}


def analytic_intensity(stage: str) -> float:
    """FLOP for each byte that the threads of a stage load from global memory, by its source.

    A BM x BN block tile loads BM + BN floats for each k and does 2 BM BN FLOP with them. Without
    shared memory each thread loads for itself: a tile of 1 x 1, 0.25 FLOP per byte.
    """
    source = report.stage_file(stage).read_text()
    bm, bn = 1, 1
    if "__shared__" in source:
        bm, bn = (int(re.search(rf"\b{name} = (\d+)", source)[1]) for name in ("BM", "BN"))
    return 2 * bm * bn / (4 * (bm + bn))


def perfect_intensity(M: int, N: int, K: int) -> float:
    """If every matrix crossed the memory bus once: N / 6 for squares (Chapter 9, §9.1)."""
    return 2 * M * N * K / (4 * (M * K + K * N + M * N))


def rows(folder: Path) -> list[dict]:
    """The rows of roofline.csv."""
    ladder = report.read_csv(folder / "ladder.csv")
    size = ladder[0]["M"]
    speed = {row["kernel"]: row["tflops"] for row in ladder}
    speed["cublas"] = speed["cublasSgemm"]
    measured = counters.by_kernel(report.read_csv(folder / "profile.csv"), size)
    flop = 2 * size**3
    return [
        {
            "kernel": kernel,
            **dict.fromkeys("MNK", size),
            "level": level,
            "flop_per_byte": flop / volume(values),
            "tflops": speed[kernel],
        }
        for kernel, values in measured.items()
        for level, (_, volume) in LEVELS.items()
    ]


def markdown(points: list[dict], profile: list[dict], env: dict) -> str:
    size = points[0]["M"]
    table: dict[str, dict[str, float]] = {}
    for point in points:
        table.setdefault(point["kernel"], {})[point["level"]] = point["flop_per_byte"]
    measured = counters.by_kernel(profile, size)
    lines = [
        "| kernel | loads, by the source | loads, sectors counted | L1 and shared | L2 | HBM |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kernel, levels in table.items():
        source = f"{analytic_intensity(kernel):.2f}" if report.stage_file(kernel) else "-"
        loaded = 2 * size**3 / (SECTOR_BYTES * measured[kernel]["global_load_sectors"])
        cells = [source, f"{loaded:.2f}"]
        cells += [f"{levels[level]:.3g}" for level in ("L1 and shared", "L2", "HBM")]
        lines.append(f"| {report.title(kernel)} | {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            f"FLOP per byte at M = N = K = {size}; with perfect caching it would be N / 6 = "
            f"{perfect_intensity(size, size, size):.0f}. {report.describe(env)}.",
        ]
    )


def clusters(points: list[tuple[float, float]], near: tuple[float, float]) -> list[list[int]]:
    """Points whose labels would hide one another, together; each near to another of its cluster."""
    groups: list[list[int]] = []
    for i, (x, y) in enumerate(points):
        touched = [
            group
            for group in groups
            if any(
                abs(x - points[k][0]) < near[0] and abs(y - points[k][1]) < near[1] for k in group
            )
        ]
        groups = [group for group in groups if group not in touched]
        groups.append([i, *(k for group in touched for k in group)])
    return groups


def _label(axes, points: list[dict], roof: float, gap: float) -> None:
    """Each kernel's name right of its point and below the roof, a cluster's above one another."""
    place = axes.transData + axes.transAxes.inverted()  # what is near is so on the paper
    where = [tuple(place.transform((p["flop_per_byte"], p["tflops"]))) for p in points]
    highest = place.transform((points[0]["flop_per_byte"], roof))[1] - gap
    for group in clusters(where, (0.12, 2 * gap)):
        depths = report.spread([-where[i][1] for i in group], gap, low=-highest)
        right = max(where[i][0] for i in group) + (0.03 if len(group) == 1 else 0.07)
        for i, depth in zip(group, depths, strict=True):
            kernel = points[i]["kernel"]
            axes.annotate(
                kernel.removeprefix("stage"),
                where[i],
                xycoords="axes fraction",
                xytext=(right, -depth),
                va="center",
                fontsize=8,
                color=_colour(kernel),
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                arrowprops={"arrowstyle": "-", "color": _colour(kernel), "linewidth": 0.5}
                | {"relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 2},
            )


def _colour(kernel: str) -> str:
    return "#3b6fb6" if report.stage_file(kernel) else "#4a4a4a"


def picture(points: list[dict], peaks: dict[str, float], env: dict, path: Path) -> None:
    """A panel a level: its roof, and the kernels under it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(LEVELS), figsize=(13, 5.6), sharey=True)
    figure.set_layout_engine("constrained")
    speeds = [point["tflops"] for point in points]
    panels[0].set_yscale("log")
    panels[0].set_ylim(min(speeds) / 2, 1.4 * max(peaks["ffma"], *speeds))
    panels[0].set_ylabel("TFLOP/s, FP32")
    for axes, (level, (peak, _)) in zip(panels, LEVELS.items(), strict=True):
        here = [point for point in points if point["level"] == level]
        ridge = peaks["ffma"] / peaks[peak]
        left = min(ridge, *(p["flop_per_byte"] for p in here)) / 3
        right = max(ridge, *(p["flop_per_byte"] for p in here)) * 4
        roof = [left, ridge, right]
        axes.plot(roof, [min(peaks["ffma"], x * peaks[peak]) for x in roof], color="#9a9a9a")
        axes.set_title(f"{level}: {peaks[peak]:.3g} TB/s", fontsize=10, loc="left")
        axes.set_xscale("log")
        axes.set_xlim(left, right)
        axes.set_xlabel("FLOP per byte")
        axes.spines[["top", "right"]].set_visible(False)
        for point in here:
            colour = _colour(point["kernel"])
            axes.plot(point["flop_per_byte"], point["tflops"], "o", color=colour, markersize=4)
    size = points[0]["M"]
    figure.suptitle(
        f"M = N = K = {size}, {env['gpu']}; numbers are stages; flat: {peaks['ffma']:.3g} TFLOP/s "
        "of multiply-adds",
        fontsize=10,
    )
    figure.draw_without_rendering()  # lays the panels out
    for axes, level in zip(panels, LEVELS, strict=True):
        here = [point for point in points if point["level"] == level]
        _label(axes, here, peaks["ffma"], gap=0.033)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = report.RESULTS / "nvidia-h200"
    parser.add_argument("folder", nargs="?", type=Path, default=default)
    folder = parser.parse_args().folder
    missing = [
        name for name in ("ladder", "profile", "peaks") if not (folder / f"{name}.csv").exists()
    ]
    if missing:
        parser.error(f"{folder} has no {missing[0]}.csv; make gpu-bench writes it")
    points = rows(folder)
    peaks = {row["what"]: row["value"] for row in report.read_csv(folder / "peaks.csv")}
    env = report.read_environment(folder, "profile.csv")
    report.save(folder, "roofline.csv", points, env)
    picture(points, peaks, env, folder / "roofline.png")


if __name__ == "__main__":
    main()
