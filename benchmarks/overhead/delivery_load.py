"""Readers that keep a scheduler full, and how far behind the computation they are: the lag of every token.

Knows an address; neither processes nor models. The k-th token of all that was made is compared with the k-th of all
that was read, so nothing needs to be known of which is which: requests run to their lengths, and what was made is what
was read.
"""

import asyncio
import random
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import linear_regression

from benchmarks.overhead.overhead_table import Spread, spread_of
from benchmarks.services.steady_load import RETRIES
from benchmarks.services.step_trace import WorkerMoments
from quire import AsyncClient

FIRST_TOKEN = 3  # those before it are special


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a delivery run."""

    num_readers: int
    seconds: float  # after these no request is begun
    prompt_tokens: int
    output_tokens: tuple[int, int]  # evenly between
    vocab_size: int


class Received:
    """Times at which tokens reached their readers."""

    def __init__(self) -> None:
        self.at_ns = array("q")
        self.num_tokens = array("i")  # beside at_ns

    def record_tokens(self, num_tokens: int) -> None:
        self.at_ns.append(time.perf_counter_ns())
        self.num_tokens.append(num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Delivery of a load, measured in its middle: while all readers had a request."""

    seconds: float
    tokens_per_s: float
    lag: Spread  # milliseconds: from the end of a token's execution to its reader having it
    lag_p99_by_third: list[float]
    lag_growth_ms_per_s: float  # slope of a line through all


async def run_load(address: str, load: Load) -> Received:
    """Run the readers: each has one request after the other, all over one session."""
    received = Received()
    async with AsyncClient(address, retries=RETRIES) as client:
        await client.wait_ready(10.0)
        end_s = time.monotonic() + load.seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(load.num_readers):
                tasks.create_task(_read(client, load, number, end_s, received))
    return received


async def _read(client: AsyncClient, load: Load, number: int, end_s: float, received: Received) -> None:
    generator = random.Random(number)
    shortest = 1  # the first one ends anywhere, so that not all end together
    while time.monotonic() < end_s:
        prompt = [generator.randrange(FIRST_TOKEN, load.vocab_size) for _ in range(load.prompt_tokens)]
        max_tokens = generator.randint(shortest, load.output_tokens[1])
        shortest = load.output_tokens[0]
        async with client.stream(prompt, max_tokens=max_tokens, ignore_eos=True) as stream:
            async for chunk in stream:
                received.record_tokens(chunk.num_tokens)


def delivery_of(load: Load, worker: Sequence[WorkerMoments], received: Received) -> Delivery:
    """Summarise a load, without its first second of prompts and the time after the last request's start."""
    begin_ns = received.at_ns[0] + int(min(1.0, load.seconds / 4) * 1e9)
    end_ns = received.at_ns[0] + int(load.seconds * 1e9)
    made = list(accumulate(step.num_samples for step in worker))
    taken = list(accumulate(received.num_tokens))
    if made[-1] != taken[-1]:
        raise ValueError(f"{made[-1]} tokens were made, but {taken[-1]} read, so tokens cannot be matched by count")
    lags_ns, ends_ns = [], []
    num_tokens = 0
    for step, total in zip(worker, made, strict=True):
        if step.num_samples and begin_ns <= step.ended_ns < end_ns:
            read_ns = received.at_ns[bisect_left(taken, total)]
            lags_ns.append(read_ns - step.ended_ns)
            ends_ns.append(step.ended_ns)
            num_tokens += step.num_samples
    thirds = [lags_ns[len(lags_ns) * part // 3 : len(lags_ns) * (part + 1) // 3] for part in range(3)]
    slope = linear_regression([(at - ends_ns[0]) / 1e9 for at in ends_ns], [lag / 1e6 for lag in lags_ns]).slope
    seconds = (ends_ns[-1] - ends_ns[0]) / 1e9
    return Delivery(
        seconds=round(seconds, 3),
        tokens_per_s=round(num_tokens / seconds, 1),
        lag=spread_of(lags_ns),
        lag_p99_by_third=[spread_of(third).p99 for third in thirds],
        lag_growth_ms_per_s=round(slope, 4),
    )
