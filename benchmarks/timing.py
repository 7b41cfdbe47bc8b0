"""The one way to time: contenders interleaved, inputs out of cache, median and spread.

A GPU's clock depends on what ran just before, so there each sample is preceded by an untimed run of
the same contender; and the contenders take turns: only ratios within one run are worth anything.
Many launches share a pair of events (as a CUDA graph where they are short), so that neither the
host nor the events are timed.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from check import CheckError

WARM_SECONDS = 0.05
SAMPLE_SECONDS = 0.02
GRAPH_BELOW_SECONDS = 1e-3
MAX_SETS = 4096

#: Student's t: the one-sided 95 % quantiles for 1, 2, 3, ... degrees of freedom.
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)

#: A contender: called with 0, 1, 2, ...; it picks its inputs by that number and launches once.
Call = Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    samples: tuple[float, ...]  # seconds a call

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.samples) - min(self.samples)) / self.median


def interleaved(
    calls: Mapping[str, Call],
    device: str,
    reps: int,
    progress: Callable[[str], None] = lambda name: None,
    period: int = 1,
    warm: float = WARM_SECONDS,
    sample: float | None = None,
) -> dict[str, Timing]:
    """Times each contender `reps` times, in turns. `progress` is told whose turn it is.

    `period` is how many sets of inputs the calls take turns with: a batch uses each as often.
    `warm` is how long a contender runs untimed before each sample on a GPU, in seconds, and
    `sample` how long a sample takes (default: SAMPLE_SECONDS).
    """
    batches = {name: _Batch(call, device, period, sample) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(reps):
        for name, batch in batches.items():
            progress(name)
            seconds = batch.sample(warm)
            if not seconds > 0:
                raise CheckError(f"{name}: {seconds} s is no time; the clock did not see it run")
            samples[name].append(seconds)
    return {name: Timing(tuple(times)) for name, times in samples.items()}


class _Batch:
    """So many calls of a contender that a sample takes `sample` seconds."""

    def __init__(self, call: Call, device: str, period: int, sample: float | None = None):
        self.call, self.device = call, device
        sample = SAMPLE_SECONDS if sample is None else sample
        self.first, self.graph = 0, None
        self.count = 1
        self._seconds()  # loads the module, allocates, wakes the clock
        self.once = self._seconds()
        self.count = max(1, min(1000, round(sample / max(self.once, 1e-7))))
        if device != "cpu" and self.once < GRAPH_BELOW_SECONDS:
            # Every replay is of the same calls: with fewer than a period they stay in cache.
            self.count = period * max(1, round(self.count / period))
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._launch()

    def sample(self, warm: float) -> float:
        deadline = time.perf_counter() + warm
        # A launch of many times the warm-up's length runs warm itself, but for its beginning.
        while self.device != "cpu" and self.once < 5 * warm:
            self._seconds()
            if time.perf_counter() > deadline:
                break
        return self._seconds()

    def _seconds(self) -> float:
        """One batch, in seconds a call."""
        if self.device == "cpu":
            start = time.perf_counter()
            self._run()
            synchronize(self.device)
            return (time.perf_counter() - start) / self.count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._run()
        end.record()
        synchronize(self.device)
        return start.elapsed_time(end) / 1e3 / self.count

    def _run(self) -> None:
        if self.graph is None:
            self._launch()
        else:
            self.graph.replay()

    def _launch(self) -> None:
        for i in range(self.first, self.first + self.count):
            self.call(i)
        self.first += self.count


def upper_bound(ratios: Sequence[float]) -> float:
    """No more than this, with 95 % confidence, is what these samples of a ratio scatter around."""
    if len(ratios) < 2:
        return math.inf
    t = STUDENT[min(len(ratios) - 1, len(STUDENT)) - 1]  # beyond ten a little too wide
    return statistics.mean(ratios) + t * statistics.stdev(ratios) / math.sqrt(len(ratios))


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def cache_bytes(device: str) -> int:
    """The last cache before memory."""
    if device != "cpu":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        known = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (OSError, ValueError):
        known = 0
    return known if known > 0 else 64 << 20


def rotation(set_bytes: int, device: str) -> int:
    """How many sets of inputs to take turns with, for each to be out of cache at its turn.

    At most MAX_SETS: inputs of a few hundred bytes stay in cache.
    """
    return min(MAX_SETS, 1 + -(-2 * cache_bytes(device) // set_bytes))
