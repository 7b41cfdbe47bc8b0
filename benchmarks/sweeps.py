"""What benchmarks of variants share: compile without a GPU, measure without a compiler, save."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import check
import peaks
import report
import torch
import variants
from tqdm import tqdm
from variants import Built, Measured, Variant

REPS = 7


@dataclass(frozen=True)
class Sweep:
    """A benchmark of variants, whose results are NAME.csv and whose script is NAME.py."""

    name: str
    doc: str  # its --help
    variants: Callable[[], Sequence[Variant]]
    resources: Callable[[Sequence[Built]], str]  # what --compile prints
    measure: Callable[[Sequence[Built]], tuple[list[dict], list[str]]]  # rows, and complaints
    markdown: Callable[[list[dict], dict], str]
    expected: Callable[[Built], bool] = lambda built: False  # that a variant does not compile

    def main(self, argv: list[str] | None = None) -> int:
        parser = argparse.ArgumentParser(
            prog=f"{self.name}.py",
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        steps = parser.add_mutually_exclusive_group()
        steps.add_argument("--compile", metavar="DIR", type=Path, help="compile only; needs no GPU")
        steps.add_argument(
            "--measure", metavar="DIR", type=Path, help="measure only; needs no nvcc"
        )
        parser.add_argument(
            "--save", action="store_true", help=f"write {self.name}.csv to the results"
        )
        args = parser.parse_args(argv)
        if args.compile and args.save:
            parser.error("--compile measures nothing that could be saved")
        if not args.compile and not torch.cuda.is_available():
            parser.error("measuring needs a GPU and torch sees none here; --compile DIR needs none")
        try:
            built = self.built(args)
            broken = [b.error for b in built if b.error and not self.expected(b)]
            if args.compile:
                print(self.resources(built))
            if args.compile or broken:
                return self.complain(broken)
            rows, complaints = self.measure(built)
        except (variants.VariantError, check.CheckError) as error:
            return self.complain([str(error)])
        env = report.environment("cuda")
        print(self.markdown(rows, env))
        if args.save:
            report.save(report.results_folder("cuda"), f"{self.name}.csv", rows, env)
        return self.complain(complaints)

    def built(self, args: argparse.Namespace) -> list[Built]:
        wanted = self.variants()
        if args.measure:
            return variants.load(args.measure, wanted)
        folder = args.compile or report.ROOT / "build" / self.name
        with tqdm(total=len(wanted), file=sys.stderr, leave=False, desc="compile") as bar:
            return variants.compile(wanted, folder, progress=lambda label: bar.update())

    def complain(self, complaints: Iterable[str]) -> int:
        """The exit status after these."""
        status = 0
        for text in complaints:
            print(f"{self.name}.py: {text}", file=sys.stderr)
            status = 1
        return status


def measured(built: Sequence[Built], size: int, limit: float, reps: int = REPS) -> list[Measured]:
    """variants.measure() at M = N = K = size, with a progress bar."""
    torch.cuda.empty_cache()  # for the process that measures
    turns = sum(not b.error for b in built) * (2 + reps)
    with tqdm(total=turns, file=sys.stderr, leave=False) as bar:

        def progress(label: str, what: str) -> None:
            bar.set_description(f"{what} {label:40}")
            bar.update()

        return variants.measure(built, (size,) * 3, reps, "cuda", limit, progress)


def measured_pairs(
    built: Sequence[Built], size_of: Callable[[str], int]
) -> list[tuple[Measured, Measured]]:
    """Variants that stand in pairs, each pair interleaved with the others of its stage's size."""
    limit = peak()
    found: list[Measured] = []
    for size in sorted({size_of(b.variant.stage) for b in built}):
        found += measured([b for b in built if size_of(b.variant.stage) == size], size, limit)
    for m in found:
        if m.failure:
            raise variants.VariantError(f"{m.built.variant.label}: {m.failure}")
    return list(zip(found[::2], found[1::2], strict=True))


def peak() -> float:
    """The multiply-adds' measured peak, in FLOP/s: what no variant can beat."""
    return peaks.measure("cuda").ffma
