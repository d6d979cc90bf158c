"""Requests over the SDK: once undisturbed, as the reference, and then without pause while things happen.

Knows an address, not where the services run.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import quire
from tests.compose.engine import SmokeError
from tests.equality import EqualityReport, assert_equal_greedy

PROMPTS = (
    "Once upon a time",
    "One day, a little girl",
    "In the morning",
    "There was a small dog",
    "It was raining",
    "The old man",
    "A boy and his sister",
    "After lunch",
)
# Each output has a length of its own: requests of a worker that end all at once would leave it idle when it is killed.
NUM_TOKENS = tuple(range(160, 160 + 16 * len(PROMPTS), 16))
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy output of each prompt, and by how much each token was ahead of the second best."""

    tokens: list[tuple[int, ...]]
    margins: list[list[float]]
    texts: list[str]


class Load:
    """Outputs of the requests that have finished while the load was on, by prompt."""

    def __init__(self) -> None:
        self.outputs: list[list[tuple[int, ...]]] = [[] for _ in PROMPTS]
        self._grown = asyncio.Condition()

    @property
    def num_rounds(self) -> int:
        """Number of times that every prompt has finished."""
        return min(map(len, self.outputs))

    async def add(self, index: int, output: tuple[int, ...]) -> None:
        """Notes an output of a prompt."""
        self.outputs[index].append(output)
        async with self._grown:
            self._grown.notify_all()

    async def wait_rounds(self, number: int, timeout_s: float = 120.0) -> None:
        """Wait until every prompt has finished this often. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s), self._grown:
            await self._grown.wait_for(lambda: self.num_rounds >= number)

    def compare(self, reference: Reference) -> EqualityReport:
        """Raises AssertionError unless every output equals the reference."""
        counts = [len(each) for each in self.outputs]
        return assert_equal_greedy(
            [tokens for tokens, count in zip(reference.tokens, counts, strict=True) for _ in range(count)],
            [margins for margins, count in zip(reference.margins, counts, strict=True) for _ in range(count)],
            [output for each in self.outputs for output in each],
        )


async def generate(client: quire.AsyncClient, index: int, salt: str) -> quire.Completion:
    """One greedy request of a prompt. A salt of its own keeps it from being drawn to where its prefix is cached."""
    return await client.generate(
        PROMPTS[index], max_tokens=NUM_TOKENS[index], temperature=0, ignore_eos=True, logprobs=2, cache_salt=salt
    )


async def run_reference(client: quire.AsyncClient) -> Reference:
    """Complete all prompts at once."""
    done = await asyncio.gather(*(generate(client, index, "reference") for index in range(len(PROMPTS))))
    return Reference(
        [each.token_ids for each in done],
        [[_margin(logprobs) for logprobs in each.logprobs] for each in done],
        [each.text for each in done],
    )


@asynccontextmanager
async def running_load(client: quire.AsyncClient) -> AsyncIterator[Load]:
    """Keep one request of each prompt in flight; at the end wait for those in flight."""
    load, ending = Load(), asyncio.Event()

    async def repeat(index: int) -> None:
        while not ending.is_set():
            salt = f"load {len(load.outputs[index])}"
            await load.add(index, (await generate(client, index, salt)).token_ids)

    async with asyncio.TaskGroup() as tasks:
        for index in range(len(PROMPTS)):
            tasks.create_task(repeat(index))
        yield load
        ending.set()


async def until_stats(
    client: quire.AsyncClient, what: str, is_so: Callable[[quire.Stats], bool], timeout_s: float = 120.0
) -> quire.Stats:
    """Poll until the condition holds. Raises SmokeError after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not is_so(stats := await client.stats()):
        if time.monotonic() > deadline:
            raise SmokeError(f"not within {timeout_s:.0f} s: {what}; workers: {spelled(stats.workers)}")
        await asyncio.sleep(_POLL_S)
    return stats


def spelled(workers: Sequence[quire.WorkerStats]) -> str:
    """Each worker and how many steps it took."""
    return ", ".join(f"{each.worker_id} took {each.num_steps} steps" for each in workers) or "none"


def _margin(logprobs: quire.TokenLogprobs) -> float:
    (_, best), (_, second) = logprobs.top[:2]
    return best - second
