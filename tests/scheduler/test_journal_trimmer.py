"""Trims of the journal: when one is due, up to where, and what becomes of one that the store does not answer."""

import asyncio

from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import JOURNAL_START, EntryId
from scheduler_svc.journal.trimmer import Trimmer
from tests.patience import patient


class SlowlyTrimmedStore(MemoryStore):
    """Knows which trims were begun; they take as long as the test needs."""

    def __init__(self) -> None:
        super().__init__()
        self.trims: list[EntryId] = []
        self.num_cancelled = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def trim(self, oldest: EntryId) -> None:
        self.trims.append(oldest)
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


async def write_entries(trimmer: Trimmer, first: int, last: int) -> None:
    """Write entries with these numbers, each the oldest that is needed by then."""
    for number in range(first, last + 1):
        trimmer.trim_if_due(number, EntryId(1, number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_trim_is_due_after_every_so_many_entries_and_goes_up_to_the_oldest_needed() -> None:
    store = SlowlyTrimmedStore()
    trimmer = Trimmer(store, 3)
    assert trimmer.trimmed_to == JOURNAL_START
    await write_entries(trimmer, 1, 8)
    assert store.trims == [EntryId(1, 3), EntryId(1, 6)]
    assert trimmer.trimmed_to == EntryId(1, 6)


async def test_a_trim_is_due_after_fewer_entries_that_are_large() -> None:
    store = SlowlyTrimmedStore()
    trimmer = Trimmer(store, 100, every_bytes=1000)
    for number, entry_bytes in enumerate([400, 400, 400, 1, 999, 0, 0], 1):
        trimmer.trim_if_due(number, EntryId(1, number), entry_bytes)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert store.trims == [EntryId(1, 3), EntryId(1, 5)]


async def test_one_trim_is_under_way_at_a_time() -> None:
    store = SlowlyTrimmedStore()
    trimmer = Trimmer(store, 3)
    store.may_end.clear()
    await write_entries(trimmer, 1, 10)
    assert store.trims == [EntryId(1, 3)]
    assert trimmer.trimmed_to == EntryId(1, 3)
    store.may_end.set()
    await write_entries(trimmer, 11, 14)
    assert store.trims[1:] == [EntryId(1, 12)]


async def test_closing_ends_a_trim_that_the_store_does_not_answer() -> None:
    store = SlowlyTrimmedStore()
    trimmer = Trimmer(store, 1)
    await trimmer.close()  # there is none yet
    store.may_end.clear()
    await write_entries(trimmer, 1, 1)
    async with asyncio.timeout(patient(10.0)):
        await trimmer.close()
    assert store.num_cancelled == 1
