"""The ladder, side by side: every stage against cuBLAS and torch.matmul, timed and checked.

    python benchmarks/ladder.py                  M = N = K = 4096 on a GPU, 512 on the CPU
    python benchmarks/ladder.py 1024             M = N = K = 1024
    python benchmarks/ladder.py 8192 4096 2048   M N K
    python benchmarks/ladder.py --reps 10        timing repetitions (default 7)
    python benchmarks/ladder.py 1024 --hot       leaves the inputs in cache

alpha = 1, beta = 0, FP32, random normal data, inputs out of cache. The table goes to stdout,
progress to stderr. rms error is ||C - C64|| / ||C64|| and cw error the largest
|C - C64| / (|A| |B|), against float64; max rel err is the largest difference from cuBLAS (from
torch.matmul on the CPU) over its largest entry. x torch is torch.matmul's time over the row's.
"""

import argparse
import sys

import check
import peaks
import report
import timing
import torch
from tqdm import tqdm

import torch_sgemm

DEFAULT_SIZE = {"cuda": 4096, "cpu": 512}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "size", nargs="*", type=int, metavar="N | M N K", help="default: 4096, on the CPU 512"
    )
    parser.add_argument("--reps", type=int, default=7, help="timing repetitions (default 7)")
    parser.add_argument("--hot", action="store_true", help="leave the inputs in cache")
    report.add_device_argument(parser)
    parser.add_argument("--csv", help="write the rows to this file")
    parser.add_argument("--png", help="draw the rows into this file")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write ladder.csv, ladder.png, peaks.csv, env.json to the results",
    )
    args = parser.parse_args(argv)
    args.device = report.pick_device(parser, args.device)
    if args.reps < 1:
        parser.error(f"--reps must be at least 1, got {args.reps}")
    args.M, args.N, args.K = report.sizes(parser, args.size or [DEFAULT_SIZE[args.device]])
    args.sets = 1 if args.hot else input_sets(args.M, args.N, args.K, args.device)
    needed, free = memory_needed(args.M, args.N, args.K, args.sets), report.memory_free(args.device)
    if needed > free:
        parser.error(
            f"{args.M} x {args.N} x {args.K} takes about {needed / 2**30:.1f} GiB with its float64 "
            f"reference, and {report.device_name(args.device)} has {free / 2**30:.1f} GiB free; "
            "choose a smaller size"
        )
    return args


def input_sets(M: int, N: int, K: int, device: str) -> int:
    return timing.rotation(4 * (M * K + K * N), device)


def fits_in_cache(args: argparse.Namespace) -> bool:
    inputs = args.sets * 4 * (args.M * args.K + args.K * args.N)
    return inputs <= timing.cache_bytes(args.device)


def memory_needed(M: int, N: int, K: int, sets: int) -> int:
    """Bytes for these sets of inputs, two half-precision copies and the float64 reference."""
    inputs = M * K + K * N
    return 8 * sets * inputs + 24 * inputs + 64 * M * N


class Ladder:
    """One problem: its inputs, its exact result, and the contenders."""

    def __init__(self, M: int, N: int, K: int, device: str, sets: int):
        self.M, self.N, self.K, self.device = M, N, K, device
        torch.manual_seed(0)
        self.a = [torch.randn(M, K, device=device) for _ in range(sets)]
        self.b = [torch.randn(K, N, device=device) for _ in range(sets)]
        self.out = torch.empty(M, N, device=device)
        self.exact = check.reference(self.a[0], self.b[0])

    def fp32(self) -> dict:
        """Functions (a, b, out) by name: the references, then the stages."""
        rows = {"torch.matmul": _torch_matmul}
        if self.device != "cpu":
            rows["cublasSgemm"] = lambda a, b, out: torch_sgemm.cublas(a, b, out=out)
        for name, stage in torch_sgemm.STAGES.items():
            rows[name] = lambda a, b, out, stage=stage: stage(a, b, out=out)
        return rows

    def call(self, matmul):
        return _turns(matmul, self.a, self.b, self.out)

    def for_scale(self) -> dict:
        """torch.matmul with tensor cores: (matmul, a, b, out). Not FP32, no equal of the rest."""
        if self.device == "cpu":
            return {}
        rows = {"torch.matmul TF32": (torch_matmul_tf32, self.a, self.b, self.out)}
        for kind, dtype in {"FP16": torch.float16, "BF16": torch.bfloat16}.items():
            a, b = ([t.to(dtype) for t in ts] for ts in (self.a, self.b))
            rows[f"torch.matmul {kind}"] = (_torch_matmul, a, b, self.out.to(dtype))
        return rows

    def result(self, matmul) -> torch.Tensor:
        """From a poisoned out, so that an entry which is not written cannot be right by chance."""
        self.out.fill_(float("nan"))
        matmul(self.a[0], self.b[0], self.out)
        return self.out


def _turns(matmul, a, b, out) -> timing.Call:
    return lambda i: matmul(a[i % len(a)], b[i % len(b)], out)


def _torch_matmul(a, b, out):
    torch.matmul(a, b, out=out)


def torch_matmul_tf32(a, b, out):
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        torch.matmul(a, b, out=out)
    finally:
        settings.fp32_precision = before


def require_fp32_baselines(device: str) -> None:
    check.require_fp32(torch.matmul, device, "torch.matmul")
    if device != "cpu":
        check.require_fp32(torch_sgemm.cublas, device, "cublasSgemm")


def measure(
    ladder: Ladder,
    reps: int,
    progress=lambda name: None,
    limits: peaks.Peaks | None = None,
    warm: float = timing.WARM_SECONDS,
) -> tuple[list[dict], peaks.Peaks]:
    """The rows of ladder.csv, or check.CheckError where one is wrong or cannot be true.

    Without limits the peaks are measured too.
    """
    require_fp32_baselines(ladder.device)
    if limits is None:
        progress("peaks")
        limits = peaks.measure(ladder.device)
    contenders, others = ladder.fp32(), ladder.for_scale()
    reference = "torch.matmul" if ladder.device == "cpu" else "cublasSgemm"
    expected = ladder.result(contenders[reference]).clone()
    found = {}  # name: its columns of errors
    for name, matmul in contenders.items():
        progress(f"check {name}")
        result = ladder.result(matmul)
        errors = check.require(result, ladder.exact, name)
        apart = check.max_relative_difference(result, expected) if name != reference else None
        found[name] = {"rms": errors.rms, "cw": errors.cw, "max_rel_err_cublas": apart}
    del expected
    calls = {name: ladder.call(matmul) for name, matmul in contenders.items()}
    for name, (matmul, a, b, out) in others.items():
        progress(f"check {name}")
        out.fill_(float("nan"))
        matmul(a[0], b[0], out)
        found[name] = {"rms": check.errors(out.float(), ladder.exact).rms}
        check.require_half_precision(found[name]["rms"], name)
        calls[name] = _turns(matmul, a, b, out)
    timings = timing.interleaved(calls, ladder.device, reps, progress, len(ladder.a), warm)
    require_fp32_baselines(ladder.device)

    flop = 2 * ladder.M * ladder.N * ladder.K
    rows = []
    for name, time in timings.items():
        row = dict.fromkeys(report.LADDER_COLUMNS)
        row |= {"M": ladder.M, "N": ladder.N, "K": ladder.K, "kernel": name}
        row |= {
            "time_ms": time.median * 1e3,
            "spread": time.spread,
            "tflops": flop / time.median / 1e12,
        }
        row |= found[name]
        limit = limits.ffma * (1 if name in contenders else check.TENSOR_CORES)
        check.require_below_peak(row["tflops"], limit / 1e12, name)
        if name in contenders:
            row["pct_cublas"] = 100 * timings[reference].median / time.median
            row["pct_peak"] = 100 * flop / time.median / limits.ffma
        rows.append(row)
    return rows, limits


def table(rows: list[dict], device: str) -> str:
    torch_ms = next(row["time_ms"] for row in rows if row["kernel"] == "torch.matmul")
    columns = {  # heading: (width, the row's cell)
        "time (ms)": (10, lambda row: f"{row['time_ms']:.3f}"),
        "spread": (7, lambda row: report.percent(100 * row["spread"])),
        "GFLOP/s": (10, lambda row: f"{1e3 * row['tflops']:.1f}"),
        f"% {report.reference(device)}": (9, lambda row: report.percent(row["pct_cublas"])),
        "% peak": (7, lambda row: report.percent(row["pct_peak"])),
        "x torch": (8, lambda row: f"{torch_ms / row['time_ms']:.3f}"),
        "rms error": (10, lambda row: report.error(row["rms"])),
        "cw error": (9, lambda row: report.error(row["cw"])),
        "max rel err": (12, lambda row: report.error(row["max_rel_err_cublas"])),
    }
    heading = f"  {'kernel':26}" + "".join(f"{name:>{w + 1}}" for name, (w, _) in columns.items())
    lines = [heading, "  " + "-" * (len(heading) - 2)]
    for row in rows:
        cells = "".join(f"{cell(row):>{width + 1}}" for width, cell in columns.values())
        lines.append(f"  {report.title(row['kernel']):26}{cells}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows_to_come = 1 + len(torch_sgemm.STAGES) + (0 if args.device == "cpu" else 4)
    turns = 1 + (1 + args.reps) * rows_to_come
    with tqdm(total=turns, file=sys.stderr, leave=False) as bar:

        def progress(name: str) -> None:
            bar.set_description(f"{name:24}")
            bar.update()

        try:
            ladder = Ladder(args.M, args.N, args.K, args.device, args.sets)
            rows, limits = measure(ladder, args.reps, progress)
        except (check.CheckError, torch.OutOfMemoryError) as error:
            bar.close()
            print(f"ladder.py: {error}", file=sys.stderr)
            return 1
    environment = report.environment(args.device)
    print(
        f"\nM = {args.M}, N = {args.N}, K = {args.K}, alpha = 1, beta = 0, FP32, normal data; "
        f"median of {args.reps} interleaved samples, inputs "
        f"{'in' if fits_in_cache(args) else 'out of'} cache\n"
        f"{report.describe(environment)}\n"
        f"measured peaks: {limits.ffma / 1e12:.2f} TFLOP/s of multiply-adds, "
        f"{limits.memory / 1e12:.3f} TB/s of memory traffic\n"
    )
    print(table(rows, args.device))
    if args.csv:
        report.write_csv(args.csv, rows)
    if args.png:
        report.ladder_picture(rows, environment, args.png)
    if args.save:
        folder = report.results_folder(args.device)
        report.save(folder, "ladder.csv", rows, environment)
        report.save(folder, "peaks.csv", limits.rows(), environment)
        report.ladder_picture(rows, environment, folder / "ladder.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
