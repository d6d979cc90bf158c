"""Writer of the journal: how it takes an epoch, and what it makes of a store that has lost entries of its own."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.journal_writer import JournalWriter
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import (
    JOURNAL_START,
    EntryId,
    FencedError,
    JournalLostError,
    StaleEntryError,
    StoredEntry,
    StoreFlushedError,
    StoreUnavailableError,
)
from tests.patience import patient
from tests.scheduler.journal_setup import admission, running_journal, until


class WatchedStore(MemoryStore):
    """Answers nothing while `is_away`; knows how it was asked for entries."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.num_counts = 0
        self.loses_on_read = 0  # entries, with the next read, which fails
        self.urgent_reads: list[bool] = []
        self.num_read = 0  # entries

    async def next_epoch(self) -> int:
        self.num_counts += 1
        self._check()
        return await super().next_epoch()

    async def last_entry_id(self) -> EntryId | None:
        self._check()
        return await super().last_entry_id()

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False) -> Sequence[StoredEntry]:
        await self._begin_read(is_urgent=is_urgent)
        found = await super().read_entries(first, limit)
        self.num_read += len(found)
        return found

    async def first_entry_id(self, first: EntryId, *, is_urgent: bool = False) -> EntryId | None:
        await self._begin_read(is_urgent=is_urgent)
        return await super().first_entry_id(first)

    async def _begin_read(self, *, is_urgent: bool) -> None:
        self.urgent_reads.append(is_urgent)
        if num_lost := self.loses_on_read:
            self.loses_on_read = 0
            await lose_end(self, num_lost)
            raise StoreUnavailableError("replaced")

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")


async def lose_end(store: MemoryStore, num_lost: int) -> None:
    """Lose the last entries, as a server that was replaced by a lagging copy."""
    kept = (await store.read_entries(JOURNAL_START, 1000))[:-num_lost]
    store.clear()
    for each in kept:
        assert each.payload is not None
        await store.append(each.entry_id, each.payload, create=True)


async def test_an_epoch_is_tried_for_eight_times_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)
    store = WatchedStore()
    store.is_away = True
    with pytest.raises(StoreUnavailableError, match="away"):
        await JournalWriter(store, "us", late_s=1.0).take_epoch()
    assert store.num_counts == 8
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


async def test_an_epoch_is_later_than_the_counter_of_the_store() -> None:
    store = MemoryStore()
    await store.raise_epoch(1 << 52)
    assert await JournalWriter(store, "us", late_s=1.0).take_epoch() > 1 << 52


async def test_an_idle_leader_that_was_without_the_store_recovers_with_its_next_answer() -> None:
    store = WatchedStore()
    async with running_journal(store, probe_every_s=0.001) as journal:
        store.is_away = True
        await until(lambda: journal.stats.degraded)
        store.is_away = False
        await until(lambda: not journal.stats.degraded)
        assert journal.stats.num_recreated == 0


async def test_a_look_back_is_as_urgent_as_an_entry() -> None:
    store = WatchedStore()
    async with running_journal(store, probe_every_s=0.0) as journal:
        await journal.admit(admission(1))
        store.urgent_reads.clear()
        await journal.admit(admission(2))
        assert store.urgent_reads == [True]


async def test_an_entry_is_not_put_behind_a_gap_where_the_store_was_replaced_during_a_look_back() -> None:
    store = WatchedStore()
    async with running_journal(store, probe_every_s=0.0) as journal:
        for sequence in (1, 2, 3):
            await journal.admit(admission(sequence))
        store.loses_on_read = 1  # the last entry; what is looked back at is the one before
        await journal.admit(admission(4))
        assert store.loses_on_read == 0 and journal.stats.num_recreated == 1
        stored = await store.read_entries(JOURNAL_START, 99)
        entries = [pb.JournalEntry.FromString(each.payload or b"") for each in stored]
        again = entries[max(number for number, entry in enumerate(entries) if entry.HasField("leader_start")) :]
        restated = [each.admission.sequence for entry in again for each in entry.restatements]
        assert restated == [1, 2, 3] and [each.sequence for each in again[-1].admissions] == [4]


async def test_the_store_is_degraded_until_all_that_lives_is_restated() -> None:
    store = MemoryStore()
    async with running_journal(store, probe_every_s=1000.0) as journal:
        await journal.admit(admission(1))
        before = journal.stats.entries
        changes: list[tuple[bool, int]] = []
        journal.health.on_change = lambda is_degraded: changes.append((is_degraded, journal.stats.entries - before))
        store.clear()
        journal.probe_soon()
        await until(lambda: len(changes) == 2)
        assert changes == [(True, 0), (False, 3)]  # LeaderStart, the restatement, LeaderReady


async def test_a_leader_that_begins_again_twice_takes_its_own_entries_for_no_other_leader() -> None:
    store = MemoryStore()
    async with running_journal(store, probe_every_s=1000.0) as journal:
        await journal.admit(admission(1))
        store.clear()
        for number in (1, 2, 3):
            journal.probe_soon()
            await until(lambda number=number: journal.stats.num_recreated == number and not journal.stats.degraded)  # type: ignore[misc]
            await journal.admit(admission(1 + number))
            await lose_end(store, 1)
        await journal.admit(admission(5))


async def test_a_leader_that_holds_nothing_ends_at_once_where_a_later_one_begins_in_an_emptied_store() -> None:
    store = MemoryStore()
    journal = Journal(store, leader_id="older", probe_every_s=1000.0, unready_s=1000.0)
    await journal.open()
    running = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready)
    store.clear()
    await Journal(store, leader_id="newer").open(after_epoch=journal.stats.epoch)
    journal.probe_soon()
    with pytest.raises(FencedError, match="began the lost journal again"):
        await asyncio.wait_for(running, patient(10.0))


async def test_a_later_leader_is_seen_to_be_ready_however_much_it_restated_before() -> None:
    store = WatchedStore()
    journal = Journal(store, leader_id="older", probe_every_s=1000.0, unready_s=1000.0)
    epoch = await journal.open()
    running = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready)
    start, ready = pb.JournalEntry(leader_start=pb.LeaderStart()), pb.JournalEntry(leader_ready=pb.LeaderReady())
    restated = pb.JournalEntry(restatements=[pb.Restatement(admission=admission(1))])
    for seq, entry in enumerate([start, *[restated] * 6, ready]):  # with the last of the older one a page and one more
        await store.append(EntryId(epoch + 1, seq), entry.SerializeToString())
    journal.probe_soon()
    with pytest.raises(FencedError, match="newer scheduler took over"):
        await asyncio.wait_for(running, patient(10.0))
    assert store.urgent_reads == [True, True]  # as urgent as an entry
    assert store.num_read == 9  # each once


async def test_a_journal_is_begun_again_as_often_as_others_come_in_between() -> None:
    class Contended(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.refusals: list[Exception] = []  # of the next entries

        async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
            if self.refusals:
                raise self.refusals.pop(0)
            await super().append(entry_id, payload, create=create)

    store = Contended()
    writer = JournalWriter(store, "us", late_s=1.0)
    epoch = await writer.take_epoch()
    await writer.write_ready()
    store.clear()
    store.refusals = [StaleEntryError("equal or smaller"), StoreFlushedError("gone again")]
    await writer.begin_again()
    (begun,) = await store.read_entries(JOURNAL_START, 10)
    assert begun.entry_id == EntryId(writer.epoch, 0) == writer.last_id and writer.epoch > epoch
    assert (writer.num_recreated, store.refusals) == (1, [])


async def test_the_time_without_the_store_ends_with_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    store = MemoryStore()
    writer = JournalWriter(store, "us", late_s=1.0)
    await writer.take_epoch()
    for answer in (writer.write_ready, writer.probe, lambda: writer.write(b"")):
        now_s += 5.0
        assert writer.silent_s() == 5.0
        await answer()
        assert writer.silent_s() == 0.0
    store.clear()
    now_s += 5.0
    await writer.begin_again()
    assert writer.silent_s() == 5.0
    await writer.write_ready()
    assert writer.silent_s() == 0.0


async def test_the_time_of_a_write_is_a_moving_average_and_all_of_them_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TimedStore(MemoryStore):
        now_ns = write_ns = 0

        async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
            self.now_ns += self.write_ns
            await super().append(entry_id, payload, create=create)

    store, averages = TimedStore(), list[int]()
    monkeypatch.setattr(time, "monotonic_ns", lambda: store.now_ns)
    writer = JournalWriter(store, "us", late_s=1.0)
    await writer.take_epoch()
    for store.write_ns in (1000, 2000, 1100):
        await writer.write(b"")
        averages.append(writer.write_ns)
    assert averages == [1000, 1100, 1100]
    assert sum(writer.write_s.counts) == 3
    assert writer.write_s.sum == pytest.approx(4.1e-6)


def test_a_journal_that_is_not_open_has_no_epoch() -> None:
    assert Journal(MemoryStore(), leader_id="us").stats.epoch == 0


@pytest.mark.parametrize(
    ("has_lost", "says_all_again", "error"),
    [(False, False, FencedError), (True, True, FencedError), (True, False, JournalLostError)],
)
async def test_a_leader_that_was_never_ready_ends_if_a_later_one_knows_as_much(
    has_lost: bool, says_all_again: bool, error: type[Exception]
) -> None:
    store = MemoryStore()
    writer = JournalWriter(store, "us", late_s=1.0, unready_s=0.0)
    await writer.take_epoch()
    if has_lost:
        store.clear()
        await writer.begin_again()
    await JournalWriter(store, "later", late_s=1.0).take_epoch(writer.epoch, says_all_again=says_all_again)
    with pytest.raises(error):
        await writer.write_ready()


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_lost_journal_is_left_to_a_leader_of_the_very_next_epoch_if_it_is_ready(is_ready: bool) -> None:
    store = MemoryStore()
    writer = JournalWriter(store, "us", late_s=1.0)
    epoch = await writer.take_epoch()
    await writer.write_ready()
    store.clear()
    restated = pb.JournalEntry(restatements=[pb.Restatement(admission=admission(1))])
    ready = pb.JournalEntry(leader_ready=pb.LeaderReady())
    for seq, entry in enumerate([pb.JournalEntry(leader_start=pb.LeaderStart()), ready if is_ready else restated]):
        await store.append(EntryId(epoch + 1, seq), entry.SerializeToString(), create=True)
    if is_ready:
        with pytest.raises(FencedError, match="newer scheduler took over"):
            await writer.begin_again()
    else:
        await writer.begin_again()
        assert writer.epoch > epoch + 1


async def test_a_lost_journal_is_begun_again_in_a_later_epoch_though_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, now_ns = MemoryStore(), time.time_ns()
    writer = JournalWriter(store, "us", late_s=1.0)
    epoch = await writer.take_epoch()
    store.clear()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns - 3_600_000_000_000)
    await writer.begin_again()
    assert writer.epoch > epoch


async def test_an_entry_is_one_command_again_once_the_store_has_answered() -> None:
    store = WatchedStore()
    writer = JournalWriter(store, "us", late_s=1.0)
    await writer.take_epoch()
    store.is_away = True
    probing = asyncio.create_task(writer.probe())
    await until(lambda: writer.health.is_degraded)
    store.is_away = False
    await probing
    num_commands = writer.num_commands
    await writer.write(b"")
    await writer.write(b"")
    assert writer.num_commands == num_commands + 2
    await writer.probe()
    assert writer.num_commands == num_commands + 3
