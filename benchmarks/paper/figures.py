"""Figures of the paper: their jobs, run side by side, and the rows that they return. Reads no clock."""

import gc
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.paper import block_size_figures, memory_figures, rate_figures, sharing_figures
from benchmarks.paper.jobs import Job, Row, Scale

FIGURES = (
    *("table1", "fig1", "fig2", "fig11", "fig12", "fig13", "fig14", "fig15", "fig16", "fig17", "fig18b"),
    *("fig19a", "fig19b"),
)
_OBJECTS_A_COLLECTION = 200_000  # hardly anything is garbage while a trace is served
_MODULES = (memory_figures, rate_figures, sharing_figures, block_size_figures)


def jobs_of(figures: Collection[str], scale: Scale) -> list[Job]:
    """Jobs in a fixed order, which is that of the rows."""
    return [job for job in _all_jobs(scale) if job.figure in figures]


def rows_of(figures: Collection[str], scale: Scale, num_processes: int) -> dict[str, list[Row]]:
    """Rows by figure; the same for any number of processes."""
    jobs = jobs_of(figures, scale)
    rows = _run_here(jobs) if num_processes == 1 else _run_apart(jobs, num_processes)
    return {
        figure: [row for job, row in zip(jobs, rows, strict=True) if job.figure == figure]
        for figure in FIGURES
        if figure in figures
    }


def _run_here(jobs: list[Job]) -> list[Row]:
    return [job.run() for job in jobs]


def _run_apart(jobs: list[Job], num_processes: int) -> list[Row]:
    with ProcessPoolExecutor(num_processes, get_context("spawn"), gc.set_threshold, (_OBJECTS_A_COLLECTION,)) as pool:
        in_turn = sorted(range(len(jobs)), key=lambda index: not jobs[index].is_long)
        futures = {index: pool.submit(jobs[index].run) for index in in_turn}
        return [futures[index].result() for index in range(len(jobs))]


def _all_jobs(scale: Scale) -> Iterator[Job]:
    for module in _MODULES:
        yield from module.jobs(scale)
