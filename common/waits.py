"""Waits on the event loop: for an event, for so long, between attempts, and for the end of cancelled tasks.

Also timers and limits for what others send, which are not hastened while our own loop is blocked.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

TURNS = 4  # of the event loop, in which a time passes that is not to pass while the loop is blocked


class TimerInTurns:
    """Calls once, after seconds that pass in turns of the running event loop.

    While the loop is blocked, what others have sent lies unread, and a plain timer that is overdue then calls before it
    is read. Of these seconds one turn passes at most while the loop is blocked.
    """

    def __init__(self, seconds: float, call: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._turn_s = seconds / TURNS
        self._call = call
        self._num_left = TURNS - 1  # turns after the present one
        self._turn = self._loop.call_later(self._turn_s, self._end_turn)

    def cancel(self) -> None:
        """Call nobody any more, and let go of whom it would have called, who may have this timer."""
        self._turn.cancel()
        self._call = _call_nobody

    def cancelled(self) -> bool:
        """True if it was cancelled."""
        return self._turn.cancelled()

    def when(self) -> float:
        """Time on the loop's clock before which it does not call."""
        return self._turn.when() + self._num_left * self._turn_s

    def _end_turn(self) -> None:
        if self._num_left:
            self._num_left -= 1
            self._turn = self._loop.call_later(self._turn_s, self._end_turn)
        else:
            self._call()


def _call_nobody() -> None:
    pass


@asynccontextmanager
async def limit_in_turns(seconds: float) -> AsyncIterator[None]:
    """Limit the time that something takes, as `asyncio.timeout` does, by a timer in turns. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = TimerInTurns(seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()


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
