"""Disturbance beside the requests: others that are submitted and cancelled, and prefixes that are pinned and unpinned.

It is there to get in the way; what becomes of it is of no interest, but it must neither change an answer nor leave
anything behind.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import quire
from tests.e2e.pressure_load import Ask

MAX_LIFE_S = 0.5
MAX_PAUSE_S = 0.2
TASKS_OF_EACH = 2


@asynccontextmanager
async def disturbance(client: quire.AsyncClient, asks: Sequence[Ask], seed: int) -> AsyncIterator[None]:
    """Disturb until the end of the block; then none of it runs or is pinned any more."""
    rng = random.Random(seed)
    tasks = [asyncio.create_task(_come_and_go(client, asks, rng)) for _ in range(TASKS_OF_EACH)]
    tasks += [asyncio.create_task(_pin_and_unpin(client, f"pin{i}", asks, rng)) for i in range(TASKS_OF_EACH)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for pin in await client.list_prefixes():
            await client.unpin_prefix(pin.name)
        errors = [each for each in results if not isinstance(each, asyncio.CancelledError)]
        assert not errors, errors


async def _come_and_go(client: quire.AsyncClient, asks: Sequence[Ask], rng: random.Random) -> None:
    while True:
        ask = rng.choice(asks)
        try:
            async with client.stream(ask.prompt, **ask.params()) as stream, asyncio.timeout(rng.random() * MAX_LIFE_S):
                await stream.completion()
        except (TimeoutError, quire.InvalidRequestError, quire.OverloadedError):
            pass  # given up, or too large beside a pin
        await asyncio.sleep(rng.random() * MAX_PAUSE_S)


async def _pin_and_unpin(client: quire.AsyncClient, name: str, asks: Sequence[Ask], rng: random.Random) -> None:
    while True:
        prompt = rng.choice(asks).prompt
        try:
            async with asyncio.timeout(rng.random() * MAX_LIFE_S * 4):
                await client.pin_prefix(name, prompt[: rng.randint(1, len(prompt))])
        except (TimeoutError, quire.InvalidRequestError, quire.OverloadedError, quire.FailedPreconditionError):
            pass  # too slow, too short, in the way of what was accepted, or without a cache
        await asyncio.sleep(rng.random() * MAX_PAUSE_S)
        with suppress(quire.NotFoundError):
            await client.unpin_prefix(name)
