"""Throughput of one shard with two workers, and of several with two each: what schedulers that lead at once give.

Real schedulers, clients and store, and workers that only simulate a step of 8 ms. Both sides run in turn, round after
round, with the same number of sequences on each worker. All processes share the machine's cores, so the share that they
use is told beside each ratio: where it comes near to all of them, the ratio says nothing of schedulers. Prints a table
and writes JSON; takes about five minutes.

    python -m benchmarks.scale.shard_throughput [--shards 3] [--batches N ...] [--rounds N] [--seconds S]
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from redis import Redis

from benchmarks.page_section import SCHEDULER, Document, Headline, PageSection, Section, at_least, grid
from benchmarks.report import RESULTS, ROOT, table, write_result
from benchmarks.services.processes import describe_valkey, embedded_valkey, started
from benchmarks.services.steady_load import MAX_TOKENS, RETRIES, prompts
from benchmarks.services.traced_services import TOKENIZER, VOCAB_SIZE
from quire import AsyncClient

BATCHES = (8, 32, 64)  # sequences on each worker
WORKERS_EACH = 2  # of a shard
NUM_CLIENTS = 8
STEP_MS = 8.0
PROMPT_TOKENS = 32
NUM_BLOCKS = 8192
TARGET = 2.8  # for three shards
SETTLE_S = 3.0  # until all requests decode
CORES_ARE_OF = ("schedulers", "workers", "store", "clients")  # said in results: older ones are without the store
FULL_SHARE = 0.9  # of the cores, from which on they are the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One side in one round."""

    tokens_per_s: float
    cores: float  # that all processes used
    scheduler_us: float  # CPU of all schedulers for a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Both sides at one batch: medians over the rounds, and the ratio of each round."""

    batch: int
    one: Rate
    several: Rate
    ratios: list[float]


class Side:
    """One side's processes, which stay for all rounds."""

    def __init__(self, num_shards: int, store: str, stack: ExitStack) -> None:
        self.num_shards = num_shards
        self.num_workers = WORKERS_EACH * num_shards
        self._store = stack.enter_context(Redis.from_url(store))
        flags = ("--listen", "127.0.0.1:0", "--store", store, "--log-format", "json")
        several = ("--deployment", f"of-{num_shards}", "--shards", str(num_shards))
        self.schedulers = [stack.enter_context(started("scheduler_svc", *flags, *several)) for _ in range(num_shards)]
        self.address = ",".join(each.wait_for("listening")["address"] for each in self.schedulers)
        cost = ("--step-ms", str(STEP_MS), "--num-blocks", str(NUM_BLOCKS), "--tokenizer", str(TOKENIZER))
        self.workers = [
            stack.enter_context(
                started(
                    "benchmarks.services.simulated_worker",
                    "--scheduler",
                    self.address,
                    "--worker-id",
                    f"w{number}",
                    *cost,
                )
            )
            for number in range(self.num_workers)
        ]

    async def until_even(self) -> None:
        """Return when each shard has its workers."""
        async with AsyncClient(self.address, retries=RETRIES, connect_timeout_s=30.0) as client:
            await client.wait_ready(60.0)
            while True:
                shards = await client.shards()
                if [each.num_workers for each in shards] == [WORKERS_EACH] * self.num_shards or (
                    self.num_shards == 1 and len((await client.stats()).workers) == self.num_workers
                ):
                    return
                await asyncio.sleep(0.2)

    def cpu_s(self) -> tuple[float, float]:
        """CPU time of the schedulers, and of schedulers, workers and the store together."""
        of_schedulers = sum(each.cpu_s() for each in self.schedulers)
        of_workers = sum(each.cpu_s() for each in self.workers)
        return of_schedulers, of_schedulers + of_workers + store_cpu_s(self._store)

    def rate(self, batch: int, seconds: float) -> Rate:
        """Load every worker with `batch` sequences, and count for so long."""
        each = batch * self.num_workers // NUM_CLIENTS
        command = [sys.executable, "-m", __spec__.name, "--client", self.address, str(each)]
        clients = [
            subprocess.Popen([*command, str(seconds)], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(NUM_CLIENTS)
        ]
        time.sleep(SETTLE_S)
        before, began_s = self.cpu_s(), time.monotonic()
        answers = [json.loads(client.communicate()[0]) for client in clients]
        took_s, after = time.monotonic() - began_s, self.cpu_s()
        tokens_per_s = sum(answer["tokens_per_s"] for answer in answers)
        num_tokens = tokens_per_s * took_s
        client_cores = sum(answer["cpu_s"] / answer["lived_s"] for answer in answers)
        return Rate(
            tokens_per_s=round(tokens_per_s, 1),
            cores=round((after[1] - before[1]) / took_s + client_cores, 2),
            scheduler_us=round((after[0] - before[0]) / num_tokens * 1e6, 2),
        )


def store_cpu_s(store: Redis) -> float:
    """CPU time of the store's process so far, and of those that it has started."""
    used: dict[str, float] = store.info("cpu")
    return sum(used[f"used_cpu_{each}"] for each in ("user", "sys", "user_children", "sys_children"))


def measure(num_shards: int, batches: Sequence[int], rounds: int, seconds: float) -> list[Row]:
    """Measure both sides in turn."""
    with ExitStack() as stack:
        store = stack.enter_context(embedded_valkey(None))
        sides = [Side(1, store, stack), Side(num_shards, store, stack)]
        for side in sides:
            asyncio.run(side.until_even())
        rows = []
        for batch in batches:
            found: list[list[Rate]] = [[], []]
            for _ in range(rounds):
                for rates, side in zip(found, sides, strict=True):
                    rates.append(side.rate(batch, seconds))
            ratios = [b.tokens_per_s / a.tokens_per_s for a, b in zip(*found, strict=True)]
            rows.append(
                Row(
                    batch=batch,
                    one=_median(found[0]),
                    several=_median(found[1]),
                    ratios=[round(each, 3) for each in ratios],
                )
            )
            print(rows[-1], flush=True)
    return rows


def _median(rates: Sequence[Rate]) -> Rate:
    return Rate(**{name: round(median(getattr(rate, name) for rate in rates), 2) for name in asdict(rates[0])})


async def run_client(address: str, num_requests: int, seconds: float) -> None:
    """Keep so many requests running, and print what came within the time."""
    num_tokens, is_counting = 0, False

    async def read(client: AsyncClient, prompt: list[int]) -> None:
        nonlocal num_tokens
        async with client.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) as stream:
            async for chunk in stream:
                num_tokens += chunk.num_tokens * is_counting

    began_s = time.monotonic()
    async with AsyncClient(address, retries=RETRIES, connect_timeout_s=30.0) as client:
        await client.shards()
        own = prompts(num_requests, PROMPT_TOKENS, VOCAB_SIZE)
        runs = [asyncio.create_task(read(client, prompt)) for prompt in own]
        await asyncio.sleep(SETTLE_S)
        is_counting, counted_s = True, time.monotonic()
        await asyncio.sleep(seconds)
        rate = num_tokens / (time.monotonic() - counted_s)
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    used = os.times()
    print(json.dumps({"tokens_per_s": rate, "cpu_s": used.user + used.system, "lived_s": time.monotonic() - began_s}))


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sequences on each worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--output", type=Path, default=RESULTS / "shard_throughput.json")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        address, number, seconds = options.client
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(run_client(address, int(number), float(seconds)))
        return
    rows = measure(options.shards, options.batches, options.rounds, options.seconds)
    print(table(_HEAD, _cells([asdict(row) for row in rows])))
    figures = {
        "shards": options.shards,
        "workers_each": WORKERS_EACH,
        "clients": NUM_CLIENTS,
        "step_ms": STEP_MS,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "cores": os.cpu_count(),
        "cores_are_of": CORES_ARE_OF,
        "store": describe_valkey(None),
        "rows": [asdict(row) for row in rows],
    }
    write_result(options.output, "shard_throughput", figures)


_HEAD = ("sequences a worker", "one shard, tokens/s", "several, tokens/s", "ratio", "rounds", "cores, one", "several",
         "scheduler, µs a token, one", "several shards")  # fmt: skip


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[object]]:
    return [
        [
            row["batch"],
            f"{row['one']['tokens_per_s']:,.0f}",
            f"{row['several']['tokens_per_s']:,.0f}",
            f"{median(row['ratios']):.2f}",
            f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}",
            row["one"]["cores"],
            row["several"]["cores"],
            row["one"]["scheduler_us"],
            row["several"]["scheduler_us"],
        ]
        for row in rows
    ]


def section_of(document: Document) -> Section:
    rows = document["rows"]
    free = [row for row in rows if row["several"]["cores"] < FULL_SHARE * document["cores"]]
    headlines = [
        Headline(
            f"{median(row['ratios']):.2f} × one shard with {row['batch']} sequences a worker, with "
            f"{row['several']['cores']:g} of {document['cores']} cores in use",
            [at_least(median(row["ratios"]), TARGET, "×")] if row in free and document["shards"] == 3 else [],
        )
        for row in rows
    ]
    return Section(
        done=(
            f"{document['shards']} shards with {document['workers_each']} simulated workers each, of "
            f"{document['step_ms']:g} ms a step, against one shard with {document['workers_each']}; "
            f"{document['clients']} client processes; medians of {document['rounds']} rounds. The target counts where "
            f"the processes leave at least a tenth of the cores{_without_store(document)}."
        ),
        headlines=headlines,
        blocks=[grid(_HEAD, _cells(rows))],
    )


def _without_store(document: Document) -> str:
    return "" if "store" in document.get("cores_are_of", ()) else " (the store's, which are not counted here, apart)"


SECTION = PageSection(
    kinds=("shard_throughput",),
    title="Shards",
    question="What do several schedulers that lead at once give?",
    command="python -m benchmarks.scale.shard_throughput",
    measures=SCHEDULER,
    target=f"three shards give at least {TARGET} × the tokens/s of one, as far as the cores allow",
    render=section_of,
)


if __name__ == "__main__":
    main()
