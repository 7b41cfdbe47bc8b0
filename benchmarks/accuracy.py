"""The error of the product ops, beside torch's and the stages', on every kind of data.

    python benchmarks/accuracy.py                        every case, M = N = 2048
    python benchmarks/accuracy.py --precision ieee,auto  these precisions (default ieee)
    python benchmarks/accuracy.py --case 'Inf|NaN'       cases whose name has this in it
    python benchmarks/accuracy.py --size 512             M = N = 512 (default 2048, on the CPU 128)
    python benchmarks/accuracy.py --save                 writes accuracy.csv to the results

rms is ||C - C64|| / ||C64|| and cw the largest |C - C64| / (|A| |B|), against float64, over the
entries that are finite and whose sums cannot overflow; the others are right or wrong by their class
(NaN, Inf, -Inf). The rule: cw is at most (K + 2) 2^-24, and what underflow costs; rms is at most
1.25 times stage0's (more where few entries are so large that they decide it); integers are exact.
"auto" may have a cw of 2^-21 and an rms of 2^-22 anywhere. Where the rule is broken the exit status
is 1, but for torch and its TF32, which stand there for scale. The table goes to stdout, progress to
stderr.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial

import accuracy_cases
import check
import ladder
import report
import suite
import torch
from accuracy_cases import Case
from tqdm import tqdm

import torch_sgemm

DEFAULT_SIZE = {"cuda": 2048, "cpu": 128}
COLUMNS = ("case", "M", "N", "K", "precision", "rms", "cw", "torch_rms", "torch_cw", "ok")
STAGES = ("stage0", "stage10")  # the first, and the last that runs everywhere
REFERENCE, TF32 = "torch", "TF32"
#: The largest rms error, times stage0's on the same data.
WORSE = 1.25
#: An rms error over n entries is known to about 1 / sqrt(n) of itself; so often that is forgiven.
LUCK = 3


def contenders(device: str, precisions: Iterable[str]) -> dict[str, Callable]:
    """matmul(a, b, out=out) by name, torch's first."""
    found = {REFERENCE: torch.mm}
    if device != "cpu":
        found[TF32] = ladder.torch_matmul_tf32
    found |= {name: torch_sgemm.STAGES[name] for name in STAGES}
    return found | {p: partial(torch_sgemm.mm, precision=p) for p in precisions}


def promise(name: str) -> check.Precision:
    """What a contender may do beyond the rule: the stages what "ieee" may."""
    return check.PRECISIONS.get(name, check.PRECISIONS["ieee"])


def complaint(case: Case, name: str, found: dict[str, check.Errors], entries: float) -> str:
    """How a contender breaks the rule, in words, or nothing. entries: carried_by()."""
    errors = found[name]
    if errors.wrong:
        return f"{errors.wrong} of {case.M * case.N} entries are wrong: {errors.example}"
    if case.exact and errors.cw != 0:
        return f"integers are not exact: cw is {errors.cw:.3g}"
    if name not in (REFERENCE, TF32):
        stage0 = found[STAGES[0]].rms
        limit = WORSE * (1 + LUCK / math.sqrt(entries))
        if not errors.rms <= max(limit * stage0, promise(name).rms):
            return (
                f"an rms error of {errors.rms:.3g} is over {limit:.3g} times stage0's {stage0:.3g}"
            )
    return ""


def carried_by(ref: check.Reference) -> float:
    """How many entries of the result, in effect, an rms error is over: those near the largest."""
    exact = ref.exact[ref.exact.float().isfinite()]
    if not exact.any():
        return 1.0
    squares = (exact / exact.abs().max()).square()
    return (squares.sum().square() / squares.square().sum()).item()


def measure(
    case: Case, device: str, precisions: Iterable[str], failures: check.Failures
) -> list[dict]:
    """The case's rows of accuracy.csv; what fails or breaks the rule is put down too."""
    a, b = case.inputs(device)
    ref = check.reference(a, b)
    out = torch.empty(case.M, case.N, device=device)
    entries = carried_by(ref)
    found: dict[str, check.Errors] = {}
    rows = []
    for name, matmul in contenders(device, precisions).items():
        with failures.noted(f"{case.name}, {name}"):
            out.fill_(math.nan)
            matmul(a, b, out=out)
            found[name] = check.errors(out, ref, promise(name).cw)
            broken = complaint(case, name, found, entries)
            if name != REFERENCE:
                row = dict(zip(COLUMNS, (case.name, case.M, case.N, case.K, name), strict=False))
                row |= {"rms": found[name].rms, "cw": found[name].cw}
                row |= {"torch_rms": found[REFERENCE].rms, "torch_cw": found[REFERENCE].cw}
                rows.append(row | {"ok": int(not broken)})
            if broken and name not in (REFERENCE, TF32):
                raise check.CheckError(broken)
    return rows


# ---- tables --------------------------------------------------------------------------------------


def cells(rows: list[dict]) -> list[list[str]]:
    """A line a case: the errors of each contender, torch's last; an asterisk breaks the rule."""
    names = list(dict.fromkeys(row["precision"] for row in rows))
    names.sort(key=lambda name: (name == TF32, name in STAGES))
    by_case: dict[str, dict[str, dict]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["precision"]] = row
    table = [["rms error, cw error", "K", *names, REFERENCE]]
    for case, found in by_case.items():
        any_row = next(iter(found.values()))
        errors = []
        for name in names:
            row = found.get(name)
            errors.append(pair(row["rms"], row["cw"], row["ok"]) if row else "failed")
        errors.append(pair(any_row["torch_rms"], any_row["torch_cw"]))
        table.append([case, str(any_row["K"]), *errors])
    return table


def pair(rms: float, cw: float, ok: int = 1) -> str:
    return f"{rms:.1e}, {cw:.1e}" + ("" if ok else " *")


def text(rows: list[dict]) -> str:
    return "\n".join(report.aligned(cells(rows)))


def markdown(rows: list[dict], env: dict) -> str:
    """accuracy.csv for the documents."""
    side = max(row["M"] for row in rows)
    star = "" if all(row["ok"] for row in rows) else " An asterisk: breaks the rule of FP32."
    note = f"Against float64, M = N = {side} (less at the largest K).{star} {report.describe(env)}."
    return "\n".join([*report.markdown_table(cells(rows)), "", note])


# ---- the command ---------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--precision", default="ieee", metavar="NAME[,NAME]", help=", ".join(check.PRECISIONS)
    )
    parser.add_argument("--case", metavar="REGEX", help="cases whose name has this in it")
    parser.add_argument("--size", type=int, metavar="N", help="default: 2048, on the CPU 128")
    report.add_device_argument(parser)
    parser.add_argument("--csv", help="write the rows to this file")
    parser.add_argument("--save", action="store_true", help="write accuracy.csv to the results")
    args = parser.parse_args(argv)
    args.device = report.pick_device(parser, args.device)
    args.precisions = report.names(parser, "--precision", args.precision, check.PRECISIONS)
    if args.save and (args.case or args.size is not None):
        parser.error("--save writes the whole suite: leave out --case and --size, or take --csv")
    args.size = DEFAULT_SIZE[args.device] if args.size is None else args.size
    if args.size < 16:
        parser.error(f"--size must be at least 16, got {args.size}")
    wanted = report.pattern(parser, "--case", args.case or "")
    args.cases = [c for c in accuracy_cases.cases(args.size) if wanted.search(c.name)]
    if not args.cases:
        parser.error(f"--case: no case has '{args.case}' in its name")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    failures = check.Failures()
    rows: list[dict] = []
    with failures.noted("before the run"):
        suite.require_fp32(args.device, args.precisions)
    for case in tqdm(args.cases, file=sys.stderr, leave=False):
        with failures.noted(case.name):
            rows += measure(case, args.device, args.precisions, failures)
    with failures.noted("after the run"):
        suite.require_fp32(args.device, args.precisions)
    environment = report.environment(args.device)
    if rows:
        print(
            f"\nrms and cw errors against float64\n{report.describe(environment)}\n\n{text(rows)}"
        )
    for failure in failures.texts:
        print(f"accuracy.py: {failure}", file=sys.stderr)
    if args.csv and rows:
        report.write_csv(args.csv, rows)
    if args.save:
        if failures.texts:
            print("accuracy.py: --save wrote nothing, for the rule is broken", file=sys.stderr)
        else:
            report.save(report.results_folder(args.device), "accuracy.csv", rows, environment)
    return 1 if failures.texts else 0


if __name__ == "__main__":
    sys.exit(main())
