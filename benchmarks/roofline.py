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


def _clusters(points: list[dict]) -> list[list[dict]]:
    """Points that would hide one another's names, together."""
    groups: list[list[dict]] = []
    for point in sorted(points, key=lambda p: -p["tflops"]):
        for group in groups:
            near = (
                max(point[key], group[0][key]) / min(point[key], group[0][key]) < limit
                for key, limit in (("flop_per_byte", 2.2), ("tflops", 1.18))
            )
            if all(near):
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


def picture(points: list[dict], peaks: dict[str, float], env: dict, path: Path) -> None:
    """A panel a level: its roof, and the kernels under it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(LEVELS), figsize=(13, 4.6), sharey=True)
    figure.set_layout_engine("constrained")
    for axes, (level, (peak, _)) in zip(panels, LEVELS.items(), strict=True):
        here = [point for point in points if point["level"] == level]
        ridge = peaks["ffma"] / peaks[peak]
        left = min(ridge, *(p["flop_per_byte"] for p in here)) / 3
        right = max(ridge, *(p["flop_per_byte"] for p in here)) * 3
        roof = [left, ridge, right]
        axes.plot(roof, [min(peaks["ffma"], x * peaks[peak]) for x in roof], color="#9a9a9a")
        axes.set_title(f"{level}: {peaks[peak]:.3g} TB/s", fontsize=10, loc="left")
        for group in _clusters(here):
            x, y = group[0]["flop_per_byte"], group[0]["tflops"]
            names = ", ".join(point["kernel"] for point in group)
            colour = "#3b6fb6" if report.stage_file(group[0]["kernel"]) else "#4a4a4a"
            for point in group:
                axes.plot(point["flop_per_byte"], point["tflops"], "o", color=colour, markersize=5)
            axes.annotate(
                names, (x, y), xytext=(7, -3), textcoords="offset points", fontsize=8, color=colour
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("FLOP per byte")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("TFLOP/s, FP32")
    size = points[0]["M"]
    figure.suptitle(
        f"M = N = K = {size}, {env['gpu']}; flat: {peaks['ffma']:.3g} TFLOP/s of multiply-adds",
        fontsize=10,
    )
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
