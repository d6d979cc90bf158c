"""The table by stage: what each part of an iteration takes, and how much of that the worker's execution does not hide.

Made from the spans of the three processes and the moments of steady steps. An iteration lasts from one result at the
scheduler to the next. Exact by construction: a span is hidden as far as it lies within an execution.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from benchmarks.overhead.overhead_table import Spread, spread_of
from benchmarks.report import table
from benchmarks.services.stage_spans import Span
from benchmarks.services.step_trace import SteadySteps

Place = Literal["scheduler", "worker", "client", "between"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One row: milliseconds of an iteration."""

    name: str
    place: Place  # whose work it is; "between": on its way, or waiting
    each: Spread
    not_hidden: float  # mean: outside of any execution


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of each process."""

    scheduler: Sequence[Span]
    worker: Sequence[Span]
    client: Sequence[Span]
    cost_ns: int  # of a span, to whoever it lies in


Interval = tuple[int, int]


def stages_of(spans: Spans, steps: SteadySteps) -> list[Stage]:
    """Rows of the table, in the order of an iteration."""
    starts = [step.taken_ns for step in steps.scheduler]
    idle = [(before.ended_ns, after.began_ns) for before, after in pairwise(steps.worker)]
    rows = []
    for name, place, intervals, cost_ns in _parts(spans, steps):
        sums = [0] * (len(starts) - 1)
        not_hidden_ns = 0
        for began_ns, ended_ns in intervals:
            index = bisect_right(starts, began_ns) - 1
            if 0 <= index < len(sums):
                sums[index] += ended_ns - began_ns
                not_hidden_ns += _overlap(idle, began_ns, ended_ns)
        each = spread_of([max(0, total - cost_ns) for total in sums])
        rows.append(Stage(name=name, place=place, each=each, not_hidden=round(not_hidden_ns / len(sums) / 1e6, 4)))
    return rows


def _parts(spans: Spans, steps: SteadySteps) -> Iterator[tuple[str, Place, Sequence[Interval], int]]:
    """Name, place and intervals of each stage, and the cost of the spans within them per iteration."""
    scheduler, worker, client = spans.scheduler, spans.worker, spans.client
    executions = {step.step_id: (step.began_ns, step.ended_ns) for step in steps.worker}
    opened, sealed = _by_step(worker, "open"), _by_step(worker, "seal")
    checked = _by_step(worker, "check")
    text, pack = _of(scheduler, "text"), _of(scheduler, "pack")
    settle = _of(scheduler, "settle")
    text_cost_ns = len(text) * spans.cost_ns // len(_of(scheduler, "apply"))
    made = {step_id: (began_ns, began_ns) for step_id, (began_ns, _) in _by_step(scheduler, "send").items()}
    yield "schedule", "scheduler", _of(scheduler, "schedule"), 0
    yield "encode the step", "scheduler", [*_of(scheduler, "encode"), *_of(scheduler, "seal")], 0
    yield "wire out", "between", _between(_by_step(scheduler, "seal"), opened), 0
    yield "worker: decode", "worker", [*_of(worker, "open"), *_of(worker, "decode")], 0
    yield "worker: wait for its turn", "between", _between(_by_step(worker, "decode"), checked), 0
    yield "worker: fence, apply", "worker", [*checked.values(), *_of(worker, "take over")], 0
    yield "execute", "worker", list(executions.values()), 0
    yield "worker: hand back", "between", _between(executions, sealed), 0
    yield "worker: encode", "worker", [*_of(worker, "encode"), *sealed.values()], 0
    yield "wire back", "between", _between(sealed, _by_step(scheduler, "open")), 0
    yield "decode the result", "scheduler", [*_of(scheduler, "open"), *_of(scheduler, "decode")], 0
    yield "apply", "scheduler", _of(scheduler, "apply"), 0
    yield "note what is scheduled", "scheduler", _of(scheduler, "note"), 0
    yield "fill the prefix cache", "scheduler", _of(scheduler, "offer"), 0
    yield "text", "scheduler", text, 0
    yield "settle", "scheduler", _rest(settle, [*text, *pack]), text_cost_ns
    yield "journal: pack", "scheduler", pack, 0
    yield "journal: XADD, acknowledged", "between", _of(scheduler, "xadd"), 0
    yield "release to readers", "scheduler", _of(scheduler, "release"), 0
    yield "publish: make the response", "scheduler", _of(scheduler, "publish"), 0
    yield "publish: serialise, send", "scheduler", _of(scheduler, "send"), 0
    yield "response to the client", "between", _between(made, _by_step(client, "dispatch")), 0
    yield "SDK: dispatch", "client", _of(client, "dispatch"), 0
    yield "SDK: readers", "client", _of(client, "read"), 0


def print_stages(title: str, stages: Sequence[Stage]) -> None:
    """Print the table, with its sums by place."""
    print(title)
    head = ("stage", "where", "p50", "p90", "p99", "not hidden")
    lines = [
        (each.name, each.place, *(f"{ms:.3f}" for ms in (each.each.p50, each.each.p90, each.each.p99, each.not_hidden)))
        for each in stages
    ]
    print(table(head, lines))


def _of(spans: Sequence[Span], stage: str) -> list[Interval]:
    return [(span.began_ns, span.ended_ns) for span in spans if span.stage == stage]


def _by_step(spans: Sequence[Span], stage: str) -> dict[int, Interval]:
    return {span.step_id: (span.began_ns, span.ended_ns) for span in spans if span.stage == stage}


def _between(before: dict[int, Interval], after: dict[int, Interval]) -> list[Interval]:
    """Intervals from the end of each to the start of the next one in the other process."""
    return [(before[step_id][1], after[step_id][0]) for step_id in before if step_id in after]


def _overlap(sorted_intervals: Sequence[Interval], began_ns: int, ended_ns: int) -> int:
    index = max(0, bisect_right(sorted_intervals, (began_ns, began_ns)) - 1)
    total = 0
    while index < len(sorted_intervals) and sorted_intervals[index][0] < ended_ns:
        total += max(0, min(ended_ns, sorted_intervals[index][1]) - max(began_ns, sorted_intervals[index][0]))
        index += 1
    return total


def _rest(outer: Sequence[Interval], inner: Sequence[Interval]) -> list[Interval]:
    """Parts of the outer intervals outside all inner ones; neither overlap among themselves."""
    rest = []
    ordered = sorted(inner)
    for began_ns, ended_ns in outer:
        index = bisect_right(ordered, (began_ns, began_ns))
        at_ns = began_ns
        while index < len(ordered) and ordered[index][1] <= ended_ns:
            rest.append((at_ns, ordered[index][0]))
            at_ns = ordered[index][1]
            index += 1
        rest.append((at_ns, ended_ns))
    return rest
