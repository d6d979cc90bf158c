"""The figures of step overhead: from the moments of steady steps to the rows of the table, and their budgets."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.report import percentile, table
from benchmarks.services.step_trace import SteadySteps

BUDGET_MS_OF_DEPTH = {1: 1.0, 2: 0.3}  # p50 at batch 256
GOAL_MS_OF_DEPTH = {1: 0.5, 2: 0.15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Percentiles in milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """One repeat of one configuration."""

    worker_idle: Spread  # between two executions, at the worker: what is not hidden
    iteration: Spread  # from result to result without the execution, at the scheduler
    answer: Spread  # from the end of an execution to its result at the scheduler
    turn: Spread  # from there to the sending of the next step; negative if that was sent before
    delivery: Spread  # from there to its execution; at depth 2 the wait for the step before is in it
    scheduler_cpu_ms: float  # of an iteration, all threads; mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration. Milliseconds."""

    depth: int
    batch: int
    step_ms: float
    budget_ms: float | None  # for the p50 of worker_idle and of iteration
    goal_ms: float | None
    medians: Overhead  # of the repeats
    repeats: list[Overhead]


def overhead_of(steps: SteadySteps) -> Overhead:
    """Compute the figures of one run."""
    return Overhead(
        worker_idle=spread_of(steps.idle_ns),
        iteration=spread_of(steps.overhead_ns),
        answer=spread_of(steps.answer_ns),
        turn=spread_of(steps.turn_ns),
        delivery=spread_of(steps.delivery_ns),
        scheduler_cpu_ms=round(fmean(steps.cpu_ns) / 1e6, 4),
    )


def spread_of(values_ns: Sequence[int]) -> Spread:
    """Percentiles in milliseconds."""
    p50, p90, p99 = (round(percentile(values_ns, percent) / 1e6, 4) for percent in (50, 90, 99))
    return Spread(p50=p50, p90=p90, p99=p99)


def median_of(repeats: Sequence[Overhead]) -> Overhead:
    """Median of each figure."""

    def spread(name: str) -> Spread:
        spreads: list[Spread] = [getattr(each, name) for each in repeats]
        return Spread(
            p50=median(each.p50 for each in spreads),
            p90=median(each.p90 for each in spreads),
            p99=median(each.p99 for each in spreads),
        )

    return Overhead(
        worker_idle=spread("worker_idle"),
        iteration=spread("iteration"),
        answer=spread("answer"),
        turn=spread("turn"),
        delivery=spread("delivery"),
        scheduler_cpu_ms=median(each.scheduler_cpu_ms for each in repeats),
    )


def row_of(depth: int, batch: int, step_ms: float, repeats: list[Overhead]) -> Row:
    """Make a row of the repeats, their median, and their targets."""
    is_bound = batch == 256
    return Row(
        depth=depth,
        batch=batch,
        step_ms=step_ms,
        budget_ms=BUDGET_MS_OF_DEPTH[depth] if is_bound else None,
        goal_ms=GOAL_MS_OF_DEPTH[depth] if is_bound else None,
        medians=median_of(repeats),
        repeats=repeats,
    )


def print_rows(rows: Sequence[Row]) -> None:
    """Print the table."""
    head = ("depth", "batch", "step ms", "idle p50", "p90", "p99", "iteration p50", "p90", "p99", "cpu ms")
    lines = []
    for row in rows:
        idle, iteration = row.medians.worker_idle, row.medians.iteration
        figures = (idle.p50, idle.p90, idle.p99, iteration.p50, iteration.p90, iteration.p99)
        cells = [f"{value:.3f}" for value in (*figures, row.medians.scheduler_cpu_ms)]
        lines.append((row.depth, row.batch, row.step_ms, *cells))
    print(table(head, lines))
    print("idle: the worker between two executions; iteration: the scheduler from result to result without execution")


def print_verdicts(rows: Sequence[Row]) -> None:
    """Print a sentence for each budget."""
    for row in rows:
        if row.budget_ms is not None:
            worst_ms = max(row.medians.worker_idle.p50, row.medians.iteration.p50)
            verdict = "within" if worst_ms < row.budget_ms else "OVER"
            print(
                f"depth {row.depth}, batch {row.batch}: {worst_ms:.3f} ms is {verdict} the budget of "
                f"{row.budget_ms} ms (goal {row.goal_ms} ms)"
            )


def summary_of(result: dict[str, Any]) -> dict[str, Any]:
    """Summary that the history keeps of a result: p50 of each row, and the delivery. Older results had rows alone."""
    parts = result.get("parts", {"steps": {"rows": result.get("rows", [])}})
    rows = [
        {
            **{key: row[key] for key in ("depth", "batch", "step_ms")},
            "worker_idle_p50": row["medians"]["worker_idle"]["p50"],
            "iteration_p50": row["medians"]["iteration"]["p50"],
            "scheduler_cpu_ms": row["medians"]["scheduler_cpu_ms"],
        }
        for row in parts.get("steps", {}).get("rows", [])
    ]
    delivery = parts.get("delivery", {})
    kept = {key: delivery[key] for key in ("tokens_per_s", "lag", "cpu_us_per_token") if key in delivery}
    return {"rows": rows, **({"delivery": kept} if kept else {})}
