"""Deployments of real workers that the benchmark of travelling blocks loads: their processes, requests and token times.

Each worker computes with one thread. Knows neither rounds nor figures.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.services.model_services import WORKER_START_S
from benchmarks.services.processes import embedded_valkey, started
from common.waits import end_tasks
from quire import AsyncClient

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
NUM_BLOCKS = 2048  # of each worker: as many tokens as 16 sequences of full length
CONNECT_TIMEOUT_S = 30.0


@contextmanager
def site(model: Path, dtype: str, workers: Sequence[tuple[str, str]], *flags: str) -> Iterator[str]:
    """Serve with workers of these names and roles and these flags of the scheduler; yields its address."""
    with ExitStack() as stack:
        store = stack.enter_context(embedded_valkey(None))
        scheduler = stack.enter_context(
            started("scheduler_svc", "--listen", "127.0.0.1:0", "--store", store, "--log-format", "json", *flags)
        )
        address = str(scheduler.wait_for("listening")["address"])
        where = ("--scheduler", address, "--model", str(model), "--device", "cpu", "--dtype", dtype, "--threads", "1")
        pool = ("--block-size", str(BLOCK_SIZE), "--num-blocks", str(NUM_BLOCKS), "--log-format", "json")
        for name, role in workers:
            worker = stack.enter_context(started("worker_svc", *where, *pool, "--worker-id", name, "--role", role))
            worker.wait_for("ready", WORKER_START_S)
        for _ in workers:
            scheduler.wait_for("worker ready")
        yield address


def client_of(address: str) -> AsyncClient:
    return AsyncClient(address, connect_timeout_s=CONNECT_TIMEOUT_S)


class Prompts:
    """Random prompts, no two of which share a block."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._draw = random.Random(seed)

    def next(self, num_tokens: int) -> list[int]:
        return [self._draw.randrange(3, self._vocab_size) for _ in range(num_tokens)]


@dataclass(slots=True)
class TokenTimes:
    """Moments at which pieces of one request's output came, by the monotonic clock: nearly always of one token."""

    moments: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def gaps(self, from_s: float, to_s: float) -> list[float]:
        """Times between two pieces that came within a span."""
        within = [moment for moment in self.moments if from_s <= moment < to_s]
        return [later - earlier for earlier, later in pairwise(within)]

    async def until(self, number: int) -> None:
        """Wait until so many tokens have come."""
        while self.num_tokens < number:  # noqa: ASYNC110 - a clock beside the reader, not a signal to it
            await asyncio.sleep(0.001)


async def read(client: AsyncClient, prompt: list[int], max_tokens: int, times: TokenTimes) -> None:
    """Read a request to its end."""
    stream = client.stream(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    async with stream:
        async for chunk in stream:
            if chunk.num_tokens:
                times.moments.append(time.monotonic())
                times.num_tokens += chunk.num_tokens


@asynccontextmanager
async def running(client: AsyncClient, prompts: Sequence[list[int]]) -> AsyncIterator[list[TokenTimes]]:
    """Requests that run until the block ends: each that has reached the model's length is followed by another."""
    first = [TokenTimes() for _ in prompts]
    found = list(first)

    async def one(prompt: list[int], times: TokenTimes) -> None:
        while True:
            await read(client, prompt, MAX_MODEL_LEN - len(prompt), times)
            times = TokenTimes()
            found.append(times)

    tasks = [asyncio.create_task(one(*each)) for each in zip(prompts, first, strict=True)]
    try:
        for times in first:
            await times.until(2)
        yield found
        assert not any(task.done() for task in tasks), "a request has failed"
    finally:
        await end_tasks(*tasks)


@asynccontextmanager
async def stream_of_prompts(
    client: AsyncClient, prompts: Prompts, lengths: tuple[int, int], max_tokens: int
) -> AsyncIterator[list[TokenTimes]]:
    """One long prompt after the other, each with a short output, until the block ends; yields those that ended."""
    ended: list[TokenTimes] = []
    draw = random.Random(0)

    async def ask() -> None:
        while True:
            times = TokenTimes([time.monotonic()])  # the first moment is when it was sent
            await read(client, prompts.next(draw.randint(*lengths)), max_tokens, times)
            ended.append(times)

    task = asyncio.create_task(ask())
    try:
        yield ended
        assert not task.done(), "a prompt has failed"
    finally:
        await end_tasks(task)
