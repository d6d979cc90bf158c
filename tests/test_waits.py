"""Waits between attempts and for an event."""

import asyncio
from itertools import islice

import pytest

from common.waits import end_tasks, growing_pauses, is_set_within, wait_unless_failed


def test_pauses_grow_twofold_up_to_the_longest() -> None:
    assert list(islice(growing_pauses(0.25, 1.5), 5)) == [0.25, 0.5, 1.0, 1.5, 1.5]


async def test_an_event_is_waited_for_and_no_longer_than_so_long() -> None:
    event = asyncio.Event()
    assert not await is_set_within(event, 0.001)
    event.set()
    assert await is_set_within(event, 0.0)


async def test_an_event_is_waited_for_while_a_task_lasts() -> None:
    event = asyncio.Event()
    lasting = asyncio.create_task(asyncio.sleep(3600))
    asyncio.get_running_loop().call_later(0.01, event.set)
    await wait_unless_failed(event, lasting)
    assert event.is_set() and not lasting.done()
    await end_tasks(lasting)


async def test_the_failure_of_the_task_ends_the_wait() -> None:
    async def fail() -> None:
        raise OSError("no more files")

    with pytest.raises(OSError, match="no more files"):
        await wait_unless_failed(asyncio.Event(), asyncio.create_task(fail()))
