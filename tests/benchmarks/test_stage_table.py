"""Sums of spans by iteration, the part that no execution hides, and their way through a file."""

from pathlib import Path

from benchmarks.overhead.stage_table import Spans, Stage, stages_of
from benchmarks.services.stage_spans import Span, SpanLog, read_spans, span_cost_ns
from benchmarks.services.step_trace import SchedulerMoments, SteadySteps, WorkerMoments

US = 1000
STEP = 1000 * US  # from step to step; of these the worker executes 800


def steps(num_steps: int) -> SteadySteps:
    """Make steps that execute from 0 to 800 us of each period; the result is taken at 850."""
    worker = [WorkerMoments(n, 4, 4, 4, n * STEP, n * STEP + 800 * US) for n in range(1, num_steps + 1)]
    scheduler = [
        SchedulerMoments(n, n * STEP - 50 * US, n * STEP + 850 * US, 800 * US, 0) for n in range(1, num_steps + 1)
    ]
    return SteadySteps(worker, scheduler)


def spans_of_each_step(num_steps: int, *each: tuple[str, int, int]) -> list[Span]:
    """Stage, and microseconds from the beginning of each step's execution."""
    return [
        Span(stage, n, n * STEP + began * US, n * STEP + ended * US)
        for n in range(1, num_steps + 1)
        for stage, began, ended in each
    ]


def table(scheduler: list[Span], worker: list[Span], cost_ns: int = 0) -> dict[str, Stage]:
    return {stage.name: stage for stage in stages_of(Spans(scheduler, worker, [], cost_ns), steps(6))}


def test_only_what_lies_outside_of_executions_is_not_hidden() -> None:
    # 850 to 900 us: all of it between executions; 950 to 1050: half of it, behind which the next one runs.
    stages = table(spans_of_each_step(6, ("apply", 850, 900), ("schedule", 950, 1050)), [])
    assert (stages["apply"].each.p50, stages["apply"].not_hidden) == (0.05, 0.05)
    assert (stages["schedule"].each.p50, stages["schedule"].not_hidden) == (0.1, 0.05)
    assert stages["execute"].not_hidden == 0


def test_a_way_is_from_the_end_in_one_process_to_the_beginning_in_the_other() -> None:
    scheduler = spans_of_each_step(6, ("apply", 850, 860), ("seal", 900, 910))
    stages = table(scheduler, spans_of_each_step(6, ("open", 940, 950)))
    assert stages["wire out"].each.p50 == 0.03
    assert stages["worker: decode"].each.p50 == 0.01


def test_settling_is_without_the_text_and_the_packing_within_it() -> None:
    each = (
        ("apply", 850, 860),
        ("settle", 1000, 1100),
        ("text", 1010, 1020),
        ("text", 1020, 1030),
        ("pack", 1080, 1100),
    )
    stages = table(spans_of_each_step(6, *each), [], cost_ns=2 * US)
    assert stages["text"].each.p50 == 0.02
    assert stages["settle"].each.p50 == 0.056, "two spans of 2 us lie within its 60"


def test_a_stage_that_comes_several_times_counts_with_their_sum() -> None:
    stages = table(spans_of_each_step(6, ("apply", 850, 860), ("encode", 870, 880), ("seal", 890, 895)), [])
    assert stages["encode the step"].each.p50 == 0.015


def test_spans_are_read_as_they_were_noted(tmp_path: Path) -> None:
    log = SpanLog()
    double = log.timed("double", lambda number: 2 * number, lambda arguments, result: arguments[0] + result)
    assert double(3) == 6
    log.add("other", 7, 10, 20)
    log.write(tmp_path / "spans")
    first, second = read_spans(tmp_path / "spans")
    assert (first.stage, first.step_id) == ("double", 9) and first.began_ns <= first.ended_ns
    assert second == Span("other", 7, 10, 20)
    assert log.spans == [first, second]


async def test_a_span_of_a_coroutine_lasts_until_its_result() -> None:
    log = SpanLog()

    async def answer() -> int:
        log.add("within", 0, 0, 0)
        return 42

    assert await log.timed_wait("wait", answer)() == 42
    assert [span.stage for span in log.spans] == ["within", "wait"]


def test_what_a_span_costs_is_measured() -> None:
    assert 0 < span_cost_ns() < 100_000
