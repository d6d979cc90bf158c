"""Time without a leader, and without a token, when a leader with a hot standby is killed or told to end.

    python -m benchmarks.durability.failover_time [--rounds 7] [--requests 1 2000] [--lease-ms 1500] [--output FILE]

Each round has a journal of its own in an embedded Valkey, filled with live requests as a dead scheduler would have
left them; a leader that goes on with these, a standby, a simulated worker, and a client that reads the first of the
requests. Once they all get tokens the leader is killed (-9), or told to end (SIGTERM). What is durable, and when, is
read from the journal itself, from a connection of the benchmark's own.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import uvloop

import quire
from benchmarks.durability.recovery_time import TOKENIZER, write_journal
from benchmarks.page_section import (
    SCHEDULER,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    at_most,
    below,
    grid,
    listed,
    number,
)
from benchmarks.report import RESULTS, table, write_result
from benchmarks.services.processes import Process, describe_valkey, embedded_valkey, free_port, started
from benchmarks.services.simulated_worker import make_engine, make_runner, parse_arguments
from scheduler_svc.journal.journal_entry import decode
from scheduler_svc.journal.open_store import open_tail
from scheduler_svc.journal.store import JOURNAL_START, StoredEntry

MAX_READERS = 16
STEADY_CHUNKS = 100  # of each stream: read before anything is done to the leader
AFTER_CHUNKS = 25  # of each, and read after it
SILENCE_OF = "each stream"  # said in results, since those of before have the times in which all were silent at once
TIME_LIMIT_S = 60.0
SILENCE_BUDGET_LEASES = 1.5
HAND_OVER_BUDGET_S = 0.1
_PAGE = 256  # entries
KILL, TERMINATE = "kill -9", "SIGTERM"


@dataclass(frozen=True, slots=True)
class Round:
    """One failover. The client's figure counts what is computed again; the journal's does not."""

    silence_s: float  # longest time in which one of the streams got no token
    no_leader_s: float  # from the last entry of the old leader to the LeaderStart of the new one, both durable


@dataclass(frozen=True, slots=True)
class Row:
    """Medians and worst of the rounds of one case."""

    how: str
    requests: int
    silence_s: float
    worst_silence_s: float
    no_leader_s: float
    worst_no_leader_s: float
    rounds: tuple[Round, ...]


class Arrivals:
    """Times at which tokens arrived, by reader. Tokens of one step of a stream arrive as one chunk."""

    def __init__(self, num_readers: int) -> None:
        self.times_s: list[list[float]] = [[] for _ in range(num_readers)]
        self._more = asyncio.Event()

    async def read(self, reader: int, client: quire.AsyncClient, request_id: str, position: int) -> None:
        """Reads one request until cancelled."""
        async for _ in client.attach(request_id, position):
            self.add(reader, time.monotonic())

    def add(self, reader: int, time_s: float) -> None:
        self.times_s[reader].append(time_s)
        self._more.set()

    async def until_each(self, number: int) -> None:
        """Wait until every reader has got this many more chunks."""
        wanted = [len(times_s) + number for times_s in self.times_s]
        async with asyncio.timeout(TIME_LIMIT_S):
            while any(len(times_s) < each for times_s, each in zip(self.times_s, wanted, strict=True)):
                self._more.clear()
                await self._more.wait()


class Leaders:
    """Leaders of the journal by time, read from its entries as they become durable."""

    def __init__(self, url: str) -> None:
        self._tail = open_tail(url, deployment="default")
        self._last = JOURNAL_START
        self.last_entry_s = 0.0  # of the leader before the newest
        self.started_s = 0.0  # the newest
        self.has_ended = False  # whether the last entry before it was a LeaderEnd
        self.changed = asyncio.Event()

    async def catch_up(self) -> None:
        """Read the entries that are there."""
        page: Sequence[StoredEntry] = ()
        while not page or len(page) == _PAGE:
            page = await self._tail.read_after(self._last, _PAGE)
            self._last = page[-1].entry_id

    async def follow(self) -> None:
        """Read new entries until cancelled."""
        last, previous_s, is_end = self._last, time.monotonic(), False
        while True:
            page = await self._tail.read_after(last, 1)  # each with a time of its own
            now_s = time.monotonic()
            for stored in page:
                entry = decode(stored)
                if stored.entry_id.epoch > last.epoch:
                    self.last_entry_s, self.started_s, self.has_ended = previous_s, now_s, is_end
                    self.changed.set()
                last, previous_s, is_end = stored.entry_id, now_s, entry.HasField("leader_end")

    async def close(self) -> None:
        await self._tail.close()


def longest_silence(times_s: Sequence[Sequence[float]], since_s: float) -> float:
    """Longest time in which one stream got no token, from `since_s` on. Raises ValueError if one got none after it."""
    return max(_longest_gap(each, since_s) for each in times_s)


def _longest_gap(times_s: Sequence[float], since_s: float) -> float:
    late = [since_s, *(each for each in times_s if each >= since_s)]
    if len(late) == 1:
        raise ValueError("a stream got no token after the leader was taken away")
    return max(later - earlier for earlier, later in itertools.pairwise(late))


async def fail_over(address: str, leader: Process, how: str, url: str, arguments: argparse.Namespace) -> Round:
    """Kill or end the leader while clients read."""
    num_readers = min(MAX_READERS, arguments.requests)
    arrivals, leaders = Arrivals(num_readers), Leaders(url)
    async with quire.AsyncClient(address, connect_timeout_s=TIME_LIMIT_S) as client:
        requests = [f"r{number}" for number in range(1, num_readers + 1)]
        reading = [
            asyncio.create_task(arrivals.read(reader, client, each, arguments.tokens))
            for reader, each in enumerate(requests)
        ]
        await arrivals.until_each(STEADY_CHUNKS)
        await leaders.catch_up()
        watching = asyncio.create_task(leaders.follow())
        began_s = time.monotonic()
        await asyncio.to_thread(leader.close if how == KILL else leader.end)
        async with asyncio.timeout(TIME_LIMIT_S):
            await leaders.changed.wait()
        await arrivals.until_each(AFTER_CHUNKS)
        for task in (*reading, watching):
            task.cancel()
        await asyncio.gather(*reading, watching, return_exceptions=True)
    await leaders.close()
    if leaders.has_ended != (how == TERMINATE):
        raise RuntimeError(f"the old leader's last journal entry is not the one expected after {how}")
    return Round(longest_silence(arrivals.times_s, began_s), leaders.started_s - leaders.last_entry_s)


def measure(how: str, arguments: argparse.Namespace) -> Round:
    """Run one round: fill a journal, start a leader on it and a standby, then kill or end the leader."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    worker_flags = ["--scheduler", ",".join(addresses), "--tokenizer", str(TOKENIZER), "--step-ms", "8"]
    simulated = parse_arguments(worker_flags)
    fingerprint = make_engine(simulated, make_runner(simulated)).description.model.fingerprint
    with ExitStack() as stack:
        url = stack.enter_context(embedded_valkey(arguments.data_dir))
        asyncio.run(write_journal(url, arguments, fingerprint))
        flags = ("--store", url, "--standby", "--lease-ms", str(arguments.lease_ms))
        leader, standby = (started("scheduler_svc", "--listen", each, *flags) for each in addresses)
        leading = stack.enter_context(leader)
        leading.wait_for("leading")
        stack.enter_context(standby).wait_for("leader seen")
        worker = started("benchmarks.services.simulated_worker", *worker_flags)
        stack.enter_context(worker)  # last: it starts to serve the requests of the journal
        return asyncio.run(fail_over(",".join(addresses), leading, how, url, arguments))


def row_of(how: str, requests: int, rounds: Sequence[Round]) -> Row:
    """Make a row of the medians and the worst of all."""
    silences = [each.silence_s for each in rounds]
    gaps = [each.no_leader_s for each in rounds]
    return Row(
        how=how,
        requests=requests,
        silence_s=round(statistics.median(silences), 3),
        worst_silence_s=round(max(silences), 3),
        no_leader_s=round(statistics.median(gaps), 4),
        worst_no_leader_s=round(max(gaps), 4),
        rounds=tuple(rounds),
    )


def main() -> None:
    """Entry point of `python -m benchmarks.durability.failover_time`."""
    parser = argparse.ArgumentParser(prog="failover_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2000], help="live requests in the journal")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="output tokens of each request in the journal")
    parser.add_argument("--lease-ms", type=int, default=1500)
    parser.add_argument("--data-dir", type=Path, help="where Valkey keeps its file; default: in memory")
    parser.add_argument("--output", type=Path, default=RESULTS / "failover_time.json")
    arguments = parser.parse_args()
    uvloop.install()
    measured: dict[tuple[str, int], list[Round]] = {}
    for _ in range(arguments.rounds):
        for case in itertools.product((KILL, TERMINATE), arguments.requests):
            each = measure(case[0], argparse.Namespace(**{**vars(arguments), "requests": case[1]}))
            print(*case, each, flush=True)
            measured.setdefault(case, []).append(each)
    rows = [row_of(*case, rounds) for case, rounds in measured.items()]
    head = [field.name for field in fields(Row) if field.name != "rounds"]
    print(table(head, [[getattr(row, name) for name in head] for row in rows]))
    figures = {
        "lease_ms": arguments.lease_ms,
        "silence_of": SILENCE_OF,
        "prompt_tokens": arguments.prompt,
        "store": describe_valkey(arguments.data_dir),
        "silence_budget_s": SILENCE_BUDGET_LEASES * arguments.lease_ms / 1000,
        "hand_over_budget_s": HAND_OVER_BUDGET_S,
        "rows": [asdict(row) for row in rows],
    }
    write_result(arguments.output, "failover_time", figures)


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["rows"]
    silence_s, hand_over_s = document["silence_budget_s"], document["hand_over_budget_s"]
    killed = [row for row in rows if row["how"] == "kill -9"]
    told = [row for row in rows if row["how"] != "kill -9"]
    headlines = []
    if killed:
        worst_s = max(row["worst_silence_s"] for row in killed)
        medians = listed(f"{row['silence_s']:.2f}" for row in killed)
        figure = f"{medians} s without a token after kill -9, at worst {number(worst_s, 2, silence_s)} s"
        headlines.append(Headline(figure, [at_most(worst_s, silence_s, "s at worst")]))
    if told:
        worst_s = max(row["worst_no_leader_s"] for row in told)
        medians = listed(f"{1000 * row['no_leader_s']:.1f}" for row in told)
        worst_ms, bound_ms = 1000 * worst_s, 1000 * hand_over_s
        figure = f"{medians} ms without a leader after SIGTERM, at worst {number(worst_ms, 1, bound_ms)} ms"
        headlines.append(Headline(figure, [below(worst_ms, bound_ms, "ms at worst")]))
    silence = "without a token of a stream, the longest of all streams"
    if document.get("silence_of") != SILENCE_OF:
        silence = "without a token of any of the streams, so a stream alone may have waited longer"
    head = ("leader", "live requests", "rounds", "silence, s", "worst", "no leader, s", "worst")
    keys = ("silence_s", "worst_silence_s", "no_leader_s", "worst_no_leader_s")
    cells = [(row["how"], row["requests"], len(row["rounds"]), *(row[key] for key in keys)) for row in rows]
    return Section(
        done=(
            "A leader and a hot standby on one store; the leader is killed or told to end while up to 256 requests "
            f"run. *Silence*: the longest time {silence}; *no leader*: between the last entry of the old one and the "
            f"first of the new one. Medians. A lease lasts {document['lease_ms']:,} ms. The store: {document['store']}."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
    )


SECTION = PageSection(
    kinds=("failover_time",),
    title="Failover",
    question="With a hot standby: how long does no token come, when the leader is killed or told to end?",
    command="python -m benchmarks.durability.failover_time",
    measures=SCHEDULER,
    target="≤ 2.25 s of silence after kill -9, < 0.1 s without a leader in a hand-over",
    render=section_of,
)


if __name__ == "__main__":
    main()
