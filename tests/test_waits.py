"""Waits between attempts, for an event and beside other work; timers and limits that a blocked loop does not hasten."""

import asyncio
import time
from itertools import islice

import pytest

from common.waits import TimerInTurns, before, end_tasks, growing_pauses, is_set_within, limit_in_turns, unless_failed
from tests.patience import patient


def test_pauses_grow_twofold_up_to_the_longest() -> None:
    assert list(islice(growing_pauses(0.25, 1.5), 5)) == [0.25, 0.5, 1.0, 1.5, 1.5]


async def test_an_event_is_waited_for_and_no_longer_than_so_long() -> None:
    event = asyncio.Event()
    assert not await is_set_within(event, 0.001)
    event.set()
    assert await is_set_within(event, 0.0)


async def test_work_is_done_while_other_work_lasts() -> None:
    event = asyncio.Event()
    lasting = asyncio.create_task(asyncio.sleep(3600))
    asyncio.get_running_loop().call_later(0.01, event.set)
    await unless_failed(event.wait(), [lasting])
    assert event.is_set() and not lasting.done()
    await end_tasks(lasting)


async def test_the_failure_of_other_work_ends_the_work() -> None:
    async def fail() -> None:
        raise OSError("no more files")

    with pytest.raises(OSError, match="no more files"):
        await unless_failed(asyncio.Event().wait(), [asyncio.create_task(fail())])
    await asyncio.sleep(0)  # for the cancellation to arrive
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_work_before_other_work_has_its_result_and_none_after_it() -> None:
    async def answer() -> int:
        return 42

    assert await before(answer(), asyncio.Event().wait()) == 42
    assert await before(asyncio.sleep(3600, "late"), answer()) is None
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_timer_in_turns_calls_once_after_its_time() -> None:
    loop, calls_s = asyncio.get_running_loop(), list[float]()
    began_s = loop.time()
    TimerInTurns(0.2, lambda: calls_s.append(loop.time()))
    async with asyncio.timeout(patient(20)):
        while not calls_s:  # noqa: ASYNC110 - of a timer
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert len(calls_s) == 1 and calls_s[0] - began_s > 0.19


async def test_a_cancelled_timer_in_turns_calls_nobody() -> None:
    calls: list[None] = []
    first, later = (TimerInTurns(0.04, lambda: calls.append(None)) for _ in range(2))
    first.cancel()
    await asyncio.sleep(0.02)  # in one of its turns, if not at its end
    calls.clear()
    later.cancel()
    assert first.cancelled() and later.cancelled()
    await asyncio.sleep(0.1)
    assert not calls


async def test_time_in_which_the_loop_is_blocked_is_no_time_of_a_timer_in_turns() -> None:
    calls: list[None] = []
    timer = TimerInTurns(patient(0.5), lambda: calls.append(None))
    time.sleep(patient(0.6))  # noqa: ASYNC251 - our own loop stands still: one turn at most
    for _ in range(9):
        await asyncio.sleep(0)
    assert not calls
    timer.cancel()


async def test_a_limit_in_turns_ends_what_takes_longer() -> None:
    with pytest.raises(TimeoutError):
        async with limit_in_turns(0.05):
            await asyncio.Event().wait()
    async with limit_in_turns(0.02):
        pass
    await asyncio.sleep(0.1)  # later than the limit, which no longer counts
