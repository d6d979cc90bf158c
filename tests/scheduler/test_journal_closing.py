"""End of a journal: what closing waits for, what it fails, and what a hand-over says."""

import asyncio

import pytest

from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId, StoreUnavailableError
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import Writer, admission, running_journal, until


async def test_closing_waits_until_the_store_takes_what_is_on_its_way() -> None:
    store = GatedStore()
    async with running_journal(store, close_timeout_s=1000.0) as journal:
        store.unavailable = True
        writer = Writer(journal)
        writer.append()
        await until(lambda: journal.stats.degraded)
        closing = asyncio.create_task(journal.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        store.unavailable = False
        await closing
        assert writer.durable == [0]


async def test_closing_ends_the_wait_for_a_store_that_stays_away() -> None:
    store = GatedStore()
    journal = Journal(store, leader_id="test", close_timeout_s=0.0)
    await journal.open()
    running = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready)
    store.unavailable = True
    accepted = journal.admit(admission(1))
    await until(lambda: journal.stats.degraded)
    await journal.close()
    assert running.done()
    assert isinstance(accepted.exception(), StoreUnavailableError)


async def test_closing_ends_a_trim_that_the_store_does_not_answer() -> None:
    class Untrimmed(MemoryStore):
        trimming: "asyncio.Task[object] | None" = None

        async def trim(self, oldest: EntryId) -> None:
            self.trimming = asyncio.current_task()
            await asyncio.Event().wait()

    store = Untrimmed()
    async with running_journal(store, trim_every=1) as journal:
        await journal.admit(admission(1))
        await until(lambda: store.trimming is not None)
    assert store.trimming is not None
    assert store.trimming.cancelled()


async def test_closing_writes_what_a_journal_has_that_was_begun_just_now() -> None:
    journal = Journal(MemoryStore(), leader_id="test")
    await journal.open()
    running = asyncio.create_task(journal.run())
    accepted = journal.admit(admission(1))
    await journal.close()
    assert accepted.exception() is None
    await running


async def test_closing_fails_what_a_journal_has_that_was_never_begun() -> None:
    journal = Journal(MemoryStore(), leader_id="test")
    await journal.open()
    accepted = journal.admit(admission(1))
    await journal.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        await accepted


async def test_a_hand_over_that_the_store_has_not_is_none() -> None:
    store = GatedStore()
    async with running_journal(store, close_timeout_s=0.0) as journal:
        store.unavailable = True
        assert not await journal.hand_over()
        assert not await journal.hand_over()  # nor can a journal that has ended be handed over
