"""Reading of the journal by a new leader: replay it to its end, and find the requests that are still needed."""

import asyncio
import time
from collections.abc import Collection

import structlog

from quire.errors import FailedPreconditionError
from quire.v1 import journal_pb2
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.store import JOURNAL_START, JournalDamagedError, Store
from scheduler_svc.requests.live.engine import withdrawal
from scheduler_svc.requests.live.request_record import parsed_record
from scheduler_svc.requests.recovery.journal_replay import BegunReplay, JournaledRequest, JournalReplay

log = structlog.get_logger()

TURN_ENTRIES = 64  # that are replayed before the event loop has its turn, for signals


async def replay_journal(journal: Journal, begun: BegunReplay | None) -> tuple[JournalReplay, int]:
    """Replay the journal behind `begun`, or all of it if it does not continue that. Returns the number of entries, too.

    Raises JournalDamagedError if an entry is damaged, JournalLostError if it is lost meanwhile, FencedError,
    StoreUnavailableError.
    """
    replay, from_id, _, note_read = begun or BegunReplay(JournalReplay(), JOURNAL_START)
    num_entries = 0
    try:
        async for entry_id, entry in journal.read(from_id):
            replay.apply(entry_id, entry)
            note_read(entry_id, entry)
            num_entries += 1
            if not num_entries % TURN_ENTRIES:
                await asyncio.sleep(0)
    except JournalDamagedError as error:
        if begun is None:
            raise
        log.error("the journal does not continue what was followed; reading it from its start", reason=str(error))
        return await replay_journal(journal, None)
    return replay, num_entries


async def find_needed(replay: JournalReplay, store: Store) -> tuple[list[JournaledRequest], list[journal_pb2.Finish]]:
    """Find the needed requests, in order, and the ends that the journal lacks.

    Needed are requests without an end, and those whose end came so late that their record was not written; not those
    whose record was dropped for want of room. The age of an end does not count: clocks of two leaders may be hours
    apart, and the cost is only a record that had expired. If a request has a record but no end in the journal, the
    store has lost the end: the record says what it was, unless it is damaged: then the request goes on.
    """
    owners = list(replay.owners())
    recorded = await recorded_request_ids(owners, store)
    needed = []
    ends = [withdrawal(each.number) for each in replay.disowned()]
    for each in owners:
        if each.request_id not in recorded:
            needed.append(each)
        elif each.finish is None and (payload := await store.get_record(each.request_id)) is not None:
            try:
                response = parsed_record(each.request_id, payload).response
            except FailedPreconditionError as error:
                log.error("record damaged: computing the rest of the request again", reason=error.message)
                each.replaces_record = True
                needed.append(each)
                continue
            ends.append(
                journal_pb2.Finish(
                    sequence=each.number,
                    state=response.state,
                    error=response.error,
                    finished_unix_ns=response.created_unix_ns + response.timings.finished_ns,
                )
            )
    return needed, ends


async def recorded_request_ids(requests: Collection[JournaledRequest], store: Store) -> set[str]:
    """Ids of requests that have a record, or had one that was dropped for want of room.

    Times of dropping that lie ahead of our clock are ignored: they say nothing of ends by our clock.
    """
    recorded = await store.known_records([each.request_id for each in requests])
    unrecorded = [each for each in requests if each.finish is not None and each.request_id not in recorded]
    dropped_until = await store.dropped_until({each.admission.request.tenant for each in unrecorded})
    now_ns = time.time_ns()
    for each in unrecorded:
        assert each.finish is not None
        until_ns = dropped_until.get(each.admission.request.tenant)
        if until_ns is not None and each.finish.finished_unix_ns <= until_ns <= now_ns:
            recorded.add(each.request_id)
    return recorded
