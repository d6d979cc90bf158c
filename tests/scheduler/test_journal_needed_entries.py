"""Entries that a journal keeps for what lives, and restates when too much was written behind them."""

import asyncio
from collections.abc import Sequence

from structlog.testing import capture_logs

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.needed_entries import NeededEntries, Restate, restating_alone
from scheduler_svc.journal.store import EntryId
from tests.scheduler.journal_setup import Writer, admission, entries_of, running_journal


async def write_entries(journal: Journal, number: int) -> None:
    """Entries with one token each."""
    writer = Writer(journal)
    for _ in range(number):
        writer.append()
        await writer.all_durable()


async def restated_in(store: MemoryStore, epoch: int) -> Sequence[int]:
    """Numbers of the entries of an epoch that restate a request."""
    entries = [(EntryId(*map(int, name.split("-"))), entry) for name, entry in await entries_of(store)]
    return [entry_id.seq for entry_id, entry in entries if entry.restatements and entry_id.epoch == epoch]


async def test_what_an_iteration_begins_is_needed_from_its_entry_on_until_it_is_forgotten() -> None:
    async with running_journal(MemoryStore()) as journal:
        is_durable = asyncio.Event()
        journal.append(
            pins=[pb.PinChange()],
            needed={"pin": lambda entry: entry.pins.append(pb.PinChange())},
            on_durable=is_durable.set,
        )
        assert (journal.stats.num_needed, journal.stats.oldest_needed) == (1, None)
        await is_durable.wait()
        assert (journal.stats.num_needed, journal.stats.oldest_needed) == (1, EntryId(journal.stats.epoch, 2))
        journal.forget("pin")
        assert (journal.stats.num_needed, journal.stats.oldest_needed) == (0, None)


async def test_a_request_is_restated_each_time_so_many_entries_were_written_behind_it() -> None:
    store = MemoryStore()
    async with running_journal(store, restate_entries=3) as journal:
        await journal.admit(admission(1))  # entry 2
        await write_entries(journal, 8)
        stats = journal.stats
    assert await restated_in(store, stats.epoch) == [6, 10]
    assert (stats.num_restated, stats.oldest_needed) == (2, EntryId(stats.epoch, 10))


async def test_the_entry_that_ends_an_epoch_restates_nothing() -> None:
    store = MemoryStore()
    async with running_journal(store, restate_entries=3) as journal:
        await journal.admit(admission(1))
        await write_entries(journal, 3)
        assert await journal.hand_over()
    assert not await restated_in(store, journal.stats.epoch)


async def test_what_lives_is_kept_from_where_it_was_restated_after_a_loss() -> None:
    store = MemoryStore()
    async with running_journal(store) as journal:
        await asyncio.gather(*(journal.admit(admission(sequence)) for sequence in (1, 2)))
        store.clear()
        with capture_logs() as logs:
            await write_entries(journal, 1)
        stats = journal.stats
    assert (stats.num_recreated, stats.oldest_needed) == (1, EntryId(stats.epoch, 1))
    assert [line["num_restated"] for line in logs if "num_restated" in line] == [2]
    assert await restated_in(store, stats.epoch) == [1]


async def test_entries_of_earlier_leaders_count_as_written_behind_what_they_left() -> None:
    store = MemoryStore()
    async with running_journal(store) as earlier:
        await earlier.admit(admission(1))
        await write_entries(earlier, 2)  # five with those that begin the epoch
    journal = Journal(store, leader_id="next", restate_entries=6)
    await journal.open()
    (admitted_id,) = [entry_id async for entry_id, entry in journal.read() if entry.admissions]
    journal.keep_entry(1, admitted_id, restating_alone(admission(1)))
    running = asyncio.create_task(journal.run())
    await write_entries(journal, 3)
    assert await restated_in(store, journal.stats.epoch) == [3]
    await journal.close()
    await running


def test_bytes_of_earlier_leaders_count_as_written_behind_what_they_left() -> None:
    needed = NeededEntries(restate_entries=1000, restate_bytes=100)
    needed.count_read(60)
    needed.keep_entry(1, EntryId(1, 1), restating_alone(admission(1)))
    needed.record_written([], EntryId(2, 1), 39)
    assert not needed.restate_due(pb.JournalEntry())
    needed.record_written([], EntryId(2, 2), 1)
    assert needed.restate_due(pb.JournalEntry()) == [1]


def restating_pin(token_bytes: int) -> Restate:
    """Restates a pin that takes eight bytes more in its entry."""
    return lambda entry: entry.pins.append(pb.PinChange(token_ids=bytes(token_bytes)))


def test_what_is_long_is_restated_in_several_entries() -> None:
    """Up to 256 KiB in one, except that after a loss at least four come together, unless they take 16 MiB."""
    needed = NeededEntries(restate_entries=1, restate_bytes=1 << 30)
    for key in range(9):
        needed.keep_entry(key, EntryId(1, key), restating_pin((64 << 10) - 8))
    assert [keys for _, keys in needed.restate_all()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    for key in range(9):
        needed.restate_by(key, restating_pin(8))
    assert [keys for _, keys in needed.restate_all()] == [[*range(9)]]
    for key in range(9):
        needed.restate_by(key, restating_pin((128 << 10) - 8))
    assert [keys for _, keys in needed.restate_all()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    needed.record_written([], EntryId(2, 1))
    entry = pb.JournalEntry()
    assert needed.restate_due(entry) == [0, 1]
    assert entry.ByteSize() == 256 << 10
    assert needed.num_restated == 2
    needed.restate_by(1, restating_pin(16 << 20))
    assert [keys for _, keys in needed.restate_all()] == [[0, 1], [2, 3, 4, 5], [6, 7, 8]]


def test_what_is_long_is_restated_behind_as_much_news_as_it_takes_itself() -> None:
    """Regression: a paused request of 42 MB was restated every 4,096 entries, for which all others stood still 3 s."""
    needed = NeededEntries(restate_entries=2, restate_bytes=1 << 30)
    needed.keep_entry("long", EntryId(1, 1), restating_pin((1 << 20) - 8))
    needed.keep_entry("next", EntryId(1, 2), restating_pin(8))
    for seq in (3, 4):
        needed.record_written([], EntryId(1, seq), 10)
    assert needed.restate_due(pb.JournalEntry()) == ["long"]  # how long it is, is not known before
    needed.record_written(["long"], EntryId(1, 5), 10)
    for seq in range(6, 100):
        due = needed.restate_due(pb.JournalEntry())
        assert due in ([], ["next"])
        needed.record_written(due, EntryId(1, seq), 10)
    assert needed.oldest == EntryId(1, 5)
    needed.record_written([], EntryId(1, 100), 1 << 20)
    assert needed.restate_due(pb.JournalEntry())[0] == "long"
