"""Clock of launches: on a GPU a captured graph between CUDA events; on a CPU one call, to see that it runs.

A graph replays many launches, so that neither the host nor the start of the graph counts. Whoever gives the launches
sees to it that together they touch more memory than the L2 cache holds.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch

Launch = Callable[[], object]
# Launches of a graph: many where one of them takes little longer than a graph needs to start.
SHORT_US, MANY_LAUNCHES, FEW_LAUNCHES = 400.0, 64, 8
WARM_UP_S = 0.05


class Clock(Protocol):
    """Clock that times launches."""

    def launch_us(self, launches: Sequence[Launch]) -> float:
        """Median time of one launch; all launches are alike."""


class CudaClock:
    """Clock of the current CUDA device."""

    def __init__(self, measured_s: float) -> None:
        self._measured_s = measured_s  # of each figure

    def launch_us(self, launches: Sequence[Launch]) -> float:
        for launch in launches:  # compiles what has to be compiled: nothing can be while a graph is captured
            launch()
        torch.cuda.synchronize()
        rough_us = self._elapsed_us(lambda: [launch() for launch in launches]) / len(launches)
        count = MANY_LAUNCHES if rough_us < SHORT_US else FEW_LAUNCHES
        repeated = [*launches] * -(-count // len(launches))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in repeated:
                launch()
        return self._median_us(graph.replay) / len(repeated)

    def _median_us(self, replay: Launch) -> float:
        start = time.monotonic()
        first_us = self._elapsed_us(replay)
        while time.monotonic() - start < WARM_UP_S:
            self._elapsed_us(replay)
        count = max(10, int(self._measured_s * 1e6 / first_us))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            replay()
            event.record()
        events[-1].synchronize()
        times_ms: list[float] = [a.elapsed_time(b) for a, b in pairwise(events)]
        return 1e3 * median(times_ms)

    def _elapsed_us(self, replay: Launch) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        elapsed_ms: float = start.elapsed_time(end)
        return max(0.1, 1e3 * elapsed_ms)


class HostClock:
    """Runs each launch once; its figures mean nothing but that the launches run."""

    def launch_us(self, launches: Sequence[Launch]) -> float:
        start = time.perf_counter()
        for launch in launches:
            launch()
        return max(0.1, (time.perf_counter() - start) / len(launches) * 1e6)
