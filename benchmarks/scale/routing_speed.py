"""Speed of routing by cached prefix: requests a second through one process on one core, with short and long prompts.

The callee answers at once (`stub_scheduler`, four shards), so what is measured is the process that chooses: a client of
the SDK, our gateway, and, if given, the routers `vllm-router`, `smg` and `sglang-router` with their policy
`cache_aware`. The client calls gRPC servers, and no HTTP is in its way; the gateway takes HTTP and calls the same gRPC
servers; the other routers take HTTP and call HTTP servers. So a router compares with the gateway, which also checks,
renders and streams where they pass on bytes. The process that is measured has one core, stubs and load share another.
Prompts begin with one of 50 prefixes of 2,048 or 220,000 bytes, each with a question of its own behind it. Takes three
minutes.

    python -m benchmarks.scale.routing_speed [--routers FOLDER] [--seconds S] [--rounds N]

FOLDER has virtual environments with the routers' names and packages; routers that are not there are left out.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.page_section import Document, Headline, PageSection, Section, at_least, grid
from benchmarks.report import RESULTS, ROOT, table, write_result
from benchmarks.services.http_load import HttpLoad, until_healthy
from benchmarks.services.one_core import on_core
from benchmarks.services.processes import Process, cpu_s, free_port, started
from benchmarks.services.stub_scheduler import MODEL
from quire import AsyncClient
from quire.deployment import Deployment

NUM_SHARDS = 4
NUM_PREFIXES = 50
NUM_AT_ONCE = 64
NUM_PROMPTS = 400  # of each size, asked in turn
SIZES = (2_048, 220_000)  # bytes of a prefix
TARGETS = {2_048: 1000, 220_000: 400}  # requests/s of a client
ROUTERS = ("vllm-router", "smg", "sglang-router")
_WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One system at one size of prompts: medians over the rounds."""

    system: str
    prompt_bytes: int
    per_s: float
    cpu_us: float  # of the measured process, for each request
    choice_us: float | None = None  # of that, the choice of the shard; None: not known
    rounds: list[float]  # requests/s


@dataclass(frozen=True, slots=True)
class Stubs:
    """The stubs' addresses."""

    grpc: str
    http: list[str]


def prompts(num_bytes: int) -> list[str]:
    """Prompts that take turns with the prefixes, each with an end of its own."""
    draw = random.Random(num_bytes)
    prefixes = [
        f"Prefix {number}: " + "".join(draw.choices("abcdefgh ", k=num_bytes - 16)) for number in range(NUM_PREFIXES)
    ]
    return [f"{prefixes[number % NUM_PREFIXES]} Question {number}?" for number in range(NUM_PROMPTS)]


async def run_client(address: str, num_bytes: int, seconds: float) -> None:
    """Send prompts for so long, and print what came of it."""
    asked = prompts(num_bytes)
    num_done = 0

    async def ask(first: int, end_s: float) -> None:
        nonlocal num_done
        number = first
        while time.monotonic() < end_s:
            await client.generate(asked[number % NUM_PROMPTS], max_tokens=1)
            number += NUM_AT_ONCE
            num_done += 1

    async with AsyncClient(address) as client:
        assert len(await client.shards()) == NUM_SHARDS
        for length_s in (_WARM_UP_S, seconds):
            num_done, began_s, began_cpu_s = 0, time.monotonic(), time.process_time()
            await asyncio.gather(*(ask(first, began_s + length_s) for first in range(NUM_AT_ONCE)))
        took_s, used_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        choice_us = time_choice(client._deployed(), asked)
    figures = {"per_s": num_done / took_s, "cpu_us": used_s / num_done * 1e6, "choice_us": choice_us}
    print(json.dumps(figures))


def time_choice(deployment: Deployment, asked: Sequence[str]) -> float:
    """Time of the choice of a shard alone, in µs, where the prompts are known."""
    began_s = time.perf_counter()
    for prompt in asked:
        deployment.new_id(prompt, salt=None, tenant=None)
    return (time.perf_counter() - began_s) / len(asked) * 1e6


def client_speed(stubs: Stubs, num_bytes: int, seconds: float) -> dict[str, float]:
    """Measure a client of the SDK in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--client", stubs.grpc, str(num_bytes), str(seconds)]
    with on_core(0):
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def http_requests(num_bytes: int) -> list[bytes]:
    """Requests for completions of one token."""
    bodies = [json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode() for prompt in prompts(num_bytes)]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return [head % len(body) + body for body in bodies]


async def _http_speed(pid: int, port: int, num_bytes: int, seconds: float) -> dict[str, float]:
    load = HttpLoad(port, http_requests(num_bytes), NUM_AT_ONCE)
    await until_healthy(port)
    await load.run(_WARM_UP_S)
    before_s = cpu_s(pid)
    per_s = await load.run(seconds)
    return {"per_s": per_s, "cpu_us": (cpu_s(pid) - before_s) / load.num_done * 1e6}


def http_speed(pid: int, port: int, num_bytes: int, seconds: float) -> dict[str, float]:
    """Measure a process that takes HTTP, with the load beside the stubs."""
    with on_core(1):
        return uvloop.run(_http_speed(pid, port, num_bytes, seconds))


@contextmanager
def gateway_of(stubs: Stubs) -> Iterator[tuple[int, int]]:
    """Gateway of ours before the stubs; gives its process and port."""
    with on_core(0):
        process = Process("gateway_svc", "--listen", "127.0.0.1:0", "--scheduler", stubs.grpc)
    try:
        yield process.pid, int(process.wait_for("listening")["address"].rpartition(":")[2])
    finally:
        process.close()


@contextmanager
def router_of(stubs: Stubs, folder: Path, name: str) -> Iterator[tuple[int, int]]:
    """Router of others before the stubs; gives its process and port."""
    port, metrics_port = free_port(), free_port()
    launch = [] if name == "vllm-router" else ["launch"]
    command = [str(folder / name / "bin" / name), *launch, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *stubs.http, "--policy", "cache_aware", "--prometheus-port", str(metrics_port)]
    with on_core(0), (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*command, "--log-level", "error"], stdout=log, stderr=log)
    try:
        yield process.pid, port
    finally:
        process.kill()
        process.wait()


def version_of(folder: Path, name: str) -> str:
    """Version of an installed router."""
    program = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    python = str(folder / name / "bin" / "python")
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def measure(routers: Path | None, rounds: int, seconds: float) -> list[Speed]:
    """Measure all systems in turn, round after round."""
    with on_core(1):
        stub = started("benchmarks.services.stub_scheduler", "--shards", str(NUM_SHARDS))
    with stub as process:
        said = process.wait_for("listening")
        stubs = Stubs(",".join(said["addresses"]), [f"http://127.0.0.1:{port}" for port in said["http_ports"]])
        found: dict[tuple[str, int], list[dict[str, float]]] = {}
        for _ in range(rounds):
            for size in SIZES:
                for system, figures in _round_of(stubs, routers, size, seconds):
                    print(system, size, figures, flush=True)
                    found.setdefault((system, size), []).append(figures)
    return [_speed(system, size, figures) for (system, size), figures in found.items()]


def _round_of(stubs: Stubs, routers: Path | None, size: int, seconds: float) -> Iterator[tuple[str, dict[str, float]]]:
    yield "client", client_speed(stubs, size, seconds)
    with gateway_of(stubs) as (pid, port):
        yield "gateway", http_speed(pid, port, size, seconds)
    for name in ROUTERS:
        if routers is not None and (routers / name / "bin" / name).exists():
            with router_of(stubs, routers, name) as (pid, port):
                yield f"{name} {version_of(routers, name)}", http_speed(pid, port, size, seconds)


def _speed(system: str, size: int, figures: Sequence[dict[str, float]]) -> Speed:
    def middle(name: str) -> float:
        return round(median(each[name] for each in figures), 1)

    return Speed(
        system=system,
        prompt_bytes=size,
        per_s=middle("per_s"),
        cpu_us=middle("cpu_us"),
        choice_us=middle("choice_us") if "choice_us" in figures[0] else None,
        rounds=[round(each["per_s"], 1) for each in figures],
    )


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=Path, help="folder with a virtual environment of each router's name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--output", type=Path, default=RESULTS / "routing_speed.json")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        address, num_bytes, seconds = options.client
        asyncio.run(run_client(address, int(num_bytes), float(seconds)))
        return
    rows = [asdict(each) for each in measure(options.routers, options.rounds, options.seconds)]
    print(table(_HEAD, _cells(rows)))
    figures = {"shards": NUM_SHARDS, "at_once": NUM_AT_ONCE, "rounds": options.rounds, "seconds": options.seconds}
    write_result(options.output, "routing_speed", {**figures, "rows": rows})


_HEAD = ("system", "bytes of a prefix", "requests/s", "rounds", "CPU, µs a request", "choice, µs")


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[object]]:
    return [
        [
            row["system"],
            f"{row['prompt_bytes']:,}",
            f"{row['per_s']:,.0f}",
            f"{min(row['rounds']):,.0f} to {max(row['rounds']):,.0f}",
            f"{row['cpu_us']:,.0f}",
            "" if row["choice_us"] is None else f"{row['choice_us']:,.0f}",
        ]
        for row in sorted(rows, key=lambda row: row["prompt_bytes"])
    ]


def section_of(document: Document) -> Section:
    rows = document["rows"]
    headlines = [
        Headline(
            f"client: {row['per_s']:,.0f} requests/s with prefixes of {row['prompt_bytes']:,} bytes, "
            f"{row['choice_us']:,.0f} µs of each for the choice",
            [at_least(row["per_s"], TARGETS[row["prompt_bytes"]], "requests/s")],
        )
        for row in rows
        if row["system"] == "client"
    ]
    return Section(
        done=(
            f"One process on one core before {document['shards']} shards that answer at once, "
            f"{document['at_once']} requests at a time; medians of {document['rounds']} rounds. Client: the SDK, which "
            f"calls gRPC; gateway: ours, HTTP in front and the SDK behind; the others are routers that take HTTP and "
            f"pass it on by HTTP, with the policy cache_aware. Load and stubs share another core, which limits the "
            f"fastest: CPU a request compares better there."
        ),
        headlines=headlines,
        blocks=[grid(_HEAD, _cells(rows))],
        versions=("grpcio", "protobuf", "uvloop"),
    )


SECTION = PageSection(
    kinds=("routing_speed",),
    title="Routing speed",
    question="How many requests a second can one process route by cached prefix?",
    command="python -m benchmarks.scale.routing_speed",
    measures=("common", "quire", "gateway_svc"),
    target=f"{TARGETS[SIZES[0]]:,} requests/s through one client on one core, {TARGETS[SIZES[1]]} with 220 KB prompts",
    render=section_of,
)


if __name__ == "__main__":
    main()
