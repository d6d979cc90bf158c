"""Trims of the journal: when one is due, up to where, and what becomes of one that the store does not answer."""

import asyncio

from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import JOURNAL_START, EntryId
from scheduler_svc.journal.trimmer import Trimmer
from tests.patience import patient
from tests.scheduler.journal_setup import admission, until


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


async def test_what_was_read_counts_as_written_for_the_first_trim_alone() -> None:
    store = SlowlyTrimmedStore()
    trimmer = Trimmer(store, 5, every_bytes=1000)
    trimmer.count_read(3, 10)
    await write_entries(trimmer, 1, 6)
    assert store.trims == [EntryId(1, 2)]
    await write_entries(trimmer, 7, 7)
    assert store.trims == [EntryId(1, 2), EntryId(1, 7)]
    trimmer.count_read(0, 1000)
    await write_entries(trimmer, 8, 8)
    assert store.trims[2:] == [EntryId(1, 8)]


async def test_lives_too_short_to_trim_what_they_write_trim_what_they_have_read() -> None:
    store = MemoryStore()
    for life in range(8):
        journal = Journal(store, leader_id=f"{life}")
        await journal.open()
        async for _ in journal.read():
            pass
        running = asyncio.create_task(journal.run())
        await until(lambda journal=journal: journal.is_ready)  # type: ignore[misc]
        for number in range(300):  # beside LeaderStart and LeaderReady
            await journal.admit(admission(number))
            journal.forget(number)
        await journal.close()
        await running
        assert len(await store.read_entries(JOURNAL_START, 10_000)) < 2 * 512 + 302


async def test_a_short_life_trims_no_further_than_is_needed() -> None:
    store = MemoryStore()
    needed: EntryId | None = None
    for life in range(4):
        journal = Journal(store, leader_id=f"{life}")
        await journal.open()
        async for entry_id, entry in journal.read():
            if any(each.sequence == 200 for each in entry.admissions):
                needed = entry_id
        if needed is not None:
            journal.keep_entry(200, needed, lambda entry: None)
        running = asyncio.create_task(journal.run())
        await until(lambda journal=journal: journal.is_ready)  # type: ignore[misc]
        for number in range(300):
            await journal.admit(admission(number + 1000 * life))
            if number + 1000 * life != 200:
                journal.forget(number + 1000 * life)
        await journal.close()
        await running
    (first,) = await store.read_entries(JOURNAL_START, 1)
    assert first.entry_id == needed
