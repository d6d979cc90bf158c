"""A thread whose work comes from many owners, through an event loop that has other work."""

import asyncio
import threading

import pytest

from scheduler_svc.text.shared_thread import SharedThread
from tests.patience import patient


async def test_the_work_of_an_owner_is_done_while_the_event_loop_does_other_work() -> None:
    """Regression: each began when the loop had heard of the one before, so a burst of prompts took seconds."""
    thread = SharedThread("works")
    is_last_done = threading.Event()
    works = [asyncio.create_task(thread.run("one", lambda: None)) for _ in range(20)]
    works.append(asyncio.create_task(thread.run("one", is_last_done.set)))
    await asyncio.sleep(0)  # each has begun
    assert is_last_done.wait(patient(20))
    await asyncio.gather(*works)


async def test_an_error_is_that_of_its_work_and_nothing_is_kept_of_an_owner_whose_work_is_done_or_given_up() -> None:
    thread = SharedThread("works")
    is_first_begun, may_go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def wait() -> None:
        is_first_begun.set()
        may_go_on.wait()

    def fail() -> None:
        raise ValueError("as it should")

    first = asyncio.create_task(thread.run("one", wait))
    given_up = [asyncio.create_task(thread.run(owner, done.append, owner)) for owner in ("one", "two")]
    failing = asyncio.create_task(thread.run("two", fail))
    last = asyncio.create_task(thread.run("three", done.append, "three"))
    await asyncio.sleep(0)
    assert is_first_begun.wait(patient(20))
    for each in given_up:
        each.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(ValueError, match="as it should"):
        await failing
    await asyncio.gather(first, last)
    assert done == ["three"] and not thread._works
