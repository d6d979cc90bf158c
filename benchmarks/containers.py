"""Speed of the containers of compose.yaml beside `quire serve`: the same load, from a client outside, in turn.

Each round starts both deployments, one after the other and the other way round in the next, with their defaults, and
sends 64 requests at once. The images must be there: `make compose-smoke` builds them. Prints a table and writes JSON.

    python -m benchmarks.containers [--model 125m] [--rounds 5] [--compose 'docker compose'] [--tag smoke]
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.page_section import SERVICES, Document, Headline, PageSection, Section, at_least_in_rounds, grid, number
from benchmarks.peers.campaign import rotated
from benchmarks.peers.workload import LOADS, MODELS, NUM_REQUESTS, Sent, checkpoint, warm_up
from benchmarks.random_models import CONFIG_FILE, MEMORY_FOLDER
from benchmarks.report import RESULTS, ROOT, table, write_result
from quire import AsyncClient

TARGET = 0.95
LOAD = "alpaca"
PROJECT = "quire-bench"
ADDRESS = "127.0.0.1:7847"  # where both listen by themselves
_QUIRE = Path(sys.executable).with_name("quire")
_READY_S = 300.0
_END_S = 60.0

Deployment = Callable[[], AbstractContextManager[None]]


@contextmanager
def served(model: Path) -> Iterator[None]:
    """Run `quire serve`, with its data in a folder of its own."""
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "XDG_STATE_HOME": state}
        process = subprocess.Popen([str(_QUIRE), "serve", str(model)], env=environment, stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_END_S)


@contextmanager
def composed(model: Path, compose: Sequence[str], tag: str) -> Iterator[None]:
    """Run the containers of compose.yaml from images that are there."""
    environment = {**os.environ, "MODEL": str(model.resolve()), "QUIRE_TAG": tag, "PUBLISH": ADDRESS}
    command = [*compose, "-p", PROJECT, "--profile", "cpu"]

    def run(*arguments: str) -> None:
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{' '.join(done.args)} ends with {done.returncode}:\n{done.stdout[-4000:]}")

    try:
        run("up", "-d", "--no-build")
        yield
    finally:
        run("down", "--volumes", "--timeout", "10")


async def tokens_per_s(requests: Sequence[Sent], first: Sequence[Sent]) -> float:
    """Output tokens per second, from the first request to the last token, once the service has answered `first`."""
    async with AsyncClient(ADDRESS) as client:
        await client.wait_ready(_READY_S)

        async def send(request: Sent) -> int:
            stream = client.stream(request.prompt, max_tokens=request.num_output, temperature=0, ignore_eos=True)
            return sum([len(chunk.token_ids) async for chunk in stream])

        await asyncio.gather(*map(send, first))
        began_s = time.perf_counter()
        num_tokens = sum(await asyncio.gather(*map(send, requests)))
        seconds = time.perf_counter() - began_s
    if num_tokens != (asked := sum(each.num_output for each in requests)):
        sys.exit(f"got {num_tokens:,} tokens, asked for {asked:,}")
    return num_tokens / seconds


def measure(deployments: Sequence[Deployment], rounds: int, ask: Callable[[], float]) -> list[list[float]]:
    """Tokens per second that `ask` finds of each deployment, by round."""
    found = []
    for turn in range(rounds):
        rates = [0.0] * len(deployments)
        for index in rotated(range(len(deployments)), turn):
            with deployments[index]():
                rates[index] = ask()
        sys.stdout.write(f"round {turn + 1}: {', '.join(f'{rate:,.1f}' for rate in rates)} tokens/s\n")
        sys.stdout.flush()
        found.append(rates)
    return found


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="125m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compose", type=shlex.split, default=["docker", "compose"], help="the command, in one word")
    parser.add_argument("--tag", default="smoke", help="of the images")
    parser.add_argument("--output", type=Path, default=RESULTS / "containers.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None) as folder:
        model = checkpoint(options.model, options.dtype, Path(folder))
        for each in (Path(folder), model, *model.iterdir()):  # containers read it as another user
            each.chmod(each.stat().st_mode | (0o555 if each.is_dir() else 0o444))
        vocab_size = int(json.loads((model / CONFIG_FILE).read_text())["vocab_size"])
        deployments = (partial(served, model), partial(composed, model, options.compose, options.tag))
        load = LOADS[LOAD]
        requests, first = load.requests(vocab_size), warm_up(load, vocab_size)
        rates = measure(deployments, options.rounds, lambda: uvloop.run(tokens_per_s(requests, first)))
    figures = figures_of(rates)
    cells = [(name, *values) for name, values in by_name(figures).items()]
    sys.stdout.write(table(head(figures), cells) + "\n")
    about = {"model": options.model, "dtype": options.dtype, "load": LOAD}
    write_result(options.output, "containers", {**about, **figures, "target": TARGET})


def figures_of(rates: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Figures of all rounds, each with the tokens per second of `quire serve` and of the containers."""
    ratios = [inside / outside for outside, inside in rates]
    return {
        "rounds": [{"serve": round(outside, 1), "containers": round(inside, 1)} for outside, inside in rates],
        "ratio": round(statistics.median(ratios), 4),
        "worst_ratio": round(min(ratios), 4),
        "best_ratio": round(max(ratios), 4),
    }


def head(figures: Mapping[str, Any]) -> list[str]:
    return ["tokens/s", *(f"round {turn + 1}" for turn in range(len(figures["rounds"]))), "median"]


def by_name(figures: Mapping[str, Any]) -> dict[str, list[float]]:
    """Tokens per second of each deployment, by round, and their median."""
    found = {}
    for key, name in (("serve", "quire serve"), ("containers", "containers")):
        values = [row[key] for row in figures["rounds"]]
        found[name] = [*values, round(statistics.median(values), 1)]
    return found


def section_of(document: Document) -> Section:
    target = 100 * document["target"]
    percent, worst, best = (round(100 * document[key], 2) for key in ("ratio", "worst_ratio", "best_ratio"))
    figure = f"{number(percent, 1, target)} % of `quire serve`'s tokens/s ({worst:.0f} to {best:.0f} % in the rounds)"
    return Section(
        done=(
            f"The model {document['model']} in {document['dtype']}, {NUM_REQUESTS} requests at once with the lengths "
            f"of {document['load']}, from a client outside; both with their defaults, in turn, another one first each "
            "time. Ratios are of two runs of one round; the target is met, or not, where all rounds say so. The "
            "containers keep the journal on a volume, with an fsync for every write."
        ),
        headlines=[Headline(figure, [at_least_in_rounds(worst, best, target, "%", len(document["rounds"]))])],
        blocks=[grid(head(document), [(name, *values) for name, values in by_name(document).items()])],
    )


SECTION = PageSection(
    kinds=("containers",),
    title="Containers",
    question="Are the containers of compose.yaml as fast as `quire serve`?",
    command="python -m benchmarks.containers",
    measures=(*SERVICES, "compose.yaml", "Dockerfile"),
    target="≥ 95 % of `quire serve`'s tokens/s",
    render=section_of,
)


if __name__ == "__main__":
    main()
