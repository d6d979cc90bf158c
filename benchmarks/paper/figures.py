"""Figures of the paper: their jobs, and the rows that they return."""

from collections.abc import Collection, Iterator

from benchmarks.paper import block_size_figures, memory_figures, rate_figures, sharing_figures
from benchmarks.paper.jobs import Job, Row, Scale, run_jobs

FIGURES = (
    *("table1", "fig1", "fig2", "fig11", "fig12", "fig13", "fig14", "fig15", "fig16", "fig17", "fig18b"),
    *("fig19a", "fig19b"),
)
_MODULES = (memory_figures, rate_figures, sharing_figures, block_size_figures)


def jobs_of(figures: Collection[str], scale: Scale) -> list[Job]:
    """Jobs in a fixed order, which is that of the rows."""
    return [job for job in _all_jobs(scale) if job.figure in figures]


def rows_of(figures: Collection[str], scale: Scale, num_processes: int) -> dict[str, list[Row]]:
    """Rows by figure; the same for any number of processes."""
    jobs = jobs_of(figures, scale)
    rows = run_jobs(jobs, num_processes)
    return {
        figure: [row for job, row in zip(jobs, rows, strict=True) if job.figure == figure]
        for figure in FIGURES
        if figure in figures
    }


def _all_jobs(scale: Scale) -> Iterator[Job]:
    for module in _MODULES:
        yield from module.jobs(scale)
