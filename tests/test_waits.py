"""Waits between attempts and for an event."""

import asyncio
from itertools import islice

from common.waits import growing_pauses, is_set_within


def test_pauses_grow_twofold_up_to_the_longest() -> None:
    assert list(islice(growing_pauses(0.25, 1.5), 5)) == [0.25, 0.5, 1.0, 1.5, 1.5]


async def test_an_event_is_waited_for_and_no_longer_than_so_long() -> None:
    event = asyncio.Event()
    assert not await is_set_within(event, 0.001)
    event.set()
    assert await is_set_within(event, 0.0)
