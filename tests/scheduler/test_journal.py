"""The journal's promises to the engine, on a store in memory that the test can hold back."""

import asyncio
import time
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from common.arrays import unpack_int32, unpack_int64
from quire.v1 import inference_pb2
from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal import journal as journal_module
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.journal_entry import read_journal
from scheduler_svc.journal.leader_epochs import epoch_after
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import (
    JOURNAL_START,
    EntryId,
    FencedError,
    JournalLostError,
    StaleEntryError,
    StoreFlushedError,
    StoreUnavailableError,
)
from tests.patience import patient
from tests.scheduler.journal_setup import Writer, admission, entries_of, running_journal, tokens_of, until


class HeldStore(MemoryStore):
    """Takes an entry only when the test lets it: an XADD that is on its way for as long as the test needs."""

    def __init__(self) -> None:
        super().__init__()
        self.open_gate = asyncio.Event()
        self.open_gate.set()
        self.num_in_flight = 0
        self.most_in_flight = 0

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        await self.open_gate.wait()
        self.num_in_flight -= 1
        await super().append(entry_id, payload, create=create)


class FailingStore(MemoryStore):
    """Refuses or loses what the test says, one failure per attempt."""

    def __init__(self, failures: Sequence[Exception], *, after_append: bool) -> None:
        super().__init__()
        self.failures = list(failures)
        self.after_append = after_append

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        if entry_id.seq == 0 or not self.failures:
            await super().append(entry_id, payload, create=create)
            return
        if self.after_append:
            await super().append(entry_id, payload, create=create)
        raise self.failures.pop(0)


async def first_id(store: MemoryStore) -> EntryId:
    """The first entry left, once a trim that is due has run."""
    for _ in range(3):
        await asyncio.sleep(0)
    return (await store.read_entries(JOURNAL_START, 1))[0].entry_id


def delta_logprobs(delta: int, token_id: int) -> pb.DeltaLogprobs:
    return pb.DeltaLogprobs(delta=delta, logprobs=inference_pb2.TokenLogprobs(token_id=token_id, logprob=-1.0))


async def test_an_epoch_begins_with_a_leader_start_alone() -> None:
    store = MemoryStore()
    async with running_journal(store, leader_id="me") as journal:
        await journal.admit(admission(1))
    (first_id, first), (_, ready), (third_id, third) = await entries_of(store)
    epoch = journal.stats.epoch
    assert (first_id, first.leader_start.leader_id) == (f"{epoch}-0", "me")
    assert not first.admissions
    assert ready == pb.JournalEntry(leader_ready=pb.LeaderReady(), delta_sequences=b"", delta_tokens=b"")
    assert (third_id, [each.sequence for each in third.admissions]) == (f"{epoch}-2", [1])
    assert not third.HasField("leader_start")


async def test_what_piles_up_while_an_entry_is_in_flight_becomes_the_next_one() -> None:
    store = HeldStore()
    async with running_journal(store) as journal:
        store.open_gate.clear()
        writer = Writer(journal)
        writer.append()
        await until(lambda: store.num_in_flight == 1)
        writer.append(40)
        accepted = journal.admit(admission(2))
        assert journal.stats.pending == 42
        store.open_gate.set()
        await writer.all_durable()
        await accepted
        stats = journal.stats
    assert (stats.entries, stats.pending, stats.pending_bytes) == (
        4,
        0,
        0,
    )  # LeaderStart, LeaderReady, 1 token, 40 and 1
    assert store.most_in_flight == 1
    assert writer.durable == await tokens_of(store) == list(range(41))


async def test_callbacks_run_in_order_and_only_after_the_acknowledgement() -> None:
    store = HeldStore()
    async with running_journal(store) as journal:
        store.open_gate.clear()
        writer = Writer(journal)
        writer.append(3)
        accepted = journal.admit(admission(5))
        await until(lambda: store.num_in_flight == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert writer.durable == []
        assert not accepted.done()
        store.open_gate.set()
        await writer.all_durable()
        assert writer.durable == [0, 1, 2]
        assert accepted.done()


async def test_an_entry_keeps_all_that_an_iteration_brought() -> None:
    store = HeldStore()
    finish = pb.Finish(sequence=8, state=inference_pb2.REQUEST_STATE_FINISHED)
    done: list[str] = []
    async with running_journal(store) as journal:
        store.open_gate.clear()
        journal.append(sequences=[1], tokens=[10], on_durable=lambda: done.append("first"))
        await until(lambda: store.num_in_flight == 1)
        journal.append(
            sequences=[7, 8], tokens=[70, 80], logprobs=[delta_logprobs(1, 80)], on_durable=lambda: done.append("a")
        )
        journal.append(
            sequences=[7, 8],
            tokens=[71, 81],
            logprobs=[delta_logprobs(0, 71), delta_logprobs(1, 81)],
            finishes=[finish],
            on_durable=lambda: done.append("b"),
        )
        store.open_gate.set()
        await until(lambda: len(done) == 3)
    assert done == ["first", "a", "b"]
    _, entry = (await entries_of(store))[-1]
    assert list(unpack_int64(entry.delta_sequences)) == [7, 8, 7, 8]
    assert list(unpack_int32(entry.delta_tokens)) == [70, 80, 71, 81]
    assert [(each.delta, each.logprobs.token_id) for each in entry.delta_logprobs] == [(1, 80), (2, 71), (3, 81)]
    assert list(entry.finishes) == [finish]


async def test_a_long_pile_is_cut_into_several_entries() -> None:
    store = HeldStore()
    async with running_journal(store, max_entry_bytes=120) as journal:  # ten tokens of twelve bytes
        store.open_gate.clear()
        writer = Writer(journal)
        writer.append()
        await until(lambda: store.num_in_flight == 1)
        writer.append(25)
        store.open_gate.set()
        await writer.all_durable()
    sizes = [len(entry.delta_tokens) // 4 for _, entry in await entries_of(store)]
    assert sizes == [0, 0, 1, 10, 10, 5]
    assert writer.durable == list(range(26))


async def test_a_failing_callback_does_not_stop_the_others() -> None:
    def fail() -> None:
        raise RuntimeError("reader is gone")

    store = MemoryStore()
    with capture_logs() as logs:
        async with running_journal(store) as journal:
            journal.append(sequences=[1], tokens=[0], on_durable=fail)
            writer = Writer(journal)
            writer.append(2)
            await writer.all_durable()
    assert [log["event"] for log in logs] == ["a callback of the journal failed"]


async def test_a_callback_that_is_cancelled_ends_the_writing() -> None:
    def cancel() -> None:
        raise asyncio.CancelledError

    journal = Journal(MemoryStore(), leader_id="test")
    await journal.open()
    running = asyncio.create_task(journal.run())
    journal.append(sequences=[1], tokens=[0], on_durable=cancel)
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(StoreUnavailableError, match="closed"):
        await journal.admit(admission(1))


async def test_closing_writes_what_is_pending() -> None:
    store = MemoryStore()
    async with running_journal(store) as journal:
        accepted = journal.admit(admission(1))
        writer = Writer(journal)
        writer.append(5)
        await asyncio.sleep(0)
    assert accepted.done()
    assert accepted.exception() is None
    assert writer.durable == await tokens_of(store) == list(range(5))


async def test_closing_waits_for_what_is_on_its_way_and_for_nothing_else() -> None:
    store = HeldStore()
    async with running_journal(store, close_timeout_s=1000.0) as journal:
        store.open_gate.clear()
        writer = Writer(journal)
        writer.append()
        await until(lambda: store.num_in_flight == 1)
        closing = asyncio.create_task(journal.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        store.open_gate.set()
        await closing
        assert writer.durable == [0]


async def test_a_journal_with_nothing_to_write_ends_at_once_though_its_store_is_away() -> None:
    class Away(MemoryStore):
        is_away = False

        async def last_entry_id(self) -> EntryId | None:
            if self.is_away:
                raise StoreUnavailableError("gone")
            return await super().last_entry_id()

    store = Away()
    async with running_journal(store, probe_every_s=1000.0, close_timeout_s=1000.0) as journal:
        await journal.admit(admission(1))
        journal.forget(1)
        store.is_away = True
        journal.probe_soon()
        await until(lambda: journal.stats.degraded)
        await journal.close()


async def test_after_closing_nothing_is_accepted() -> None:
    async with running_journal(MemoryStore()) as journal:
        pass
    called: list[int] = []
    journal.append(sequences=[1], tokens=[1], on_durable=lambda: called.append(1))
    with pytest.raises(StoreUnavailableError, match="closed"):
        await journal.admit(admission(1))
    assert not called
    assert journal.stats.pending == 0


async def test_closing_gives_up_on_a_store_that_stays_away() -> None:
    store = FailingStore([StoreUnavailableError("gone")] * 1000, after_append=False)
    with capture_logs() as logs:
        async with running_journal(store, close_timeout_s=0.2) as journal:
            accepted = journal.admit(admission(1))
            later = [journal.admit(admission(sequence)) for sequence in (2, 3)]
            await until(lambda: journal.stats.degraded)
    for future in [accepted, *later]:
        with pytest.raises(StoreUnavailableError):
            await future
    assert logs[-1]["event"] == "journal closed with unwritten records"


async def test_a_lost_acknowledgement_is_looked_up_before_anything_else_is_sent() -> None:
    store = FailingStore([StoreUnavailableError("reply lost")], after_append=True)
    async with running_journal(store) as journal:
        writer = Writer(journal)
        writer.append()
        await writer.all_durable()
        writer.append()
        await writer.all_durable()
        assert not journal.stats.degraded
    assert [entry_id.partition("-")[2] for entry_id, _ in await entries_of(store)] == ["0", "1", "2", "3"]
    assert writer.durable == await tokens_of(store) == [0, 1]


async def test_an_entry_that_did_not_arrive_is_sent_again() -> None:
    store = FailingStore([StoreUnavailableError("MISCONF no disk"), StoreUnavailableError("OOM")], after_append=False)
    with capture_logs() as logs:
        async with running_journal(store) as journal:
            writer = Writer(journal)
            writer.append(2)
            await until(lambda: journal.stats.degraded)
            await writer.all_durable()
            assert not journal.stats.degraded
    assert await tokens_of(store) == [0, 1]
    assert [log["event"] for log in logs] == [
        "journal degraded: output waits for the store",
        "journal still degraded",
        "journal recovered",
    ]


async def test_an_id_that_someone_else_wrote_is_not_taken_for_ours() -> None:
    """Should two leaders ever hold one epoch, a refusal without a lost reply tells them apart."""
    store = MemoryStore()
    journal = Journal(store, leader_id="first")
    epoch = await journal.open()
    await store.append(EntryId(epoch, 1), b"someone else's")
    accepted = journal.admit(admission(1))
    with pytest.raises(FencedError, match="newer scheduler took over"):
        await journal.run()
    with pytest.raises(FencedError):
        await accepted


async def test_a_newer_leader_ends_the_older_one_for_good() -> None:
    store = MemoryStore()
    older, newer = Journal(store, leader_id="older"), Journal(store, leader_id="newer")
    assert await older.open() < await newer.open()
    await newer.begin()
    accepted = older.admit(admission(1))
    older_writer = Writer(older)
    older_writer.append()
    with pytest.raises(FencedError, match=f"it wrote {newer.stats.epoch}-1"):
        await older.run()
    with pytest.raises(FencedError):
        await accepted
    with pytest.raises(FencedError):
        await older.admit(admission(2))
    await older.close()
    assert older_writer.durable == []
    seen = [entry_id.split("-") for entry_id, _ in await entries_of(store)]
    assert [(int(epoch) == newer.stats.epoch, seq) for epoch, seq in seen] == [(False, "0"), (True, "0"), (True, "1")]


async def test_an_older_leader_waits_for_a_newer_one_that_can_read_all_it_wrote() -> None:
    store = MemoryStore()
    older, newer = Journal(store, leader_id="older", unready_s=1000.0), Journal(store, leader_id="newer")
    await older.open()
    running = asyncio.create_task(older.run())
    await until(lambda: older.is_ready)
    await older.admit(admission(1))
    await newer.open()
    coming = older.admit(admission(2))
    await until(lambda: older.stats.degraded)
    await newer.begin()
    with pytest.raises(FencedError, match="newer scheduler took over"):
        await running
    with pytest.raises(FencedError):
        await coming
    assert older.stats.num_recreated == 0


async def test_an_epoch_is_never_taken_twice_though_its_counter_is_lost() -> None:
    store = MemoryStore()
    late = time.time_ns() << 2  # of a leader whose clock was far ahead of ours
    await store.append(EntryId(late, 7), b"", create=True)
    epoch = await Journal(store, leader_id="test").open()
    assert epoch > late
    assert await store.next_epoch() > epoch


async def test_no_two_leaders_share_an_epoch_though_the_store_forgets_all_and_the_clock_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    epochs = [await Journal(MemoryStore(), leader_id=leader_id).open() for leader_id in ("a", "b", "c")]
    assert len(set(epochs)) == 3
    store = MemoryStore()
    assert await Journal(store, leader_id="a").open() < await Journal(store, leader_id="b").open()
    now_ns -= 3_600_000_000_000
    assert await Journal(store, leader_id="c").open() > max(epochs)
    first, second = [await Journal(MemoryStore(), leader_id=each).open(after_epoch=max(epochs)) for each in ("c", "d")]
    assert min(first, second) > max(epochs)
    assert first != second


async def test_an_older_leader_goes_on_where_a_newer_one_began_in_an_empty_store() -> None:
    """The entries that the older leader acknowledged exist only in its memory."""
    store = MemoryStore()
    async with running_journal(store) as older:
        await older.admit(admission(1))
        store.clear()
        newer = Journal(store, leader_id="newer")
        await newer.open()
        await older.admit(admission(2))
        with pytest.raises(FencedError):
            await newer.begin()
    entries = [entry for _, entry in await entries_of(store)]
    restated = [each.admission.sequence for entry in entries for each in entry.restatements]
    assert restated == [1]
    assert [each.sequence for entry in entries for each in entry.admissions] == [2]


@pytest.mark.parametrize("holds_any", [False, True])
async def test_a_leader_that_holds_nothing_leaves_a_lost_journal_to_who_began_it_again_by_an_earlier_clock(
    holds_any: bool,
) -> None:
    """The epoch would fence the other leader, and nobody else knows the requests that it has accepted."""
    store = MemoryStore()
    ahead = Journal(store, leader_id="ahead", probe_every_s=0.001)
    epoch = await ahead.open(after_epoch=epoch_after(0, "ahead") + (1 << 40))
    running = asyncio.create_task(ahead.run())
    await until(lambda: ahead.is_ready)
    if holds_any:
        await ahead.admit(admission(1))
    store.clear()
    async with running_journal(store, leader_id="behind") as behind:
        assert behind.stats.epoch < epoch
        if holds_any:
            await until(lambda: ahead.stats.num_recreated == 1)
            await ahead.close()
            await running
        else:
            with pytest.raises(FencedError, match="began the lost journal again"):
                await running
            await behind.admit(admission(2))


@pytest.mark.parametrize("holds_any", [False, True])
async def test_a_leader_that_holds_nothing_leaves_an_emptied_store_to_those_of_a_later_one(holds_any: bool) -> None:
    """The later one has died with the store's loss: a standby may have read what it accepted."""
    store = MemoryStore()
    journal = Journal(store, leader_id="older", probe_every_s=1000.0)  # it looks because it was asked
    epoch = await journal.open()
    running = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready)
    if holds_any:
        await journal.admit(admission(1))
    store.clear()
    journal.look_for_leader(epoch + 1)
    if holds_any:
        await until(lambda: journal.stats.num_recreated == 1)
        await journal.close()
        await running
    else:
        with pytest.raises(FencedError, match="another scheduler led in epoch"):
            await running
        assert await store.last_entry_id() is None


async def test_a_leader_that_holds_nothing_begins_again_where_no_later_one_has_led() -> None:
    store = MemoryStore()
    async with running_journal(store, probe_every_s=1000.0) as journal:
        epoch = journal.stats.epoch
        store.clear()
        journal.look_for_leader(epoch)
        await until(lambda: journal.stats.num_recreated == 1 and not journal.stats.degraded)
        assert journal.stats.epoch > epoch


class BegunWhileLookedFor(MemoryStore):
    """Another leader begins in it, once it was emptied, at a look at its last entry: the probe has the first."""

    begin_at: int | None = None
    num_looks = 0

    async def last_entry_id(self) -> EntryId | None:
        last = await super().last_entry_id()
        if last is None:
            self.num_looks += 1
            if self.num_looks == self.begin_at:
                await Journal(self, leader_id="another").open()
        return last


@pytest.mark.parametrize("begin_at", [3, None])
async def test_a_leader_without_the_store_for_a_lease_that_holds_nothing_lets_others_begin_in_an_emptied_one(
    begin_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers may have led meanwhile, and a standby of theirs may know what the store has lost."""
    if begin_at is not None:  # it looks often, however long it would wait
        monkeypatch.setattr(journal_module, "_FOLLOWED_LEASES", 10_000)
    store = BegunWhileLookedFor()
    journal = Journal(store, leader_id="older", probe_every_s=1000.0, lease_s=0.2)
    await journal.open()
    running = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready)
    await asyncio.sleep(0.25)
    store.clear()
    store.begin_at = begin_at
    journal.probe_soon()
    if begin_at is None:
        with capture_logs() as logs:
            await until(lambda: any(line["event"].startswith("waiting for a leader") for line in logs))
            assert journal.stats.degraded
            await until(lambda: journal.stats.num_recreated == 1 and not journal.stats.degraded)
        await journal.close()
        await running
    else:
        with pytest.raises(FencedError, match="began the lost journal again"):
            await running


@pytest.mark.parametrize("holds_any", [False, True])
async def test_who_had_the_store_lately_or_holds_something_begins_again_in_an_emptied_one_at_once(
    holds_any: bool,
) -> None:
    store = MemoryStore()
    journal = Journal(store, leader_id="test", probe_every_s=1000.0, lease_s=0.001 if holds_any else 1000.0)
    await journal.open()
    running = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready)
    if holds_any:
        await journal.admit(admission(1))
        await asyncio.sleep(0.01)
    with capture_logs() as logs:
        store.clear()
        journal.probe_soon()
        await until(lambda: journal.stats.num_recreated == 1 and not journal.stats.degraded)
    assert not any(line["event"].startswith("waiting for a leader") for line in logs)
    await journal.close()
    await running


@pytest.mark.parametrize("holds_any", [False, True])
async def test_what_is_on_its_way_was_not_accepted_and_keeps_no_leader_in_an_emptied_store(holds_any: bool) -> None:
    store = MemoryStore()
    journal = Journal(store, leader_id="older", probe_every_s=1000.0, unready_s=1000.0)
    await journal.open()
    running = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready)
    if holds_any:
        await journal.admit(admission(1))
    await Journal(store, leader_id="newer").open()
    coming = journal.admit(admission(2))
    await until(lambda: journal.stats.degraded)  # it waits for the newer one
    store.clear()
    behind = Journal(store, leader_id="behind")
    await behind.open()
    if holds_any:
        await coming
        assert journal.stats.num_recreated == 1
        await journal.close()
        await running
    else:
        with pytest.raises(FencedError, match="began the lost journal again"):
            await running
        with pytest.raises(FencedError):
            await coming


async def test_an_epoch_begun_again_is_later_than_that_of_each_leader_that_was_seen() -> None:
    """The leader seen last may live: it must not be able to write behind the one that begins."""
    store = MemoryStore()
    journal = Journal(store, leader_id="older", probe_every_s=0.001, unready_s=1000.0)
    await journal.open()
    running = asyncio.create_task(journal.run())
    await journal.admit(admission(1))
    newer = Journal(store, leader_id="newer")
    epoch = await newer.open(after_epoch=epoch_after(0, "newer") + (1 << 40))
    await until(lambda: journal.stats.degraded)
    store.clear()
    await until(lambda: journal.stats.num_recreated == 1 and not journal.stats.degraded)
    assert journal.stats.epoch > epoch
    await journal.close()
    await running


async def test_a_busy_leader_finds_that_a_leader_of_an_earlier_epoch_began_in_an_emptied_store() -> None:
    """By a clock that is behind: the store takes our entries behind that one's, and has lost those before."""
    store = MemoryStore()
    journal = Journal(store, leader_id="ahead", probe_every_s=0.01)
    epoch = await journal.open(after_epoch=epoch_after(0, "ahead") + (1 << 40))
    running = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready)
    await journal.admit(admission(1))
    number = 1
    while not journal.stats.num_recreated:
        number += 1
        await journal.admit(admission(number))
        await asyncio.sleep(0.001)
        if number == 20:
            store.clear()
            await Journal(store, leader_id="behind").open()
    await journal.close()
    await running
    entries = [entry async for entry_id, entry in read_journal(store, JOURNAL_START) if entry_id.epoch > epoch]
    restated = {each.admission.sequence for entry in entries for each in entry.restatements}
    assert restated | {each.sequence for entry in entries for each in entry.admissions} == set(range(1, number + 1))


@pytest.mark.parametrize("kept", [0, 1], ids=["of the first", "its own"])
async def test_a_leader_that_holds_nothing_goes_on_where_only_the_end_of_its_journal_was_lost(kept: int) -> None:
    """The remaining entry was written by itself, or by a leader whose entries it has read."""
    store = MemoryStore()
    await Journal(store, leader_id="first").open()
    journal = Journal(store, leader_id="second", probe_every_s=0.001)
    await journal.open()
    async for _ in journal.read():
        pass
    running = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready)
    left = (await store.read_entries(JOURNAL_START, 2))[kept]
    store.clear()
    assert left.payload is not None
    await store.append(left.entry_id, left.payload, create=True)
    await until(lambda: journal.stats.num_recreated == 1)
    await journal.close()
    await running


async def test_an_older_leader_lives_until_the_newer_one_is_ready() -> None:
    store = MemoryStore()
    journal = Journal(store, leader_id="older", probe_every_s=0.001)
    await journal.open()
    running = asyncio.create_task(journal.run())
    await journal.admit(admission(1))
    newer = Journal(store, leader_id="newer")
    await newer.open()
    await until(lambda: journal.stats.degraded)
    with pytest.raises(StoreUnavailableError):
        await journal.confirm_leading()
    assert not running.done()
    await newer.begin()
    with pytest.raises(FencedError):
        await running


async def test_a_leader_does_not_confirm_in_an_emptied_store_that_it_leads_until_it_has_begun_again() -> None:
    """Entries of a newer leader may be lost with the rest."""
    store = MemoryStore()
    journal = Journal(store, leader_id="older", probe_every_s=1000.0)  # it probes because it was asked
    await journal.open()
    running = asyncio.create_task(journal.run())
    await journal.admit(admission(1))
    await journal.confirm_leading()
    store.clear()
    with pytest.raises(StoreUnavailableError):
        await journal.confirm_leading()
    await until(lambda: journal.stats.num_recreated == 1 and not journal.stats.degraded)
    await journal.confirm_leading()
    await journal.close()
    await running


@pytest.mark.parametrize("is_emptied", [True, False])
async def test_a_leader_whose_last_entries_alone_are_there_does_not_wait_for_the_newer_one(is_emptied: bool) -> None:
    """The store was emptied, and took entries behind the start of a leader with an earlier epoch; then came a newer."""
    store = MemoryStore()
    # It does not look back meanwhile, and would wait for the newer one for as long.
    journal = Journal(store, leader_id="older", probe_every_s=1000.0, unready_s=1000.0)
    epoch = await journal.open(after_epoch=epoch_after(0, "older") + (1 << 40))
    running = asyncio.create_task(journal.run())
    await journal.admit(admission(1))
    if is_emptied:
        store.clear()
        await Journal(store, leader_id="behind").open()
    await journal.admit(admission(2))
    assert not journal.stats.num_recreated
    newer = Journal(store, leader_id="newer")
    await newer.open(after_epoch=epoch)
    last = journal.admit(admission(3))
    if is_emptied:
        await last
        with pytest.raises(FencedError):
            await newer.confirm_leading()
        await journal.close()
        await running
        entries = [entry async for entry_id, entry in read_journal(store, JOURNAL_START) if entry_id.epoch > epoch]
        assert {each.admission.sequence for entry in entries for each in entry.restatements} == {1, 2}
    else:
        await until(lambda: journal.stats.degraded)
        await newer.begin()
        with pytest.raises(FencedError):
            await running
        with pytest.raises(FencedError):
            await last


async def test_an_older_leader_goes_on_when_the_newer_one_does_not_become_ready() -> None:
    store = MemoryStore()
    journal = Journal(store, leader_id="older", probe_every_s=0.001, unready_s=0.0)
    await journal.open()
    running = asyncio.create_task(journal.run())
    await journal.admit(admission(1))
    await Journal(store, leader_id="dies").open()
    await journal.admit(admission(2))
    assert journal.stats.num_recreated == 1
    await journal.close()
    await running


async def test_opening_gives_up_when_other_leaders_are_always_faster() -> None:
    class Contended(MemoryStore):
        async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
            raise StaleEntryError("equal or smaller")

    with pytest.raises(FencedError):
        await Journal(Contended(), leader_id="test").open()


async def test_a_journal_that_was_flushed_is_begun_again() -> None:
    class Flushed(MemoryStore):
        flush_at = 3
        is_flushed = False

        async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
            if entry_id.seq == self.flush_at and not self.is_flushed:
                self.is_flushed = True
                self.clear()
                raise StoreFlushedError("gone")
            await super().append(entry_id, payload, create=create)

    store = Flushed()
    is_degraded: list[bool] = []
    with capture_logs() as logs:
        async with running_journal(store) as journal:
            journal.health.on_change = is_degraded.append
            writer = Writer(journal)
            writer.append()
            await writer.all_durable()
            epoch = journal.stats.epoch
            writer.append()
            await writer.all_durable()
            stats = journal.stats
    assert (stats.num_recreated, stats.degraded) == (1, False)
    assert is_degraded == [True, False]  # nothing is admitted until all is said again
    assert stats.epoch > epoch
    entries = await entries_of(store)
    assert [entry_id for entry_id, _ in entries] == [f"{stats.epoch}-{seq}" for seq in range(3)]
    assert entries[0][1].leader_start.says_all_again
    assert await tokens_of(store) == [1]
    assert {"log_level": "error", "event": "the store lost the journal; beginning it again", "epoch": epoch} in logs


async def test_who_is_ready_in_an_emptied_store_before_the_leader_notices_leads() -> None:
    class BegunMeanwhile(MemoryStore):
        is_emptied = False

        async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
            if self.is_emptied and entry_id.epoch == older.stats.epoch:
                raise StoreFlushedError("gone")
            await super().append(entry_id, payload, create=create)

        async def next_epoch(self) -> int:
            if self.is_emptied:
                self.is_emptied = False
                for seq, entry in enumerate((pb.JournalEntry(leader_start=pb.LeaderStart()), pb.JournalEntry())):
                    await super().append(EntryId(older.stats.epoch + 1, seq), entry.SerializeToString(), create=True)
            return await super().next_epoch()

    store = BegunMeanwhile()
    older = Journal(store, leader_id="older")
    await older.open()
    running = asyncio.create_task(older.run())
    await until(lambda: older.is_ready)
    await older.admit(admission(1))
    store.clear()
    store.is_emptied = True
    coming = older.admit(admission(2))
    with pytest.raises(FencedError, match="newer scheduler took over"):
        await asyncio.wait_for(running, patient(5.0))
    with pytest.raises(FencedError):
        await coming


async def test_only_what_a_living_admission_needs_is_kept() -> None:
    store = MemoryStore()
    async with running_journal(store, trim_every=4) as journal:
        writer = Writer(journal)
        for sequence in range(1, 7):  # entries 2 to 7
            await journal.admit(admission(sequence))
        journal.forget(1)
        journal.forget(2)
        journal.forget(4)
        for _ in range(4):  # entries 8 to 11: a trim comes along
            writer.append()
            await writer.all_durable()
        assert await first_id(store) == EntryId(journal.stats.epoch, 4)
        for sequence in (3, 5, 6):
            journal.forget(sequence)
        for _ in range(4):
            writer.append()
            await writer.all_durable()
        assert await first_id(store) >= EntryId(journal.stats.epoch, 12)


async def test_an_admission_forgotten_before_it_was_durable_holds_nothing() -> None:
    store = HeldStore()
    async with running_journal(store, trim_every=2) as journal:
        store.open_gate.clear()
        accepted = journal.admit(admission(1))
        await until(lambda: store.num_in_flight == 1)
        journal.forget(1)
        store.open_gate.set()
        await accepted
        writer = Writer(journal)
        for _ in range(6):
            writer.append()
            await writer.all_durable()
        assert await first_id(store) > EntryId(journal.stats.epoch, 2)


async def test_what_earlier_leaders_left_is_kept_from_the_oldest_on_in_whatever_order_it_was_found() -> None:
    store = MemoryStore()
    async with running_journal(store) as earlier:
        for sequence in range(1, 7):  # entries 2 to 7 of its epoch
            await earlier.admit(admission(sequence))
    journal = Journal(store, leader_id="next", trim_every=2)
    await journal.open()
    _ = [entry_id async for entry_id, _ in journal.read()]
    for sequence in (5, 2, 4):  # pins are kept after requests, and may be older
        journal.keep_entry(sequence, EntryId(earlier.stats.epoch, sequence + 1), lambda entry: None)
    writing = asyncio.create_task(journal.run())
    writer = Writer(journal)
    for oldest in (2, 4, 5):
        for _ in range(4):  # a trim comes along
            writer.append()
            await writer.all_durable()
        assert journal.stats.oldest_needed == await first_id(store) == EntryId(earlier.stats.epoch, oldest + 1)
        journal.forget(oldest)
    await journal.close()
    await writing


async def test_a_newcomer_does_not_begin_above_a_leader_that_it_has_not_read() -> None:
    """The store was emptied under it, and a leader whose clock is behind has begun again there, at a lower epoch."""
    store = MemoryStore()
    newcomer = Journal(store, leader_id="newcomer")
    epoch = await newcomer.open()
    assert not [each async for each in newcomer.read()]
    store.clear()
    start = pb.JournalEntry(leader_start=pb.LeaderStart(says_all_again=True)).SerializeToString()
    below = EntryId(epoch - 1, 0)
    await store.append(below, start, create=True)
    with pytest.raises(JournalLostError):
        await newcomer.begin()
    assert await store.last_entry_id() == below


async def test_a_leader_that_meets_a_later_one_while_it_reads_does_not_lead() -> None:
    store = MemoryStore()
    async with running_journal(store) as first:
        await first.admit(admission(1))
    journal = Journal(store, leader_id="second")
    await journal.open()
    await Journal(store, leader_id="third").open(after_epoch=journal.stats.epoch)
    with pytest.raises(FencedError, match="another scheduler began to lead"):
        _ = [entry async for entry in journal.read(EntryId(journal.stats.epoch, 1))]


async def test_a_journal_that_is_lost_while_it_is_read_is_no_empty_one() -> None:
    store = MemoryStore()
    journal = Journal(store, leader_id="test")
    await journal.open()
    store.clear()
    with pytest.raises(JournalLostError, match="while it was read"):
        _ = [entry async for entry in journal.read()]


async def test_a_leader_that_has_only_begun_the_next_epoch_is_newer() -> None:
    store = MemoryStore()
    journal = Journal(store, leader_id="test")
    epoch = await journal.open()
    await journal.confirm_leading()
    await store.append(EntryId(epoch + 1, 0), pb.JournalEntry(leader_start=pb.LeaderStart()).SerializeToString())
    with pytest.raises(FencedError, match=f"it wrote {epoch + 1}-0"):
        await journal.confirm_leading()
