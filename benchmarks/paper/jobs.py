"""A figure is made of jobs, each of which gives one row; jobs depend on nothing but their arguments.

How long the traces are, and how many requests, is their scale. Jobs run side by side; reads no clock.
"""

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from benchmarks.lengths import Dataset

Row = dict[str, Any]  # plain JSON

_OBJECTS_A_COLLECTION = 200_000  # hardly anything is garbage while a trace is served


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Scale of the traces: seconds of arrivals, and requests."""

    duration_s: dict[Dataset, float]  # where a system is held against the paper
    short_s: dict[Dataset, float]  # where figures are only reported
    num_sampled: dict[Dataset, int]  # requests whose blocks are counted: parallel sampling
    num_searched: dict[Dataset, int]  # likewise: beam search
    precision: float  # of rates that are searched for
    finds_usual_rate: bool = True  # of Figs. 18b and 19b; else they are at one near it, as short traces never get there


FULL = Scale(
    duration_s={"sharegpt": 1800, "alpaca": 450},
    short_s={"sharegpt": 900, "alpaca": 200},
    num_sampled={"sharegpt": 150, "alpaca": 2000},
    num_searched={"sharegpt": 30, "alpaca": 200},
    precision=0.02,
)
QUICK = Scale(
    duration_s={"sharegpt": 100, "alpaca": 10},
    short_s={"sharegpt": 60, "alpaca": 6},
    num_sampled={"sharegpt": 20, "alpaca": 100},
    num_searched={"sharegpt": 10, "alpaca": 20},
    precision=0.5,
    finds_usual_rate=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job of one row. `run` can be pickled; long jobs start first."""

    figure: str
    run: Callable[[], Row]
    is_long: bool = False


def run_jobs(jobs: Sequence[Job], num_processes: int) -> list[Row]:
    """Run jobs. The rows are in their order, and the same for any number of processes."""
    if num_processes == 1:
        return [job.run() for job in jobs]
    with ProcessPoolExecutor(num_processes, get_context("spawn"), gc.set_threshold, (_OBJECTS_A_COLLECTION,)) as pool:
        in_turn = sorted(range(len(jobs)), key=lambda index: not jobs[index].is_long)
        futures = {index: pool.submit(jobs[index].run) for index in in_turn}
        return [futures[index].result() for index in range(len(jobs))]
