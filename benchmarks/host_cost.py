"""What a call costs the host: ours against torch's, on 64 x 64 matrices, in one run.

    python benchmarks/host_cost.py            prints a table
    python benchmarks/host_cost.py --save     writes host_cost.csv to the results as well

Each figure is the least of several rounds, in which ours and torch's take turns, of the time from
one call to the next while the GPU has room for more work; "graph" is a replay of 20 calls, a call.
"""

import argparse
import sys
import time
from collections.abc import Callable

import report
import torch
import torch.nn.functional as F

import torch_sgemm

SIZE, CALLS, ROUNDS, IN_GRAPH = 64, 500, 9, 20
COLUMNS = ("op", "mode", "ours_us", "torch_us", "ratio", "difference_us")

OPS = {"mm": (torch_sgemm.mm, torch.mm), "linear": (torch_sgemm.linear, F.linear)}


def modes(op: Callable, device: str) -> dict[str, Callable[[], object]]:
    x, w = (torch.randn(SIZE, SIZE, device=device) for _ in range(2))
    xg, wg = (t.clone().requires_grad_() for t in (x, w))
    upstream = torch.ones(SIZE, SIZE, device=device)
    found = {
        "no gradient": lambda: op(x, w),
        "with gradient, forward": lambda: op(xg, wg),
        "forward and backward": lambda: torch.autograd.grad(op(xg, wg), (xg, wg), upstream),
    }
    if device == "cuda":
        op(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(IN_GRAPH):
                op(x, w)
        found["graph"] = graph.replay
    return found


def seconds(call: Callable[[], object], device: str) -> float:
    """Of one call on the host."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    if device == "cuda" and getattr(call, "__name__", "") == "replay":
        torch.cuda.synchronize()  # of which the device's time is what counts
    return (time.perf_counter() - begin) / CALLS


def measure(device: str) -> list[dict]:
    rows = []
    for name, contenders in OPS.items():
        calls = [modes(op, device) for op in contenders]
        for mode in calls[0]:
            times = [[seconds(call[mode], device) for call in calls] for _ in range(ROUNDS)]
            ours, theirs = (1e6 * min(column) for column in zip(*times, strict=True))
            if mode == "graph":
                ours, theirs = ours / IN_GRAPH, theirs / IN_GRAPH
            values = name, mode, ours, theirs, ours / theirs, ours - theirs
            rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def markdown(rows: list[dict], env: dict) -> str:
    """host_cost.csv for the documents."""
    lines = [
        "| op | mode | ours (us) | torch (us) | ours / torch | difference (us) |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        figures = (f"{row[key]:.3g}" for key in COLUMNS[2:])
        lines.append(f"| {' | '.join((row['op'], row['mode'], *figures))} |")
    return "\n".join([*lines, "", f"{SIZE} x {SIZE}. {report.describe(env)}."])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="host_cost.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_device_argument(parser)
    parser.add_argument("--save", action="store_true", help="write host_cost.csv to the results")
    args = parser.parse_args(argv)
    device = report.pick_device(parser, args.device)
    rows = measure(device)
    env = report.environment(device)
    print(markdown(rows, env))
    if args.save:
        report.save(report.results_folder(device), "host_cost.csv", rows, env)
    return 0


if __name__ == "__main__":
    sys.exit(main())
