"""Store inside the process, for trials and tests. Its contents end with the process.

Refuses what RedisStore refuses, in the same order.
"""

import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from zlib import crc32

from scheduler_svc.journal.record_ledger import RecordLedger
from scheduler_svc.journal.store import (
    EntryId,
    Record,
    RecordLimits,
    StaleEntryError,
    StoredEntry,
    StoreFlushedError,
)


class MemoryStore:
    """Expired records leave when others are put. They live by the monotonic clock, their accounts by Unix time."""

    kind = "memory"
    durable = False
    durability = "none: it ends with this process"

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop the contents, as FLUSHALL does."""
        self.epoch = 0  # the last one taken
        self._last: EntryId | None = None
        self._ids: list[EntryId] = []
        self._payloads: list[bytes] = []
        self._records: dict[str, tuple[int, bytes]] = {}  # until when (monotonic), payload; oldest first
        self._ledger = RecordLedger()

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

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False) -> Sequence[StoredEntry]:
        start = bisect_left(self._ids, first)
        return [
            StoredEntry(entry_id, payload, b"%08x" % crc32(payload))
            for entry_id, payload in zip(
                self._ids[start : start + limit], self._payloads[start : start + limit], strict=True
            )
        ]

    async def first_entry_id(self, first: EntryId, *, is_urgent: bool = False) -> EntryId | None:
        start = bisect_left(self._ids, first)
        return self._ids[start] if start < len(self._ids) else None

    async def trim(self, oldest: EntryId) -> None:
        count = bisect_left(self._ids, oldest)
        del self._ids[:count], self._payloads[:count]

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        ttl_ns = limits.ttl_s * 1_000_000_000
        self._drop_expired()
        self._ledger.expire(time.time_ns() - ttl_ns)
        num_dropped = 0
        for each in records:
            if not each.replaces and self._is_kept(each.request_id):
                continue
            self._records.pop(each.request_id, None)
            self._records[each.request_id] = (time.monotonic_ns() + ttl_ns, each.payload)
            dropped = self._ledger.add(each, limits.max_bytes, limits.max_tenant_bytes)
            num_dropped += len(dropped)
            for request_id in dropped:
                self._records.pop(request_id, None)
        return num_dropped

    async def dropped_until(self, tenants: Collection[str]) -> Mapping[str, int]:
        dropped_until = self._ledger.dropped_until
        return {tenant: dropped_until[tenant] for tenant in tenants if tenant in dropped_until}

    async def known_records(self, request_ids: Sequence[str]) -> set[str]:
        return {each for each in request_ids if self._is_kept(each)}

    async def get_record(self, request_id: str) -> bytes | None:
        until_ns, payload = self._records.get(request_id, (0, None))
        return payload if until_ns > time.monotonic_ns() else None

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _is_kept(self, request_id: str) -> bool:
        return request_id in self._records and self._records[request_id][0] > time.monotonic_ns()

    def _drop_expired(self) -> None:
        now_ns = time.monotonic_ns()
        while self._records:
            request_id, (until_ns, _) = next(iter(self._records.items()))
            if until_ns > now_ns:
                return
            del self._records[request_id]
