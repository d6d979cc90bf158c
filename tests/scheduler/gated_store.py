"""A store whose answers wait for the test: slow, silent, or fenced."""

import asyncio
from collections.abc import Sequence

from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId, StaleEntryError, StoredEntry, StoreUnavailableError

NEWER = EntryId(2**62, 0)  # of a leader later than any that a clock makes


class GatedStore(MemoryStore):
    """`may_append` shut keeps entries on their way; `unavailable` makes every command fail."""

    def __init__(self) -> None:
        super().__init__()
        self.may_append = asyncio.Event()
        self.may_append.set()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.unavailable = False
        self.fenced = False
        self.num_waiting = 0
        self.num_reading = 0

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        self.num_waiting += 1
        await self.may_append.wait()
        self.num_waiting -= 1
        self._check()
        if self.fenced:
            raise StaleEntryError("equal or smaller")
        await super().append(entry_id, payload, create=create)

    async def last_entry_id(self) -> EntryId | None:
        return NEWER if self.fenced else await super().last_entry_id()

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False) -> Sequence[StoredEntry]:
        return [StoredEntry(NEWER, None, None)] if self.fenced else await super().read_entries(first, limit)

    async def first_entry_id(self, first: EntryId, *, is_urgent: bool = False) -> EntryId | None:
        return NEWER if self.fenced else await super().first_entry_id(first)

    async def get_record(self, request_id: str) -> bytes | None:
        self.num_reading += 1
        await self.may_read.wait()
        self.num_reading -= 1
        self._check()
        return await super().get_record(request_id)

    def _check(self) -> None:
        if self.unavailable:
            raise StoreUnavailableError("no answer")
