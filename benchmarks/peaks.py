"""Measures what the hardware can do: FP32 multiply-adds, and bytes to and from memory.

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
    ffma: float  # FLOP/s of FP32 multiply-adds
    memory: float  # bytes/s, read and written, of a kernel that does both

    def rows(self) -> list[dict]:
        return [
            {"what": "ffma", "value": self.ffma / 1e12, "unit": "TFLOP/s"},
            {"what": "memory", "value": self.memory / 1e12, "unit": "TB/s"},
        ]


def measure(device: str, reps: int = 5) -> Peaks:
    """The best of `reps` samples each: a peak is what was reached, not what is usual."""
    if device == "cpu":
        elements, iterations, copied = 64 * torch.get_num_threads(), 200_000, 256 << 20
    else:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        elements, iterations, copied = 2048 * processors, 20_000, 2 << 30
    sink = torch.full((elements,), 1e-3, device=device)
    source = torch.randn(copied // 4, device=device)
    target = torch.empty_like(source)
    timings = timing.interleaved(
        {
            "ffma": lambda i: torch.ops.sgemm.ffma_peak(sink.fill_(1e-3), iterations),
            # A kernel: a copy would be left to a copy engine, which is slower in a CUDA graph.
            "memory": lambda i: torch.neg(source, out=target),
        },
        device,
        reps,
    )
    return Peaks(
        ffma=2 * CHAINS * iterations * elements / timings["ffma"].best,
        memory=2 * copied / timings["memory"].best,
    )


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
        report.write_csv(folder / "peaks.csv", peaks.rows())
        report.write_environment(folder, device)


if __name__ == "__main__":
    main()
