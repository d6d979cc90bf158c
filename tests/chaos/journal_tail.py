"""Tail of the journal: the entries of each request, read as they are written, before any of them is trimmed.

Follows admissions and tokens; of beams and ranked samples nothing, since what they stream is decided from more. Whether
a token was kept when a client was told of it does not hang on how fast this reads: it was not, if a read that began
after the client had it, and came to the journal's end, did not find it.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from common.arrays import unpack_int32, unpack_int64
from quire.v1 import journal_pb2
from scheduler_svc.journal.journal_entry import read_journal
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.store import JOURNAL_START, EntryId, Store, StoreError
from tests.chaos.client_load import ClientLoad
from tests.chaos.history import Told
from tests.chaos.scenario import nothing

PAUSE_S = 0.02


class JournalTail:
    """One reader, which `following` lets read on."""

    def __init__(self, store: Store) -> None:
        self.num_stale = 0  # entries that were written behind later ones
        self.epochs: list[int] = []
        self.not_begun_s: dict[int, float] = {}  # by epoch: until when its leader surely had not begun
        self._store = store
        self._next = JOURNAL_START
        self._read: set[EntryId] = set()
        self._whole_since_s = -math.inf  # when the last read began that came to the end
        self._outputs: dict[int, list[int]] = {}  # by number of a sequence
        self._absent_s: dict[int, list[float]] = {}  # of each of its tokens: until when it surely was not there
        self._first_sequence: dict[str, list[int]] = {}  # by request, of each of its admissions
        self._reading = asyncio.Lock()

    async def catch_up(self) -> None:
        """Read the present entries."""
        async with self._reading:
            began_s = time.monotonic()
            async for entry_id, entry in read_journal(self._store, self._next):
                self._take(entry_id, entry)
                self._next = EntryId(entry_id.epoch, entry_id.seq + 1)
            self._whole_since_s = began_s

    async def look_behind(self) -> None:
        """Read all entries that are left once more: what is new before the last one that was read is stale."""
        async with self._reading:
            async for entry_id, _ in read_journal(self._store):
                if entry_id >= self._next:
                    return
                self.num_stale += entry_id not in self._read
                self._read.add(entry_id)

    async def follow(self) -> None:
        """Read on until it is cancelled."""
        while True:
            with suppress(StoreError):  # it is in trouble, and will be asked again
                await self.catch_up()
            await asyncio.sleep(PAUSE_S)

    def num_unknown(self, requests: Iterable[Told]) -> int:
        """Count positions that the journal lacks or contradicts, or did not have yet when clients received them."""
        num_unknown = 0
        for told in requests:
            starts = self._first_sequence.get(told.request_id, [])
            for sample in {piece.sample for piece in told.pieces}:
                mine = _timed_tokens(told, sample)
                num_unknown += min((self._num_wrong(mine, start + sample) for start in starts), default=len(mine))
        return num_unknown

    def num_twice(self, requests: Iterable[Told]) -> int:
        """Count the journal's tokens of finished samples beyond those that their clients received."""
        num_twice = 0
        for told in requests:
            for sample in {piece.sample for piece in told.pieces}:
                for start in self._first_sequence.get(told.request_id, []):
                    num_twice += max(0, len(self._outputs.get(start + sample, [])) - len(told.tokens_of(sample)))
        return num_twice

    def _take(self, entry_id: EntryId, entry: journal_pb2.JournalEntry) -> None:
        self._read.add(entry_id)
        if entry.HasField("leader_start"):
            self.epochs.append(entry_id.epoch)
            self.not_begun_s.setdefault(entry_id.epoch, self._whole_since_s)
        for admission in entry.admissions:
            self._first_sequence.setdefault(admission.request.request_id, []).append(admission.sequence)
        numbers, tokens = unpack_int64(entry.delta_sequences), unpack_int32(entry.delta_tokens)
        for number, token in zip(numbers, tokens, strict=True):
            self._outputs.setdefault(number, []).append(token)
            self._absent_s.setdefault(number, []).append(self._whole_since_s)

    def _num_wrong(self, told: list[tuple[int, float]], number: int) -> int:
        tokens, absent_s = self._outputs.get(number, []), self._absent_s.get(number, [])
        wrong = sum(
            mine != kept or at_s < until_s for (mine, at_s), kept, until_s in zip(told, tokens, absent_s, strict=False)
        )
        return wrong + max(0, len(told) - len(tokens))


@asynccontextmanager
async def following(url: str) -> AsyncIterator[JournalTail]:
    """Follow the journal of the store at a URL."""
    store = RedisStore(url)
    await store.connect(patience_s=10.0)
    tail = JournalTail(store)
    task = asyncio.create_task(tail.follow())
    try:
        yield tail
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await store.close()


ONE_LEADER = nothing("stale_entries", "journaled_twice", "delivered_not_in_journal")


async def figures_of_leaders(load: ClientLoad, tail: JournalTail) -> dict[str, float]:
    """Count what an old leader wrote after it was followed, and what clients were told before any journal had it."""
    await tail.catch_up()
    await tail.look_behind()
    drawn = [told for told in load.history.requests.values() if load.asks[told.ask].streams]
    return {
        "stale_entries": tail.num_stale,
        "journaled_twice": tail.num_twice(told for told in drawn if not load.asks[told.ask].stop),
        "delivered_not_in_journal": tail.num_unknown(drawn),
    }


def _timed_tokens(told: Told, sample: int) -> list[tuple[int, float]]:
    return [(token, piece.at_s) for piece in told.pieces if piece.sample == sample for token in piece.tokens]
