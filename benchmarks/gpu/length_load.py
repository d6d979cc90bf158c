"""Requests of given lengths, all sent at once through the SDK; their throughput and normalised latency.

Knows addresses and lengths; neither models nor processes.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.lengths import Dataset, Lengths, LengthSampler
from quire import AsyncClient

SEED = 0
_FIRST_TOKEN = 3  # those before it are special


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Prompt, and number of tokens to generate."""

    prompt: list[int]
    num_output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """A load from its first submission to its last end."""

    num_requests: int
    output_tokens: int
    seconds: float
    latencies_s: list[float]  # of each request, from the submission of all
    num_outputs: list[int]  # beside latencies_s

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def normalised_latency_s(self) -> float:
        """Mean over the requests of latency / output tokens, as the paper's section 6.1 defines it."""
        return fmean(seconds / number for seconds, number in zip(self.latencies_s, self.num_outputs, strict=True))


def requests_of(dataset: Dataset, num_requests: int, vocab_size: int, max_len: int | None = None) -> list[LoadRequest]:
    """Random tokens, so that no prefix is shared, always the same; `max_len` cuts both lengths, for smoke tests."""
    generator = random.Random(SEED)
    return [
        LoadRequest(
            prompt=[generator.randrange(_FIRST_TOKEN, vocab_size) for _ in range(each.num_input)],
            num_output=each.num_output,
        )
        for each in (_cut(each, max_len) for each in LengthSampler(dataset, SEED).draw(num_requests))
    ]


async def run_load(address: str, requests: Sequence[LoadRequest]) -> LoadOutcome:
    """Run every request to its length, after a short one that warms up the services."""
    async with AsyncClient(address) as client:
        await client.wait_ready(10.0)
        await client.generate(requests[0].prompt, max_tokens=2, temperature=0, ignore_eos=True)
        began_s = time.perf_counter()

        async def one(request: LoadRequest) -> float:
            completion = await client.generate(
                request.prompt, max_tokens=request.num_output, temperature=0, ignore_eos=True
            )
            assert len(completion.token_ids) == request.num_output, "a request ended before its length"
            return time.perf_counter() - began_s

        latencies_s = await asyncio.gather(*(one(request) for request in requests))
        seconds = time.perf_counter() - began_s
    num_outputs = [request.num_output for request in requests]
    return LoadOutcome(
        num_requests=len(requests),
        output_tokens=sum(num_outputs),
        seconds=seconds,
        latencies_s=list(latencies_s),
        num_outputs=num_outputs,
    )


def _cut(lengths: Lengths, max_len: int | None) -> Lengths:
    if max_len is None:
        return lengths
    return Lengths(min(lengths.num_input, max_len), min(lengths.num_output, max_len))
