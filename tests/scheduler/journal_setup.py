"""Setup of the journal's tests: a journal on a store, entries to append, and a view of its contents."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from common.arrays import unpack_int32
from quire.v1 import inference_pb2
from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.journal_entry import read_journal
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.store import EntryId, Record, RecordLimits, Store, StoreError
from scheduler_svc.requests.recovery.journal_replay import JournalReplay
from tests.patience import patient


async def put_records(
    store: Store, payloads: Mapping[str, bytes], *, tenant: str = "", limits: RecordLimits | None = None
) -> int:
    """Records of requests that end now, by request_id."""
    records = [Record(each, tenant, time.time_ns(), payload) for each, payload in payloads.items()]
    return await store.put_records(records, limits or RecordLimits())


@asynccontextmanager
async def redis_store(url: str, *, timeout_s: float = 20.0) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, timeout_s=timeout_s)
    try:
        await store.connect(patience_s=patient(10.0))
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def running_journal(
    store: Store,
    *,
    leader_id: str = "test",
    max_entry_bytes: int = 1 << 20,
    trim_every: int = 512,
    close_timeout_s: float = 20.0,
    **timing: Any,
) -> AsyncIterator[Journal]:
    journal = Journal(
        store,
        leader_id=leader_id,
        max_entry_bytes=max_entry_bytes,
        trim_every=trim_every,
        close_timeout_s=close_timeout_s,
        **timing,
    )
    await journal.open()
    writing = asyncio.create_task(journal.run())
    await until(lambda: journal.is_ready or journal.stats.degraded)
    try:
        yield journal
    finally:
        await journal.close()
        with suppress(StoreError):
            await writing


class Writer:
    """Appends numbered tokens, and remembers in which order they were acknowledged."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.sent: list[int] = []
        self.durable: list[int] = []

    def append(self, count: int = 1) -> None:
        """One call of append for each of the next `count` tokens."""
        for _ in range(count):
            token = len(self.sent)
            self.sent.append(token)
            self.journal.append(sequences=[1], tokens=[token], on_durable=partial(self._note, token))

    def _note(self, token: int) -> None:
        self.durable.append(token)

    async def all_durable(self) -> None:
        await until(lambda: len(self.durable) == len(self.sent))


def admission(sequence: int, *, prompt_tokens: int = 4) -> pb.Admission:
    return pb.Admission(
        sequence=sequence,
        request=inference_pb2.GenerateRequest(request_id=f"r{sequence}"),
        prompt_token_ids=bytes(4 * prompt_tokens),
        arrived_unix_ns=1,
    )


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Lets the event loop turn until the condition holds; for so long on an idle machine, else for longer."""
    async with asyncio.timeout(patient(timeout_s)):
        while not condition():  # noqa: ASYNC110 - what is waited for is not the test's to signal
            await asyncio.sleep(0.002)


async def entries_of(store: Store) -> list[tuple[str, pb.JournalEntry]]:
    return [(str(entry_id), entry) async for entry_id, entry in read_journal(store)]


async def replay_of(store: Store) -> JournalReplay:
    """Replay of the whole journal, as a leader reads it that knows nothing yet."""
    replay = JournalReplay()
    async for entry_id, entry in read_journal(store):
        replay.apply(entry_id, entry)
    return replay


def replayed(*entries: pb.JournalEntry) -> JournalReplay:
    """Replay of a journal that has these entries."""
    replay = JournalReplay()
    for seq, entry in enumerate(entries, start=1):
        replay.apply(EntryId(1, seq), entry)
    return replay


async def tokens_of(store: Store) -> list[int]:
    """Tokens in the journal, in order."""
    return [token for _, entry in await entries_of(store) for token in unpack_int32(entry.delta_tokens)]


def assert_nothing_lost_or_doubled(acknowledged: list[int], written: list[int]) -> None:
    assert not [token for token, count in Counter(written).items() if count > 1]
    assert written[: len(acknowledged)] == acknowledged
