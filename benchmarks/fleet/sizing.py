"""Sizing of a deployment: how many workers a scheduler serves, from the rows of saturation. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fleet.costs import measured_scheduler
from benchmarks.fleet.plots import kinds_of
from benchmarks.paper.jobs import Row

ENOUGH = 0.95  # of what as many workers give alone: a scheduler with more of them is full


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """One kind of workers, with so many live requests on each."""

    worker: str
    rows: int
    step_ms: float  # that its worker really took alone
    scheduler_ms: float  # CPU time for a step
    num_workers: int  # most workers that one scheduler serves
    tokens_per_s: int  # of one scheduler, when it is full


def sizings(rows: Sequence[Row]) -> list[Sizing]:
    """Sizing for each kind of workers in the rows of saturation."""
    return [_sizing(*kind, [row for row in rows if (row["worker"], row["rows"]) == kind]) for kind in kinds_of(rows)]


def most_workers(rows: Sequence[Row]) -> int:
    """Most workers of one scheduler that give at least `ENOUGH` of what as many give alone. Rows of one kind."""
    (alone,) = [row["tokens_per_s"] for row in rows if row["num_workers"] == 1]
    return max(int(row["num_workers"]) for row in rows if row["tokens_per_s"] >= ENOUGH * alone * row["num_workers"])


def _sizing(worker: str, batch: int, rows: Sequence[Row]) -> Sizing:
    (alone,) = [row for row in rows if row["num_workers"] == 1]
    return Sizing(
        worker=worker,
        rows=batch,
        step_ms=round(1e3 * alone["rows_a_step"] / alone["tokens_per_s"], 2),
        scheduler_ms=round(1e3 * measured_scheduler().of_step(round(alone["rows_a_step"])), 2),
        num_workers=most_workers(rows),
        tokens_per_s=max(row["tokens_per_s"] for row in rows),
    )
