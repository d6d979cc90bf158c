"""A replay that was begun earlier: numbers that come again, and how a new leader goes on with it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from common.arrays import pack_int32, pack_int64
from quire.v1 import inference_pb2
from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId
from scheduler_svc.requests.recovery.journal_replay import BegunReplay, JournalReplay
from tests.scheduler.journal_setup import entries_of, put_records, until
from tests.scheduler.serving_site import Site
from tests.scheduler.test_standby import admission, finish

Entries = Sequence[tuple[tuple[int, int], pb.JournalEntry]]


def replay_of(entries: Entries) -> JournalReplay:
    replay = JournalReplay()
    for entry_id, entry in entries:
        replay.apply(EntryId(*entry_id), entry)
    return replay


def test_an_entry_that_was_read_lost_and_written_again_is_taken_once() -> None:
    start = pb.JournalEntry(leader_start=pb.LeaderStart())
    again = pb.JournalEntry(admissions=[admission(2)], pins=[pb.PinChange(tenant="t", name="p")])
    replay = replay_of(
        [
            ((1, 0), start),
            ((1, 1), pb.JournalEntry(admissions=[admission(1)])),
            ((1, 2), again),
            ((1, 3), start),
            ((1, 4), pb.JournalEntry(restatements=[pb.Restatement(admission=admission(1))])),
            ((1, 5), again),
            ((1, 6), pb.JournalEntry()),
        ]
    )
    assert set(replay.requests) == {1, 2}


START = pb.JournalEntry(leader_start=pb.LeaderStart())
NEWS = pb.JournalEntry(delta_sequences=pack_int64([9]), delta_tokens=pack_int32([1]))
READY = pb.JournalEntry(leader_ready=pb.LeaderReady())


@pytest.mark.parametrize(
    ("ids", "is_settled"),
    [
        ([(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)], True),
        ([(1, 7), (1, 8), (2, 0), (2, 1), (2, 2)], True),  # trimmed
        ([(1, 7), (1, 8)], True),
        ([(1, 0), (2, 7), (2, 8)], False),  # emptied: one with an earlier epoch began, and the second went on
        ([(1, 0), (2, 1), (2, 2)], False),
        ([(1, 0), (2, 7), (2, 8), (3, 0)], False),
        ([(1, 0), (2, 7), (2, 8), (3, 0), (3, 1)], True),  # the third has waited for the second
    ],
)
def test_a_journal_is_not_settled_whose_last_leader_lost_its_first_entries_behind_the_start_of_another(
    ids: list[tuple[int, int]], is_settled: bool
) -> None:
    entry_of = {0: START, 1: READY}
    assert replay_of([(each, entry_of.get(each[1], NEWS)) for each in ids]).is_settled is is_settled


def test_a_leader_that_says_everything_again_in_its_epoch_begins_anew_there() -> None:
    ids_and_entries = [((1, 0), START), ((2, 7), START), ((2, 8), READY)]
    assert replay_of(ids_and_entries).is_settled


ADMITTED = pb.JournalEntry(admissions=[admission(1), admission(2)], pins=[pb.PinChange(tenant="t", name="p")])
AGAIN = pb.JournalEntry(leader_start=pb.LeaderStart(says_all_again=True))
SAID = pb.JournalEntry(restatements=[pb.Restatement(admission=admission(1))])
PIN_SAID = pb.JournalEntry(pins=[pb.PinChange(tenant="t", name="p")])


@pytest.mark.parametrize(
    ("entries", "is_cut_short", "left"),
    [
        ([((1, 0), START), ((1, 1), ADMITTED)], False, {1, 2}),
        ([((1, 1), ADMITTED), ((2, 0), START), ((2, 1), SAID)], False, {1, 2}),
        ([((1, 1), ADMITTED), ((2, 0), AGAIN)], True, {1, 2}),
        ([((1, 1), ADMITTED), ((2, 0), AGAIN), ((2, 1), SAID), ((2, 2), PIN_SAID)], True, {1, 2}),
        ([((1, 1), ADMITTED), ((2, 0), AGAIN), ((2, 1), SAID), ((2, 2), READY)], False, {1}),
        ([((1, 1), ADMITTED), ((2, 0), AGAIN), ((2, 1), READY)], False, set()),
        ([((1, 1), ADMITTED), ((1, 2), START), ((1, 3), SAID), ((1, 4), READY)], False, {1}),
        # A later leader that has to restate nothing knows no more than the journal.
        ([((1, 1), ADMITTED), ((2, 0), AGAIN), ((2, 1), SAID), ((3, 0), START)], True, {1, 2}),
        ([((1, 1), ADMITTED), ((2, 0), AGAIN), ((3, 0), START), ((3, 1), READY)], True, {1, 2}),
        ([((1, 1), ADMITTED), ((2, 0), AGAIN), ((3, 0), AGAIN), ((3, 1), SAID), ((3, 2), READY)], False, {1}),
        ([((1, 1), ADMITTED), ((2, 0), AGAIN), ((3, 0), START), ((4, 0), AGAIN), ((4, 1), READY)], False, set()),
    ],
)
def test_a_leader_that_restates_everything_and_dies_before_the_end_leaves_a_journal_that_was_cut_short(
    entries: Entries, is_cut_short: bool, left: set[int]
) -> None:
    replay = replay_of(entries)
    assert (replay.is_cut_short, set(replay.requests)) == (is_cut_short, left)


@pytest.mark.parametrize(
    ("entries", "is_settled"),
    [
        ([((1, 5), SAID)], False),  # the ones before it are trimmed
        ([((1, 5), SAID), ((1, 6), NEWS)], True),
        ([((1, 5), NEWS), ((1, 6), SAID)], True),
        ([((1, 5), NEWS), ((2, 0), START)], False),
        ([((1, 5), NEWS), ((2, 0), START), ((2, 1), SAID)], False),
        ([((1, 5), NEWS), ((2, 0), START), ((2, 1), SAID), ((2, 2), READY)], True),
    ],
)
def test_a_journal_is_settled_once_its_last_leader_has_restated_what_it_knew(
    entries: Entries, is_settled: bool
) -> None:
    assert replay_of(entries).is_settled is is_settled


def test_what_a_leader_does_not_restate_has_ended_and_what_comes_new_meanwhile_is_kept() -> None:
    old = pb.JournalEntry(pins=[pb.PinChange(tenant="t", name=name) for name in "pq"])
    said = pb.JournalEntry(restatements=SAID.restatements, pins=[pb.PinChange(tenant="t", name="q")])
    new = pb.JournalEntry(admissions=[admission(3)])
    entries = [((1, 1), ADMITTED), ((1, 2), old), ((2, 0), AGAIN), ((2, 1), said), ((2, 2), new), ((2, 3), READY)]
    replay = replay_of(entries)
    assert (set(replay.requests), set(replay.pins)) == ({1, 3}, {("t", "q")})


def ended(entry: pb.JournalEntry) -> None:
    entry.finishes.append(finish(1))


@pytest.mark.parametrize("change", [ended, lambda entry: None], ids=["ended", "unknown to the later leader"])
@pytest.mark.parametrize("number", [1, 3])
def test_a_number_that_a_later_leader_gives_again_is_that_of_its_request(
    change: Callable[[pb.JournalEntry], None], number: int
) -> None:
    old = pb.JournalEntry(admissions=[admission(1, "old")])
    old.admissions[0].request.sampling.n = 3
    change(old)
    replay = replay_of([((1, 1), old), ((2, 1), pb.JournalEntry(admissions=[admission(number, "new")]))])
    assert [each.request_id for each in replay.requests.values()] == ["new"]


def test_a_number_that_a_later_leader_restates_is_that_of_its_request() -> None:
    old = pb.JournalEntry(admissions=[admission(1, "old")])
    old.admissions[0].request.sampling.n = 3
    said = pb.JournalEntry(restatements=[pb.Restatement(admission=admission(1, "new"))])
    next_one = pb.JournalEntry(admissions=[admission(2, "next")])
    replay = replay_of([((1, 1), old), ((2, 0), AGAIN), ((2, 1), said), ((2, 2), next_one)])
    assert [each.request_id for each in replay.owners()] == ["new", "next"]


@asynccontextmanager
async def site_on(*entries: pb.JournalEntry) -> AsyncIterator[tuple[Site, MemoryStore]]:
    """A scheduler that is about to read this journal, all of it of epoch 1."""
    store = MemoryStore()
    await store.raise_epoch(1)
    for seq, entry in enumerate(entries):
        await store.append(EntryId(1, seq), entry.SerializeToString(), create=True)
    site = Site(store)
    try:
        yield site, store
    finally:
        await site.close()


async def test_a_new_leader_says_all_again_that_the_store_has_lost() -> None:
    replay = replay_of([((1, 1), pb.JournalEntry(admissions=[admission(1)]))])
    async with site_on(pb.JournalEntry()) as (site, store):
        await site.journal.open()
        await site.recovery.read(store, BegunReplay(replay, EntryId(1, 2), is_whole=False))
        site.writing = [asyncio.create_task(site.journal.run())]
        await until(lambda: site.journal.is_ready)
        said, ready = [entry for _, entry in await entries_of(store)][-2:]
        assert [each.admission.sequence for each in said.restatements] == [1]
        assert ready.HasField("leader_ready")


async def test_a_journal_that_does_not_go_on_with_what_was_followed_is_read_anew() -> None:
    replay = replay_of([((1, 1), pb.JournalEntry(admissions=[admission(1, "followed")]))])
    async with site_on(pb.JournalEntry(), pb.JournalEntry(admissions=[admission(1, "found")])) as (site, store):
        await site.journal.open()
        await site.recovery.read(store, BegunReplay(replay, EntryId(1, 1)))
        assert site.recovery.find("found") is not None
        assert site.recovery.find("followed") is None


async def test_the_journal_is_told_of_the_end_of_what_has_a_record() -> None:
    async with site_on(pb.JournalEntry(admissions=[admission(1)])) as (site, store):
        response = inference_pb2.GetRequestResponse(state=inference_pb2.REQUEST_STATE_FAILED, error="it was ill")
        record = pb.RequestRecord(response=response)
        await put_records(store, {"r1": record.SerializeToString()})
        await site.start()
        await until(lambda: site.journal.stats.pending == 0)
        assert not site.recovery.num_waiting
        last = (await entries_of(store))[-1][1]
        ends = [(each.sequence, each.state, each.error, each.withdrawn) for each in last.finishes]
        assert ends == [(1, inference_pb2.REQUEST_STATE_FAILED, "it was ill", False)]
