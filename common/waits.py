"""Waits on the event loop: for an event, for so long, and for the end of cancelled tasks."""

import asyncio
from typing import Any


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event. False: it was not set in time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def end_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks, and return once they have ended, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
