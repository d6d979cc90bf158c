"""Waits on the event loop: for an event, for work beside other work, between attempts, and for the end of tasks.

Also timers and limits for what others send, which are not hastened while our own loop is blocked.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

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


async def unless_failed(work: Coroutine[Any, Any, Any], others: Collection["asyncio.Future[None]"]) -> None:
    """Runs the work; if one of the others fails first, cancels it and raises that failure."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
        for each in (*others, task):
            if each.done():
                each.result()
    finally:
        task.cancel()


async def before(work: Coroutine[Any, Any, Result], *others: Coroutine[Any, Any, object]) -> Result | None:
    """Result of the work; None if one of the others returns first. What is not done then is cancelled."""
    task, ending = asyncio.create_task(work), [asyncio.create_task(each) for each in others]
    try:
        await asyncio.wait([task, *ending], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await end_tasks(task, *ending)


async def end_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks, and return once they have ended, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
