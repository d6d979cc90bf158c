"""Reading of the journal by a new leader: all entries in their order, the requests that it needs, and lost ends."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId, Record, RecordLimits
from scheduler_svc.requests.recovery.journal_reading import (
    TURN_ENTRIES,
    find_needed,
    recorded_request_ids,
    replay_journal,
)
from scheduler_svc.requests.recovery.journal_replay import BegunReplay, JournalReplay
from tests.scheduler.journal_setup import put_records, replayed
from tests.scheduler.test_standby import admission, finish

NOW_NS = 1_700_000_000_000_000_000


async def opened(num_entries: int) -> Journal:
    """Journal of a second leader; the first wrote these entries, each admits one request."""
    store = MemoryStore()
    await store.raise_epoch(1)
    for number in range(1, num_entries + 1):
        entry = journal_pb2.JournalEntry(admissions=[admission(number)])
        await store.append(EntryId(1, number), entry.SerializeToString(), create=True)
    journal = Journal(store, leader_id="second")
    await journal.open()
    return journal


async def test_a_journal_is_replayed_from_its_start_or_behind_what_was_followed() -> None:
    replay, num_entries = await replay_journal(await opened(3), None)
    assert (num_entries, set(replay.requests)) == (3, {1, 2, 3})
    noted: list[EntryId] = []
    begun = BegunReplay(JournalReplay(), EntryId(1, 2), note_read=lambda entry_id, _: noted.append(entry_id))
    replay, num_entries = await replay_journal(await opened(3), begun)
    assert (num_entries, set(replay.requests)) == (2, {2, 3})
    assert noted == [EntryId(1, 2), EntryId(1, 3)]


async def test_the_event_loop_has_its_turns_while_a_long_journal_is_replayed() -> None:
    """Else a scheduler that starts cannot be stopped; and a turn for each entry takes longer than the replay."""
    num_turns, is_over = 0, False

    async def count_turns() -> None:
        nonlocal num_turns
        while not is_over:
            num_turns += 1
            await asyncio.sleep(0)

    journal = await opened(10 * TURN_ENTRIES)
    counting = asyncio.create_task(count_turns())
    await replay_journal(journal, None)
    is_over = True
    await counting
    assert 10 <= num_turns <= 30


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = MemoryStore()
    yield made
    await made.close()


def admitted(number: int, request_id: str = "", tenant: str = "") -> journal_pb2.JournalEntry:
    entry = journal_pb2.JournalEntry(admissions=[admission(number, request_id)])
    entry.admissions[0].request.tenant = tenant
    return entry


def ended(number: int, finished_unix_ns: int) -> journal_pb2.JournalEntry:
    return journal_pb2.JournalEntry(finishes=[finish(number, finished_unix_ns)])


async def test_needed_are_requests_without_an_end_and_ends_without_a_record(store: MemoryStore) -> None:
    await put_records(store, {"r2": b""})
    replay = replayed(*(admitted(number) for number in (1, 2, 3)), ended(2, NOW_NS), ended(3, NOW_NS))
    needed, ends = await find_needed(replay, store)
    assert ([each.number for each in needed], ends) == ([1, 3], [])


async def test_an_end_that_the_store_lost_is_that_of_the_record(store: MemoryStore) -> None:
    timings = pb.Timings(finished_ns=7)
    response = pb.GetRequestResponse(
        state=pb.REQUEST_STATE_FAILED, error="why", created_unix_ns=NOW_NS, timings=timings
    )
    await put_records(store, {"r1": journal_pb2.RequestRecord(response=response).SerializeToString()})
    needed, ends = await find_needed(replayed(admitted(1), admitted(2)), store)
    assert [each.number for each in needed] == [2]
    said = journal_pb2.Finish(sequence=1, state=pb.REQUEST_STATE_FAILED, error="why", finished_unix_ns=NOW_NS + 7)
    assert ends == [said]


async def test_a_request_whose_end_the_store_lost_goes_on_if_its_record_is_damaged(store: MemoryStore) -> None:
    await put_records(store, {"r1": b"\xff not a record"})
    needed, ends = await find_needed(replayed(admitted(1), admitted(2)), store)
    assert ([(each.number, each.replaces_record) for each in needed], ends) == ([(1, True), (2, False)], [])


async def test_a_record_that_expires_while_it_is_looked_up_ends_nothing(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_records(store, {"r1": b""})

    async def expired(request_id: str) -> None:
        """No record any more."""

    monkeypatch.setattr(store, "get_record", expired)
    assert await find_needed(replayed(admitted(1)), store) == ([], [])


async def test_an_admission_whose_client_came_again_is_withdrawn(store: MemoryStore) -> None:
    needed, ends = await find_needed(replayed(admitted(1, "same"), admitted(2, "same")), store)
    assert [each.number for each in needed] == [2]
    assert [(each.sequence, each.withdrawn) for each in ends] == [(1, True)]


async def test_the_last_end_whose_record_was_dropped_bounds_those_of_its_tenant_once_it_is_past(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: NOW_NS)
    records = [Record(request_id, "t", ended_ns, bytes(100)) for request_id, ended_ns in (("a", NOW_NS), ("b", NOW_NS))]
    await store.put_records(records, RecordLimits(max_tenant_bytes=1))
    assert await store.dropped_until(["t"]) == {"t": NOW_NS}
    replay = replayed(
        *(admitted(number, tenant="t") for number in (1, 2, 3)),
        admitted(4, tenant="other"),
        ended(1, NOW_NS),
        ended(2, NOW_NS + 1),
        ended(4, 0),
    )
    assert await recorded_request_ids(list(replay.requests.values()), store) == {"r1"}
    monkeypatch.setattr(time, "time_ns", lambda: NOW_NS - 1)  # who dropped it had a clock ahead of ours
    assert await recorded_request_ids(list(replay.requests.values()), store) == set()
