"""Which kernel is fastest, measured; and select's constants, fitted to that.

    python benchmarks/fit_select.py --save    times candidates, writes suites/candidates.csv
    python benchmarks/fit_select.py --fit     the constants that lose least by that file

A candidate is a kernel and the parts of K that it takes. At the shapes of suites/shapes.json and
at random ones (log-uniform sizes) the MOST kernels that are predicted to be fastest are timed by
turns, each with its best parts, inputs out of cache. The constants are fitted to some of the
shapes, by their checksums, and the others are held out. The loss at a shape is the time of the
candidate that select takes over the fastest one's. --fit changes one constant after the other, as
long as the mean loss and the errors of predictions fall, and prints what to write into
csrc/matmul/select.{h,cpp}.
"""

import argparse
import ctypes
import math
import random
import statistics
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import report
import suite
import timing
import torch
from tqdm import tqdm

import torch_sgemm
from torch_sgemm import _library

FILE = Path(__file__).with_name("suites") / "candidates.csv"  # of an H200: to fit to, no result
MOST = 10  # candidates of a shape
LARGEST = 2**39  # multiply-adds
RANDOM = 100  # shapes
WARM_SECONDS, SAMPLE_SECONDS, SAMPLES = 0.002, 0.002, 3
STEPS = (0.5, 0.7, 0.85, 0.93, 1.07, 1.18, 1.4, 2.0)
LEAST_GAIN = 1e-5
NEAR, ERRORS = 1.4, 0.1
HELD_OUT = 4  # of ten
KERNELS = ("128x256", "64x128", "64x64", "32x128", "128x32", "32x32")
RINGS = tuple(
    f"ring{tile}{k}" for tile in ("256x128", "128x128", "128x64", "64x64") for k in ("", "k")
)
CONSTANTS = (
    *("bytes", "launch", "reduction", "per_part", "latency", "fill", "wave", "per_k_tile"),
    *("ring_begin", "ring_end", "panels", "exchanged_store"),
)

_set = ctypes.CDLL(str(_library.LIBRARY)).torch_sgemm_model
_set.restype = ctypes.c_double
_set.argtypes = (ctypes.c_char_p, ctypes.c_double)


def set_constant(name: str, value: float) -> float:
    """Sets a constant of select's, and returns what it was."""
    old = _set(name.encode(), value)
    if math.isnan(old):
        raise ValueError(f"select has no constant '{name}'")
    return old


def get_constant(name: str) -> float:
    value = set_constant(name, 1.0)
    set_constant(name, value)
    return value


# ---- measuring -----------------------------------------------------------------------------------


def random_shapes(count: int, seed: int) -> list[suite.Shape]:
    chance = random.Random(seed)

    def size(low: float, high: float) -> int:
        return round(2 ** chance.uniform(math.log2(low), math.log2(high)))

    found = []
    while len(found) < count:
        M, N, K = size(1, 8192), size(16, 16384), size(16, 8192)
        if chance.random() < 0.7:  # most models' sizes are multiples of something
            N, K = -(-N // 64) * 64, -(-K // 64) * 64
        layout = chance.choice(("nn", "nt", "nt", "tn"))
        shape = suite.Shape("random", f"{M}x{N}x{K}", "mm", layout, 1, M, N, K)
        if shape.work <= LARGEST // 8:
            found.append(shape)
    return found


def call_of(problem: suite.Problem, kernel: str, parts: int) -> timing.Call:
    a, b, sets = problem.a, problem.b, problem.sets
    gemm = torch.ops.sgemm._gemm_by
    return lambda i: gemm(a[i % sets], b[i % sets], None, 0.0, 1.0, kernel, parts)


def set_of(*shape) -> str:
    return "held out" if zlib.crc32(repr(shape).encode()) % 10 < HELD_OUT else "fitted"


def worth_timing(plans: Sequence[torch_sgemm.plan.Plan]) -> list[torch_sgemm.plan.Plan]:
    """The best of each kernel, and of a ring kernel with whole tiles and with shared ones."""
    found = {}
    for plan in plans:
        found.setdefault((plan.kernel, plan.streamed), plan)
    return list(found.values())[:MOST]


def measure(shape: suite.Shape, device: str, samples: int) -> list[dict]:
    problem = suite.Problem(shape, device)
    plans = worth_timing(torch_sgemm.plan.candidates(problem.a[0], problem.b[0]))
    calls = {(p.kernel, p.parts): call_of(problem, p.kernel, p.parts) for p in plans}
    timings = timing.interleaved(
        {str(key): call for key, call in calls.items()},
        *(device, samples, lambda name: None, problem.sets, WARM_SECONDS, SAMPLE_SECONDS),
    )
    what = {name: getattr(shape, name) for name in ("layout", "batch", "M", "N", "K")}
    what = {"set": set_of(*what.values())} | what
    return [
        what | {"kernel": kernel, "parts": parts, "time_us": 1e6 * timings[str(key)].median}
        for key in calls
        for kernel, parts in (key,)
    ]


# ---- the loss ------------------------------------------------------------------------------------


def by_shape(rows: Iterable[dict]) -> dict[tuple, dict[tuple, float]]:
    """{(set, layout, batch, M, N, K): {(kernel, parts): microseconds}}"""
    found: dict[tuple, dict[tuple, float]] = {}
    for r in rows:
        key = tuple(r[name] for name in ("set", "layout", "batch", "M", "N", "K"))
        found.setdefault(key, {})[r["kernel"], r["parts"]] = r["time_us"]
    return found


def meta(layout: str, batch: int, rows: int, columns: int) -> torch.Tensor:
    size = (columns, rows) if layout == "t" else (rows, columns)
    size = size if batch == 1 else (batch, *size)
    t = torch.empty(size, device="meta")
    return t.mT if layout == "t" else t


def judged(key: tuple, times: dict[tuple, float]) -> tuple[float, list[float]]:
    """The loss at a shape, and the logarithms of predicted over measured times of what is NEAR the
    fastest; on an H200, as is assumed."""
    _, layout, batch, M, N, K = key
    plans = torch_sgemm.plan.candidates(meta(layout[0], batch, M, K), meta(layout[1], batch, K, N))
    best = min(plans, key=lambda p: p.seconds)
    least = min(times.values())
    # What was not timed was far from being taken: a model that takes it now is a bad one.
    loss = times.get((best.kernel, best.parts), max(times.values())) / least
    predicted = {(p.kernel, p.parts): 1e6 * p.seconds for p in plans}
    near = (k for k, time in times.items() if time < NEAR * least and k in predicted)
    return loss, [math.log(predicted[k] / times[k]) for k in near]


def losses(shapes: dict[tuple, dict[tuple, float]]) -> dict[tuple, float]:
    return {key: judged(key, times)[0] for key, times in shapes.items()}


def score(shapes: dict[tuple, dict[tuple, float]]) -> float:
    """What fit() minimises: the mean loss, and the errors of predictions, for shapes to come."""
    judgements = [judged(key, times) for key, times in shapes.items()]
    errors = [error**2 for _, some in judgements for error in some]
    loss = statistics.fmean(math.log(loss) for loss, _ in judgements)
    return loss + ERRORS * math.sqrt(statistics.fmean(errors))


def of_set(shapes: dict[tuple, dict[tuple, float]], name: str) -> dict:
    return {key: times for key, times in shapes.items() if key[0] == name}


def fit(shapes: dict[tuple, dict[tuple, float]], progress=lambda text: None) -> dict[str, float]:
    """Constants, one after the other, round after round, until no step is an improvement."""
    names = (*CONSTANTS, *KERNELS, *RINGS)
    values = {name: get_constant(name) for name in names}
    best, before = score(shapes), math.inf
    while best < before - LEAST_GAIN:
        before = best
        for name in names:
            for step in STEPS:
                small = name in KERNELS or name in RINGS  # shares move little
                tried = values[name] * step ** (0.25 if small else 1)
                set_constant(name, tried)
                loss = score(shapes)
                if loss < best - LEAST_GAIN:
                    best, values[name] = loss, tried
                set_constant(name, values[name])
            progress(f"{name}: {best:.4f}")
    return values


# ---- the command ---------------------------------------------------------------------------------


def text(shapes: dict[tuple, dict[tuple, float]]) -> str:
    lines = []
    for name in ("fitted", "held out"):
        found = losses(of_set(shapes, name))
        if not found:
            continue
        mean = statistics.geometric_mean(found.values())
        lines.append(f"{name}: {len(found)} shapes, mean loss {100 * (mean - 1):.1f} %; the worst:")
        for key in sorted(found, key=lambda k: -found[k])[:8]:
            times = shapes[key]
            kernel, parts = min(times, key=times.get)
            _, layout, batch, M, N, K = key
            size = f"{layout} {batch} x {M} x {N} x {K}"
            lines.append(f"  {found[key]:.2f}  {size}: {kernel} / {parts} is best")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write suites/candidates.csv")
    parser.add_argument("--fit", action="store_true", help="fit to the file instead of measuring")
    parser.add_argument("--file", type=Path, default=FILE, help="to fit to")
    parser.add_argument("--seed", type=int, default=1, help="of the random shapes (default 1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="measure no longer")
    parser.add_argument("--count", type=int, default=RANDOM, help="of them (default %(default)s)")
    args = parser.parse_args(argv)
    if args.count < 0:
        parser.error(f"--count must not be negative, got {args.count}")
    if not args.fit and not torch.cuda.is_available():
        parser.error("there is no GPU to time kernels on; --fit needs none")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.fit:
        shapes = by_shape(report.read_csv(args.file))
        print(text(shapes))
        values = fit(of_set(shapes, "fitted"), lambda line: print(line, file=sys.stderr))
        print(text(shapes))
        for name, value in values.items():
            print(f"{name} = {value:.4g}")
        return
    wanted = [s for s in suite.shapes() if s.work <= LARGEST]
    wanted += random_shapes(args.count, args.seed)
    random.Random(args.seed).shuffle(wanted)  # whatever there is time for is a sample
    rows = []
    end = time.monotonic() + args.seconds
    for shape in tqdm(wanted, file=sys.stderr, disable=None):
        if time.monotonic() > end:
            print("the seconds are over, some shapes were not measured", file=sys.stderr)
            break
        rows += measure(shape, "cuda", SAMPLES)
    print(text(by_shape(rows)))
    if args.save:
        report.write_csv(FILE, rows)


if __name__ == "__main__":
    main()
