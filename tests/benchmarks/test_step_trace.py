"""Figures derived from the moments of steps, on made-up moments."""

from pathlib import Path

import pytest

from benchmarks.report import percentile, table
from benchmarks.services.step_trace import (
    NotSteadyError,
    SchedulerMoments,
    StepTrace,
    WorkerMoments,
    read_trace,
    steady_steps,
)


def worker_step(step_id: int, num_rows: int, num_tokens: int | None = None) -> WorkerMoments:
    """Executed for 800 of every 1000 ns."""
    began_ns = 1000 * step_id
    return WorkerMoments(
        step_id, num_rows, num_rows if num_tokens is None else num_tokens, num_rows, began_ns, began_ns + 800
    )


def scheduler_step(step_id: int) -> SchedulerMoments:
    """Sent 100 ns before its execution; its result is there 50 ns behind it."""
    began_ns = 1000 * step_id
    return SchedulerMoments(step_id, began_ns - 100, began_ns + 850, 790, 30 * step_id)


def test_figures_of_steady_steps_follow_from_both_sides() -> None:
    worker = [worker_step(step_id, 4) for step_id in range(1, 21)]
    scheduler = [scheduler_step(step_id) for step_id in range(1, 21)]
    steps = steady_steps(worker, scheduler, batch=4, warm_up=5, num_steps=10)
    assert [step.step_id for step in steps.worker] == list(range(6, 16))
    assert set(steps.idle_ns) == {200}
    assert set(steps.overhead_ns) == {1000 - 790}
    assert set(steps.answer_ns) == {50}
    assert set(steps.turn_ns) == {50}
    assert set(steps.delivery_ns) == {100}
    assert set(steps.cpu_ns) == {30}
    assert len(steps.idle_ns) == len(steps) - 1


def test_the_longest_run_of_pure_decode_steps_is_taken() -> None:
    prompt, one_fewer = (4, 19), (3, 3)
    kinds = [(4, 4)] * 3 + [prompt] + [(4, 4)] * 6 + [one_fewer] + [(4, 4)] * 2
    worker = [worker_step(step_id, rows, tokens) for step_id, (rows, tokens) in enumerate(kinds, start=1)]
    scheduler = [scheduler_step(step_id) for step_id in range(1, len(kinds) + 1)]
    steps = steady_steps(worker, scheduler, batch=4, warm_up=1, num_steps=5)
    assert [step.step_id for step in steps.worker] == [6, 7, 8, 9, 10]
    with pytest.raises(NotSteadyError, match="only 6 consecutive steps had 4 rows of one token"):
        steady_steps(worker, scheduler, batch=4, warm_up=2, num_steps=5)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = StepTrace[WorkerMoments]()
    steps = [worker_step(1, 256), worker_step(2, 1, 2048)]
    for step in steps:
        trace.add(step)
    trace.write(tmp_path / "trace")
    assert read_trace(WorkerMoments, tmp_path / "trace") == steps


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (75, 3), (76, 4), (100, 4), (1, 1)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(percent: float, value: int) -> None:
    assert percentile([4, 1, 3, 2], percent) == value


def test_a_table_stands_flush_right() -> None:
    assert table(("a", "long"), [(100, 2)]) == "  a  long\n100     2"
