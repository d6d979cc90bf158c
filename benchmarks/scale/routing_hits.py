"""Hits of prefix caches behind a choice of shards, and time to first token: by cached prefix, least load, and in turn.

Real schedulers, clients and store; workers that only simulate, where each token that is computed takes its time. Every
prompt is one of 50 prefixes and a question of its own; requests come at random moments, from one or from several client
processes, each of which knows what it sent itself and what the shards say that they have cached. Each case begins with
processes of its own. A hit rate is the share of prompt tokens that was found in a cache; beside it stands that of one
endless cache which gets the same requests in the same order. Takes about eight minutes.

    python -m benchmarks.scale.routing_hits [--seconds S] [--rate N] [--clients N ...]
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.page_section import SCHEDULER, Document, Headline, PageSection, Section, at_least, grid
from benchmarks.report import RESULTS, ROOT, percentile, table, write_result
from benchmarks.services.processes import describe_valkey, embedded_valkey, started
from quire import AsyncClient
from quire.shards import new_request_id

NUM_PREFIXES = 50
NUM_WORKERS = 4
BLOCK_SIZE = 16
PREFIX_TOKENS = 1024
OWN_TOKENS = 64
OUTPUT_TOKENS = 16
NUM_BLOCKS = 2048  # of each worker: room for 30 of the prefixes
STEP_MS = 4.0
TOKEN_US = 100.0
VOCAB_SIZE = 32_000
TARGET = 0.95

Policy = Literal["by prefix", "least load", "in turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCase:
    """Case to measure. `shards`: 1, with all workers, or as many as there are workers."""

    shards: int
    policy: Policy
    clients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request, as its client saw it."""

    sent_s: float  # Unix time
    prefix: int
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRow:
    """One case: rates of tokens found in a cache, and milliseconds to the first token."""

    shards: int
    policy: Policy
    clients: int
    requests: int
    hit_rate: float
    endless_hit_rate: float
    first_token_p50_ms: float
    first_token_p90_ms: float
    first_token_p99_ms: float

    @property
    def share(self) -> float:
        """Part of the endless cache's hits."""
        return self.hit_rate / self.endless_hit_rate


def prefixes() -> list[list[int]]:
    draw = random.Random(50)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]


async def run_client(address: str, policy: Policy, number: int, rate: float, seconds: float) -> list[Answered]:
    """Send requests at random moments, `rate` of them a second, and read each to its end."""
    draw, known = random.Random(number), prefixes()
    running: list[asyncio.Task[Answered]] = []
    async with AsyncClient(address, connect_timeout_s=30.0) as client:
        num_shards = len(await client.shards())
        began_s = due_s = time.monotonic()
        while due_s < began_s + seconds:
            due_s += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            prefix = draw.randrange(NUM_PREFIXES)
            prompt = [*known[prefix], *(draw.randrange(3, VOCAB_SIZE) for _ in range(OWN_TOKENS))]
            request_id = ""
            if num_shards > 1 and policy == "in turn":
                request_id = new_request_id(len(running) % num_shards)
            elif num_shards > 1 and policy == "least load":
                request_id = client.new_request_id()
            running.append(asyncio.create_task(_ask(client, prefix, prompt, request_id)))
        return list(await asyncio.gather(*running))


async def _ask(client: AsyncClient, prefix: int, prompt: list[int], request_id: str) -> Answered:
    sent_s, began_s, first_s = time.time(), time.monotonic(), None
    stream = client.stream(prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, request_id=request_id)
    async with stream:
        async for _ in stream:
            first_s = first_s or time.monotonic()
        completion = await stream.completion()
    assert first_s is not None
    return Answered(
        sent_s=sent_s,
        prefix=prefix,
        prompt_tokens=len(prompt),
        cached_tokens=completion.usage.cached_tokens,
        first_token_s=first_s - began_s,
    )


def measure_case(case: HitCase, rate: float, seconds: float) -> HitRow:
    """Start everything, load it from so many client processes, and end it."""
    with ExitStack() as stack:
        store = stack.enter_context(embedded_valkey(None))
        flags = ("--listen", "127.0.0.1:0", "--store", store, "--shards", str(case.shards), "--log-format", "json")
        scheduler = stack.enter_context(started("scheduler_svc", *flags))
        address = scheduler.wait_for("listening")["address"]
        shape = ("--step-ms", str(STEP_MS), "--per-token-us", str(TOKEN_US), "--num-blocks", str(NUM_BLOCKS))
        for number in range(NUM_WORKERS):
            named = ("--scheduler", address, "--worker-id", f"w{number}")
            stack.enter_context(started("benchmarks.services.simulated_worker", *named, *shape))
        asyncio.run(_until_even(address, case.shards))
        command = [sys.executable, "-m", __spec__.name, "--client", address, case.policy]
        clients = [
            subprocess.Popen(
                [*command, str(number), str(rate / case.clients), str(seconds)], cwd=ROOT, stdout=subprocess.PIPE
            )
            for number in range(case.clients)
        ]
        answered = [Answered(**each) for client in clients for each in json.loads(client.communicate()[0])]
    return row_of(case, answered)


async def _until_even(address: str, num_shards: int) -> None:
    """Return when each shard has as many workers as another."""
    async with AsyncClient(address, connect_timeout_s=30.0) as client:
        await client.wait_ready(60.0)
        while True:
            shards = await client.shards()
            counts = [each.num_workers for each in shards] if num_shards > 1 else [len((await client.stats()).workers)]
            if counts == [NUM_WORKERS // num_shards] * num_shards:
                return
            await asyncio.sleep(0.2)


def row_of(case: HitCase, answered: Sequence[Answered]) -> HitRow:
    """Figures of a case. An endless cache has every prefix from its first request on, in whole blocks."""
    num_tokens = sum(each.prompt_tokens for each in answered)
    seen: set[int] = set()
    endless = 0
    for each in sorted(answered, key=lambda each: each.sent_s):
        endless += PREFIX_TOKENS // BLOCK_SIZE * BLOCK_SIZE if each.prefix in seen else 0
        seen.add(each.prefix)
    first_ms = [1e3 * each.first_token_s for each in answered]
    return HitRow(
        **asdict(case),
        requests=len(answered),
        hit_rate=round(sum(each.cached_tokens for each in answered) / num_tokens, 4),
        endless_hit_rate=round(endless / num_tokens, 4),
        first_token_p50_ms=round(percentile(first_ms, 50), 1),
        first_token_p90_ms=round(percentile(first_ms, 90), 1),
        first_token_p99_ms=round(percentile(first_ms, 99), 1),
    )


def cases(client_counts: Sequence[int]) -> list[HitCase]:
    """Cases in the order of the table."""
    several = [
        HitCase(shards=NUM_WORKERS, policy=policy, clients=clients)
        for clients in client_counts
        for policy in get_args(Policy)
    ]
    return [*several, HitCase(shards=1, policy="by prefix", clients=max(client_counts))]


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="client processes")
    parser.add_argument("--rate", type=float, default=24.0, help="requests a second, of all clients together")
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--output", type=Path, default=RESULTS / "routing_hits.json")
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        address, policy, number, rate, seconds = options.client
        answered = asyncio.run(run_client(address, policy, int(number), float(rate), float(seconds)))
        print(json.dumps([asdict(each) for each in answered]))
        return
    rows = []
    for case in cases(options.clients):
        rows.append(measure_case(case, options.rate, options.seconds))
        print(rows[-1], flush=True)
    print(table(_HEAD, _cells([asdict(row) for row in rows])))
    figures = {
        "prefixes": NUM_PREFIXES,
        "workers": NUM_WORKERS,
        "prefix_tokens": PREFIX_TOKENS,
        "own_tokens": OWN_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "blocks": NUM_BLOCKS,
        "step_ms": STEP_MS,
        "token_us": TOKEN_US,
        "rate": options.rate,
        "seconds": options.seconds,
        "cores": os.cpu_count(),
        "store": describe_valkey(None),
        "rows": [asdict(row) for row in rows],
    }
    write_result(options.output, "routing_hits", figures)


_HEAD = ("shards", "client processes", "choice", "requests", "hit rate", "endless cache", "share",
         "first token p50, ms", "p90", "p99")  # fmt: skip


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[object]]:
    return [
        [
            row["shards"],
            row["clients"],
            row["policy"],
            row["requests"],
            f"{row['hit_rate']:.1%}",
            f"{row['endless_hit_rate']:.1%}",
            f"{row['hit_rate'] / row['endless_hit_rate']:.1%}",
            f"{row['first_token_p50_ms']:.0f}",
            f"{row['first_token_p90_ms']:.0f}",
            f"{row['first_token_p99_ms']:.0f}",
        ]
        for row in rows
    ]


def section_of(document: Document) -> Section:
    rows = document["rows"]
    headlines = []
    for row in rows:
        if row["policy"] != "by prefix":
            continue
        share = row["hit_rate"] / row["endless_hit_rate"]
        figure = f"{row['shards']} shards, {row['clients']} client processes: {share:.1%} of the endless cache's hits"
        others = [
            f"{row['first_token_p50_ms'] / other['first_token_p50_ms'] - 1:+.0%} against {other['policy']}"
            for other in rows
            if other is not row and (other["shards"], other["clients"]) == (row["shards"], row["clients"])
        ]
        words = f"{figure}; first token p50 {', '.join(others)}" if others else figure
        headlines.append(Headline(words, [at_least(100 * share, 100 * TARGET, "%")]))
    return Section(
        done=(
            f"{document['prefixes']} prefixes of {document['prefix_tokens']} tokens, each time with "
            f"{document['own_tokens']} others behind, {document['rate']:g} requests/s at random moments, over "
            f"{document['workers']} simulated workers of {document['step_ms']:g} ms a step and "
            f"{document['token_us']:g} µs a token, with {document['blocks']:,} blocks each. One scheduler process "
            f"leads all shards. With one shard the scheduler places by cached prefix."
        ),
        headlines=headlines,
        blocks=[grid(_HEAD, _cells(rows))],
    )


SECTION = PageSection(
    kinds=("routing_hits",),
    title="Routing by cached prefix",
    question="How many prefixes are found where they are cached, and what does that save?",
    command="python -m benchmarks.scale.routing_hits",
    measures=SCHEDULER,
    target=f"at least {TARGET:.0%} of the hit rate of one endless cache, with one and with several clients",
    render=section_of,
)


if __name__ == "__main__":
    main()
