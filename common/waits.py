"""Waits on the event loop: for an event, for so long, between attempts, and for the end of cancelled tasks."""

import asyncio
from collections.abc import Iterator
from typing import Any


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event. False: it was not set in time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def growing_pauses(first_s: float = 0.05, longest_s: float = 1.0) -> Iterator[float]:
    """Yield seconds to wait between attempts, for ever: each pause is twice the one before, up to the longest."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


async def wait_unless_failed(event: asyncio.Event, task: "asyncio.Task[Any]") -> None:
    """Wait for an event, beside a task that lasts as long. Raises what the task ends with before."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        await waiting
    finally:
        waiting.cancel()


async def end_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks, and return once they have ended, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
