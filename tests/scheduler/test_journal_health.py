"""Health of the store: degraded after a refusal, or when an answer is late by turns of our own event loop."""

import asyncio
import time

from structlog.testing import capture_logs

from scheduler_svc.journal.journal_health import JournalHealth
from tests.patience import patient

LATE_S = 0.2


async def test_an_answer_is_late_after_its_time_and_not_before() -> None:
    health = JournalHealth(LATE_S)
    changes: list[bool] = []
    health.on_change = changes.append
    began_s = time.monotonic()
    with health.asking():
        async with asyncio.timeout(patient(10.0)):
            await health.trouble
    assert time.monotonic() - began_s >= 0.9 * LATE_S
    assert health.is_degraded and changes == [True]


async def test_who_was_answered_in_time_waits_for_nothing_more() -> None:
    health = JournalHealth(LATE_S)
    with health.asking():
        await asyncio.sleep(0)
    await asyncio.sleep(1.5 * LATE_S)
    assert not health.is_degraded


async def test_another_answer_is_waited_for_as_long() -> None:
    health = JournalHealth(LATE_S)
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    began_s = time.monotonic()
    assert not await health.is_in_time(answer)
    assert time.monotonic() - began_s >= 0.9 * LATE_S
    answer.set_result(None)
    assert await health.is_in_time(answer)
    assert not health.is_degraded


async def test_trouble_is_told_once_and_ends_with_the_next_answer() -> None:
    health = JournalHealth(LATE_S)
    before = health.trouble
    health.record_answer()  # of a store that is well
    changes: list[bool] = []
    with capture_logs() as logs:
        health.record_trouble("refused")
        health.on_change = changes.append
        health.record_trouble("refused")
        assert before.done() and health.trouble is before
        assert health.is_degraded
        health.record_answer()
    assert changes == [False]
    assert [line.get("reason") for line in logs] == ["refused", None]
    assert logs[-1]["after_s"] < patient(10.0)
    assert not health.is_degraded and not health.trouble.done()


async def test_who_asks_for_the_trouble_while_there_is_some_need_not_wait() -> None:
    health = JournalHealth(LATE_S)
    health.record_trouble("refused")
    assert health.trouble.done()


async def test_what_turns_out_to_be_the_trouble_is_logged_though_it_began_as_another() -> None:
    """Such as a connection that is cut, and a password that is asked for at the next."""
    health = JournalHealth(LATE_S)
    with capture_logs() as logs:
        for reason in ("connection lost", "it asks for a password", "connection lost", *map(str, range(99))):
            health.record_trouble(reason)
        assert len(logs) == 8, "each reason once, and not as many as one likes"
        assert [line["reason"] for line in logs][:3] == ["connection lost", "it asks for a password", "0"]
        health.record_answer()
        health.record_trouble("it asks for a password")
    assert logs[-1] == {
        "event": "journal degraded: output waits for the store",
        "log_level": "warning",
        "reason": "it asks for a password",
    }
