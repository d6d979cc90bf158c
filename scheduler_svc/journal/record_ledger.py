"""Accounts of the records that a process keeps itself: their tenants, sizes and ends.

Decides which records leave, by the rules of the script for Redis. Knows no payload and no clock. Pure.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from scheduler_svc.journal.store import Record

_MOST_STALE = 1000  # entries of the heap, beside two for each tenant


class _Entry(NamedTuple):
    """Account of one record. Entries are ordered by end."""

    ended_unix_ns: int
    request_id: str
    tenant: str
    weight: int


class RecordLedger:
    """Keeps added records, except those that `add` returns as dropped, and expired ones."""

    def __init__(self) -> None:
        self.dropped_until: dict[str, int] = {}  # by tenant, the latest loser last: latest end of its dropped records
        self._entries: dict[str, _Entry] = {}  # by request_id
        self._all: list[_Entry] = []  # by end
        self._of: dict[str, list[_Entry]] = {}  # by tenant, by end
        self._bytes_of: Counter[str] = Counter()
        self._num_bytes = 0
        # Negative bytes and tenant, the largest first. Of each tenant one entry is no less than what it has.
        self._by_bytes: list[tuple[int, str]] = []

    def add(self, record: Record, max_bytes: int, max_tenant_bytes: int) -> list[str]:
        """Add a record; returns the request_ids of records dropped for it, perhaps its own. The last record stays."""
        tenant = record.tenant
        if (known := self._entries.get(record.request_id)) is not None:
            self._remove(known)
        entry = _Entry(record.ended_unix_ns, record.request_id, tenant, record.weight)
        self._entries[record.request_id] = entry
        insort(self._all, entry)
        insort(self._of.setdefault(tenant, []), entry)
        self._bytes_of[tenant] += entry.weight
        self._num_bytes += entry.weight
        self._push_size(tenant)
        dropped = []
        while self._bytes_of[tenant] > max_tenant_bytes and len(self._of[tenant]) > 1:
            dropped.append(self._drop_first(tenant))
        while self._num_bytes > max_bytes and len(self._entries) > 1:
            dropped.append(self._drop_first(self._largest()))
        return dropped

    def expire(self, ended_unix_ns: int) -> None:
        """Remove records that ended until then."""
        for each in self._all[: bisect_right(self._all, ended_unix_ns, key=lambda each: each.ended_unix_ns)]:
            self._remove(each)
        while self.dropped_until:
            tenant, until_ns = next(iter(self.dropped_until.items()))
            if until_ns > ended_unix_ns:
                break
            del self.dropped_until[tenant]

    def _drop_first(self, tenant: str) -> str:
        first = self._of[tenant][0]
        self._remove(first)
        self.dropped_until[tenant] = max(self.dropped_until.pop(tenant, 0), first.ended_unix_ns)
        return first.request_id

    def _remove(self, entry: _Entry) -> None:
        tenant = entry.tenant
        del self._entries[entry.request_id]
        del self._all[bisect_left(self._all, entry)]
        entries = self._of[tenant]
        del entries[bisect_left(entries, entry)]
        self._num_bytes -= entry.weight
        self._bytes_of[tenant] -= entry.weight
        if not entries:
            del self._of[tenant], self._bytes_of[tenant]

    def _push_size(self, tenant: str) -> None:
        heappush(self._by_bytes, (-self._bytes_of[tenant], tenant))
        if len(self._by_bytes) > 2 * len(self._of) + _MOST_STALE:
            self._by_bytes = [(-num_bytes, each) for each, num_bytes in self._bytes_of.items()]
            heapify(self._by_bytes)

    def _largest(self) -> str:
        """Tenant with the most bytes."""
        while True:
            negative_bytes, tenant = self._by_bytes[0]
            num_bytes = self._bytes_of[tenant]  # 0 for one that has none any more
            if -negative_bytes == num_bytes:
                return tenant
            heappop(self._by_bytes)
            if 0 < num_bytes < -negative_bytes:
                heappush(self._by_bytes, (-num_bytes, tenant))
