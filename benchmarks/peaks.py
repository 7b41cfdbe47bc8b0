"""Measures what the hardware can do: FP32 multiply-adds, and bytes from each kind of memory.

    python benchmarks/peaks.py [--device cpu|cuda] [--save]

A percentage of peak is a percentage of these figures, not of a data sheet's.
"""

import argparse
from dataclasses import dataclass

import report
import timing
import torch

CHAINS = 12  # csrc/peaks.h: kChains


@dataclass(frozen=True)
class Peaks:
    """What was reached, in FLOP/s and bytes/s; None: not measured (the CPU's caches)."""

    ffma: float  # FP32 multiply-adds
    memory: float  # a kernel that reads and writes memory
    l2: float | None = None  # reads that hit the L2 cache
    shared: float | None = None  # reads of shared memory

    def rows(self) -> list[dict]:
        units = {"ffma": "TFLOP/s"}
        return [
            {"what": what, "value": value / 1e12, "unit": units.get(what, "TB/s")}
            for what, value in vars(self).items()
            if value is not None
        ]


def measure(device: str, reps: int = 5) -> Peaks:
    """The best of `reps` samples each: a peak is what was reached, not what is usual."""
    on_gpu = device != "cpu"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 0
    elements = 2048 * processors if on_gpu else 64 * torch.get_num_threads()
    iterations = 20_000 if on_gpu else 200_000
    sink = torch.full((elements,), 1e-3, device=device)
    copied = min(2 << 30 if on_gpu else 256 << 20, report.memory_free(device) // 8)
    source = torch.randn(copied // 4, device=device)
    target = torch.empty_like(source)
    work = {  # what: (its FLOP or bytes, a call that does them)
        "ffma": (
            2 * CHAINS * iterations * elements,
            lambda i: torch.ops.sgemm.ffma_peak(sink.fill_(1e-3), iterations),
        ),
        # A kernel: a copy would be left to a copy engine, which is slower in a CUDA graph.
        "memory": (2 * source.nbytes, lambda i: torch.neg(source, out=target)),
    }
    if on_gpu:
        cached = torch.randn(timing.cache_bytes(device) // 3 // 16 * 4, device=device)
        work["l2"] = (
            100 * cached.nbytes,
            lambda i: torch.ops.sgemm.l2_peak(cached, sink, 100),
        )
        work["shared"] = (
            16 * iterations * elements,
            lambda i: torch.ops.sgemm.shared_peak(sink, iterations),
        )
    timings = timing.interleaved({what: call for what, (_, call) in work.items()}, device, reps)
    return Peaks(**{what: amount / timings[what].best for what, (amount, _) in work.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    report.add_device_argument(parser)
    parser.add_argument("--save", action="store_true", help="write peaks.csv among the results")
    args = parser.parse_args()
    device = report.pick_device(parser, args.device)
    peaks = measure(device)
    for row in peaks.rows():
        print(f"{row['what']:8} {row['value']:8.3f} {row['unit']}")
    if args.save:
        folder = report.results_folder(device)
        report.save(folder, "peaks.csv", peaks.rows(), report.environment(device))


if __name__ == "__main__":
    main()
