"""A store inside the process: for trying things out and for tests. Nothing in it outlives the process.

Refuses what RedisStore refuses, in the same order.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

from scheduler_svc.journal.store import EntryId, StaleEntryError, StoredEntry, StoreFlushedError


class MemoryStore:
    """Expired records leave when others are put."""

    kind = "memory"
    durable = False
    durability = "none: it ends with this process"

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self.clear()

    def clear(self) -> None:
        """As FLUSHALL."""
        self.epoch = 0  # the last one taken
        self._last: EntryId | None = None
        self._ids: list[EntryId] = []
        self._payloads: list[bytes] = []
        self._records: dict[str, tuple[float, bytes]] = {}  # until when (clock), payload

    async def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    async def raise_epoch(self, epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        if self._last is None:
            if not create:
                raise StoreFlushedError("there is no journal in memory")
        elif entry_id <= self._last:
            raise StaleEntryError(f"{entry_id} is not after {self._last}")
        self._last = entry_id
        self._ids.append(entry_id)
        self._payloads.append(payload)

    async def last_entry_id(self) -> EntryId | None:
        return self._last

    async def read_entries(self, first: EntryId, limit: int) -> Sequence[StoredEntry]:
        start = bisect_left(self._ids, first)
        return [
            StoredEntry(entry_id, payload, b"%08x" % crc32(payload))
            for entry_id, payload in zip(
                self._ids[start : start + limit], self._payloads[start : start + limit], strict=True
            )
        ]

    async def trim(self, oldest: EntryId) -> None:
        count = bisect_left(self._ids, oldest)
        del self._ids[:count], self._payloads[:count]

    async def put_records(self, payloads: Mapping[str, bytes], ttl_s: int) -> None:
        now_s = self._clock_s()
        expired = [key for key, (until_s, _) in self._records.items() if until_s <= now_s]
        for key in expired:
            del self._records[key]
        for key, payload in payloads.items():
            self._records[key] = (now_s + ttl_s, payload)

    async def known_records(self, request_ids: Sequence[str]) -> set[str]:
        now_s = self._clock_s()
        return {each for each in request_ids if each in self._records and self._records[each][0] > now_s}

    async def get_record(self, request_id: str) -> bytes | None:
        until_s, payload = self._records.get(request_id, (0.0, None))
        return payload if until_s > self._clock_s() else None

    async def close(self) -> None:
        """Nothing to let go of."""
