"""Tail of the journal: the entries of each request, read as they are written, before any of them is trimmed.

Follows admissions and tokens; of beams and ranked samples nothing, since what they stream is decided from more.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from common.arrays import unpack_int32, unpack_int64
from quire.v1 import journal_pb2
from scheduler_svc.journal.journal_entry import read_journal
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.store import JOURNAL_START, EntryId, StoreError
from tests.chaos.history import Told

PAUSE_S = 0.02


class JournalTail:
    """One reader. Use as an asynchronous context manager."""

    def __init__(self, url: str) -> None:
        self.num_stale = 0  # entries of an epoch behind a later LeaderStart
        self.epochs: list[int] = []
        self._store = RedisStore(url)
        self._next = JOURNAL_START
        self._outputs: dict[int, list[int]] = {}  # by number of a sequence
        self._first_sequence: dict[str, list[int]] = {}  # by request, of each of its admissions
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "JournalTail":
        await self._store.connect(patience_s=10.0)
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._store.close()

    async def catch_up(self) -> None:
        """Read the present entries."""
        async for entry_id, entry in read_journal(self._store, self._next):
            self._take(entry_id, entry)
            self._next = EntryId(entry_id.epoch, entry_id.seq + 1)

    def num_unknown(self, requests: Iterable[Told]) -> int:
        """Count positions that clients received and the journal lacks or contradicts."""
        num_unknown = 0
        for told in requests:
            starts = self._first_sequence.get(told.request_id, [])
            for sample in {piece.sample for piece in told.pieces}:
                mine = told.tokens_of(sample)
                known = [self._outputs.get(start + sample, []) for start in starts]
                num_unknown += min((_num_wrong(mine, each) for each in known), default=len(mine))
        return num_unknown

    def num_twice(self, requests: Iterable[Told]) -> int:
        """Count the journal's tokens of finished samples beyond those that their clients received."""
        num_twice = 0
        for told in requests:
            for sample in {piece.sample for piece in told.pieces}:
                for start in self._first_sequence.get(told.request_id, []):
                    num_twice += max(0, len(self._outputs.get(start + sample, [])) - len(told.tokens_of(sample)))
        return num_twice

    async def _follow(self) -> None:
        while True:
            with suppress(StoreError):  # it is in trouble, and will be asked again
                await self.catch_up()
            await asyncio.sleep(PAUSE_S)

    def _take(self, entry_id: EntryId, entry: journal_pb2.JournalEntry) -> None:
        if entry.HasField("leader_start"):
            self.epochs.append(entry_id.epoch)
        self.num_stale += bool(self.epochs) and entry_id.epoch < max(self.epochs)
        for admission in entry.admissions:
            self._first_sequence.setdefault(admission.request.request_id, []).append(admission.sequence)
        numbers, tokens = unpack_int64(entry.delta_sequences), unpack_int32(entry.delta_tokens)
        for number, token in zip(numbers, tokens, strict=True):
            self._outputs.setdefault(number, []).append(token)


def _num_wrong(told: list[int], journaled: list[int]) -> int:
    different = sum(a != b for a, b in zip(told, journaled, strict=False))
    return different + max(0, len(told) - len(journaled))
