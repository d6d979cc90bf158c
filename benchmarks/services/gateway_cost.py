"""Cost of the HTTP gateway: CPU time a token, delay of the first token, CPU time of scrapes. Real processes.

    python -m benchmarks.services.gateway_cost [--streams 256] [--step-ms 40 20 8] [--seconds 10]

A worker only simulates execution, so that the cores are free for what is measured. The client writes and reads bytes,
and parses nothing. The first token over HTTP is compared with that of the SDK, which asks the same scheduler in turn.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.page_section import Document, Headline, PageSection, ResultRow, Section, at_most, below, grid, number
from benchmarks.report import RESULTS, ROOT, table, write_result
from benchmarks.services.processes import Process, embedded_valkey, started
from quire import AsyncClient

MODEL = ROOT / "demo" / "model"  # its tokenizer: the worker has no model
VOCAB_SIZE = 2048
PROMPT = "Once upon a time"
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}]},
}
_WARM_UP_S = 1.0
_LAST_CHUNK = b"0\r\n\r\n"
_EVENT = b"data: "
_SCRAPES_PER_S = 10


@dataclass(frozen=True, slots=True)
class Site:
    """Processes that are measured."""

    scheduler: Process
    gateway: Process
    address: str  # of the scheduler
    port: int  # of the gateway


@dataclass(slots=True)
class Read:
    """Answers and events that a client has read."""

    num_answers: int = 0
    num_events: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """CPU time of one route under load."""

    route: str
    streams: int
    step_ms: float
    tokens_per_s: float
    tokens_per_event: float
    gateway_us_per_token: float
    gateway_us_per_event: float
    scheduler_us_per_token: float


@contextmanager
def site_of(step_ms: float) -> Iterator[Site]:
    """Start everything; each step takes this time."""
    limits = ("--max-num-seqs", "256", "--max-batched-tokens", "8192")
    with ExitStack() as opened:
        store = opened.enter_context(embedded_valkey(None))
        listen = ("--listen", "127.0.0.1:0")
        scheduler = opened.enter_context(started("scheduler_svc", *listen, "--store", store, *limits))
        address = str(scheduler.wait_for("listening")["address"])
        shape = ("--step-ms", str(step_ms), "--tokenizer", str(MODEL), "--vocab-size", str(VOCAB_SIZE))
        worker = ("benchmarks.services.simulated_worker", "--scheduler", address, *shape)
        opened.enter_context(started(*worker))
        scheduler.wait_for("worker ready")
        gateway = opened.enter_context(started("gateway_svc", *listen, "--scheduler", address))
        _, _, port = str(gateway.wait_for("listening")["address"]).rpartition(":")
        yield Site(scheduler, gateway, address, int(port))


def request_of(route: str, num_tokens: int) -> bytes:
    """A request for a stream of so many tokens."""
    bound = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    body = json.dumps({**BODIES[route], bound: num_tokens, "stream": True, "ignore_eos": True}).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def read_answers(port: int, request: bytes, end_s: float, read: Read) -> None:
    """Send the request again and again over one connection, until a time has passed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < end_s:
        writer.write(request)
        tail = b""
        while not tail.endswith(_LAST_CHUNK):
            data = await reader.read(1 << 16)
            if not data:
                raise ConnectionError(f"the gateway closed the connection behind {tail!r}")
            read.num_events += data.count(_EVENT)
            tail = (tail + data)[-16:]
        read.num_answers += 1
    writer.close()


async def load(port: int, request: bytes, num_streams: int, seconds: float) -> Read:
    """Read so many streams at once."""
    read, end_s = Read(), time.monotonic() + seconds
    await asyncio.gather(*(read_answers(port, request, end_s, read) for _ in range(num_streams)))
    return read


def measure_cost(site: Site, route: str, num_streams: int, step_ms: float, options: argparse.Namespace) -> CostRow:
    """CPU time of a route while so many streams are read."""
    request = request_of(route, options.tokens)
    uvloop.run(load(site.port, request, num_streams, _WARM_UP_S))
    gateway_s, scheduler_s, began_s = site.gateway.cpu_s(), site.scheduler.cpu_s(), time.monotonic()
    read = uvloop.run(load(site.port, request, num_streams, options.seconds))
    seconds = time.monotonic() - began_s
    gateway_s, scheduler_s = site.gateway.cpu_s() - gateway_s, site.scheduler.cpu_s() - scheduler_s
    num_tokens = read.num_answers * options.tokens
    return CostRow(
        route=route,
        streams=num_streams,
        step_ms=step_ms,
        tokens_per_s=round(num_tokens / seconds, 1),
        tokens_per_event=round(num_tokens / read.num_events, 3),
        gateway_us_per_token=round(1e6 * gateway_s / num_tokens, 2),
        gateway_us_per_event=round(1e6 * gateway_s / read.num_events, 2),
        scheduler_us_per_token=round(1e6 * scheduler_s / num_tokens, 2),
    )


async def first_token_ms(site: Site, num_requests: int) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token over HTTP and by the SDK, one request at a time, in turn."""
    over_http, by_sdk = [], []
    request = request_of("/v1/completions", 2)
    async with AsyncClient(site.address) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        for _ in range(num_requests):
            began_s = time.perf_counter()
            writer.write(request)
            while _EVENT not in await reader.readline():
                pass
            over_http.append(1e3 * (time.perf_counter() - began_s))
            while await reader.readline() != b"0\r\n":
                pass
            await reader.readline()
            began_s = time.perf_counter()
            async with client.stream(PROMPT, max_tokens=2, ignore_eos=True) as stream:
                await anext(aiter(stream))
                by_sdk.append(1e3 * (time.perf_counter() - began_s))
                async for _chunk in stream:
                    pass
        writer.close()
    return over_http, by_sdk


async def scrape(port: int, seconds: float) -> int:
    """Scrape the metrics at a steady rate. Returns how often."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    number, begin_s = 0, time.monotonic()
    while (due_s := number / _SCRAPES_PER_S) < seconds:
        await asyncio.sleep(max(0.0, begin_s + due_s - time.monotonic()))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: gateway\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        number += 1
    writer.close()
    return number


def measure_scrapes(site: Site, seconds: float) -> float:
    """Percent of one core that scrapes take, of gateway and scheduler together, beyond what they take idle."""

    def cpu_s() -> float:
        return site.gateway.cpu_s() + site.scheduler.cpu_s()

    before_s = cpu_s()
    time.sleep(seconds)
    idle_s, before_s = cpu_s() - before_s, cpu_s()
    uvloop.run(scrape(site.port, seconds))
    return 100 * (cpu_s() - before_s - idle_s) / seconds


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="read at once")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[40.0, 20.0, 10.0])
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument("--requests", type=int, default=200, help="whose first token is measured")
    parser.add_argument("--output", type=Path, default=RESULTS / "gateway_cost.json")
    options = parser.parse_args()
    rows = []
    for step_ms in options.step_ms:
        with site_of(step_ms) as site:
            for route in BODIES:
                rows.append(measure_cost(site, route, options.streams, step_ms, options))
                print(rows[-1], flush=True)
    with site_of(1.0) as site:
        over_http, by_sdk = uvloop.run(first_token_ms(site, options.requests))
        percent = measure_scrapes(site, options.seconds)
    print(table(list(asdict(rows[0])), [list(asdict(row).values()) for row in rows]))
    first = {"over_http_ms": round(median(over_http), 4), "by_sdk_ms": round(median(by_sdk), 4)}
    print(first, f"scrapes take {percent:.2f} % of a core")
    figures = {
        "streams": options.streams,
        "output_tokens": options.tokens,
        "seconds": options.seconds,
        "requests": options.requests,
        "rows": [asdict(row) for row in rows],
        "first_token": first,
        "scrapes_per_s": _SCRAPES_PER_S,
        "scrape_percent_of_a_core": round(percent, 3),
    }
    write_result(options.output, "gateway_cost", figures)


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["rows"]
    first = document["first_token"]
    more_ms, cores = first["over_http_ms"] - first["by_sdk_ms"], document["machine"]["cpus"]
    percent = document["scrape_percent_of_a_core"] / cores
    plain = [row for row in rows if row["route"] == "/v1/completions"]
    headlines = [
        Headline(
            f"{row['route']}, steps of {row['step_ms']:g} ms: {number(row['gateway_us_per_token'], 1, 20)} µs a token",
            [at_most(row["gateway_us_per_token"], 20, "µs")],
        )
        for row in plain
    ]
    headlines += [
        Headline(f"first token {number(more_ms, 2, 1)} ms later than by the SDK", [at_most(more_ms, 1, "ms")]),
        Headline(
            f"{document['scrapes_per_s']} scrapes a second take {number(percent, 2, 1)} % of {cores} cores",
            [below(percent, 1, "%")],
        ),
    ]
    cells = [
        (
            row["route"],
            f"{row['step_ms']:g}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_event']:.2f}",
            f"{row['gateway_us_per_token']:.1f}",
            f"{row['gateway_us_per_event']:.1f}",
            f"{row['scheduler_us_per_token']:.1f}",
        )
        for row in rows
    ]
    head = ("route", "step, ms", "tokens/s", "tokens an event", "gateway, µs a token", "µs an event", "scheduler, µs")
    return Section(
        done=(
            f"{document['streams']} streams of {document['output_tokens']} tokens at once through one gateway, a "
            "scheduler on the embedded store, and a worker that only simulates execution; all processes on the same "
            f"{cores} cores. CPU time of the gateway's process, for {document['seconds']:g} s a row. First tokens: "
            f"medians of {document['requests']} requests, one at a time. Scrapes: of gateway and scheduler together."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
    )


SECTION = PageSection(
    kinds=("gateway_cost",),
    title="Cost of HTTP",
    question="What does the gateway cost for each token, until the first token, and for scrapes?",
    command="python -m benchmarks.services.gateway_cost",
    measures=("common", "quire", "gateway_svc"),
    target="≤ 20 µs a token at 256 streams, ≤ 1 ms to the first token, < 1 % for 10 scrapes a second",
    render=section_of,
)


if __name__ == "__main__":
    main()
