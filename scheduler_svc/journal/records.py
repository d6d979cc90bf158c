"""Request records: outputs of ended requests, for late readers.

Written in the background, in batches, and tried again while the store does not answer. Knows nothing of
the payload.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import structlog

from common.waits import growing_pauses, is_set_within
from scheduler_svc.journal.store import Record, RecordLimits, Store, StoreUnavailableError

log = structlog.get_logger()

_MAX_BATCH = 256
_SAY_EVERY_S = 60.0


class _Pending(NamedTuple):
    """Record on its way to the store."""

    record: Record
    on_settled: Callable[[bool], None] | None


class Records:
    """A record can be read from the moment it was put. Owned by the event loop's thread."""

    def __init__(
        self,
        store: Store,
        *,
        limits: RecordLimits | None = None,
        max_pending_bytes: int = 64 << 20,
        close_timeout_s: float = 5.0,
    ) -> None:
        """Take a store that is open.

        Args:
            store: where records go.
            limits: time for which the store keeps a record, and bytes of all records.
            max_pending_bytes: when more than this waits for the store, the oldest are given up, of the tenant that
                has the most.
            close_timeout_s: longest wait of `close` for pending records.
        """
        self._store = store
        self._limits = limits or RecordLimits()
        self._max_pending_bytes = max_pending_bytes
        self._close_timeout_s = close_timeout_s
        self._pending: dict[str, _Pending] = {}  # by request_id, oldest first
        self._pending_bytes = 0
        self._pending_of: dict[str, dict[str, int]] = {}  # by tenant: bytes by request_id, oldest first
        self._bytes_of: Counter[str] = Counter()  # by tenant, of those pending
        self.num_given_up = 0  # records dropped because too much waited for the store
        self.num_dropped = 0  # records dropped before their time because the store keeps no more of them
        self._num_dropped_unsaid = 0
        self._said_s = -_SAY_EVERY_S
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopped.set()
        self._give_up = asyncio.Event()
        self._closing = False

    @property
    def num_pending(self) -> int:
        """Records not yet in the store."""
        return len(self._pending)

    @property
    def pending_ids(self) -> Set[str]:
        """Request ids of these."""
        return self._pending.keys()

    def put(
        self,
        request_id: str,
        payload: bytes,
        on_settled: Callable[[bool], None] | None = None,
        *,
        tenant: str = "",
        ended_unix_ns: int | None = None,
        replaces: bool = False,
    ) -> None:
        """Put a record; never waits. The end of the request is now unless given.

        `replaces` what the store has of this request, which else stays: a record is written once, since a write of it
        may come late, after another leader's. One that is not in the store yet is replaced by a newer one.

        `on_settled` is called once the record is in the store, with True, or with False once it was given up, or a
        newer one has taken its place: from then on the journal's entries of this request serve no one.
        """
        self._remove(request_id, is_kept=False)
        now_ns = time.time_ns()  # a later end is by a clock that was ahead of ours
        ended_unix_ns = now_ns if ended_unix_ns is None else min(ended_unix_ns, now_ns)
        self._pending[request_id] = _Pending(Record(request_id, tenant, ended_unix_ns, payload, replaces), on_settled)
        self._pending_of.setdefault(tenant, {})[request_id] = len(payload)
        self._bytes_of[tenant] += len(payload)
        self._pending_bytes += len(payload)
        while self._pending_bytes > self._max_pending_bytes and len(self._pending) > 1:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            oldest = next(iter(self._pending_of[largest]))
            log.error("record given up: too many wait for the store", request_id=oldest)
            self.num_given_up += 1
            self._remove(oldest, is_kept=False)
        self._wake.set()

    async def get(self, request_id: str) -> bytes | None:
        """Payload of a record; None if unknown or expired. Raises StoreUnavailableError."""
        pending = self._pending.get(request_id)
        if pending is not None:
            return pending.record.payload
        return await self._store.get_record(request_id)

    async def run(self) -> None:
        """Write records, as the one writer. Returns after `close`."""
        self._stopped.clear()
        pauses = growing_pauses()
        try:
            while await self._wait_for_pending():
                ids = list(self._pending)[:_MAX_BATCH]
                batch = [self._pending[request_id].record for request_id in ids]
                try:
                    self._record_dropped(await self._store.put_records(batch, self._limits))
                except StoreUnavailableError as error:
                    log.warning("records not written", reason=error.message, pending=len(self._pending))
                    if await is_set_within(self._give_up, next(pauses)):
                        log.error("records lost at the end", pending=len(self._pending))
                        return
                    continue
                pauses = growing_pauses()
                self._settle(batch)
        finally:
            self._stopped.set()

    async def close(self) -> None:
        """Write pending records, as long as the time limit allows, and end `run`."""
        self._closing = True
        self._wake.set()
        await asyncio.sleep(0)  # `run` may have been begun just now, and has its turn before this
        if not await is_set_within(self._stopped, self._close_timeout_s):
            self._give_up.set()
            await self._stopped.wait()

    async def _wait_for_pending(self) -> bool:
        while not self._pending:
            if self._closing:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    def _record_dropped(self, number: int) -> None:
        self.num_dropped += number
        self._num_dropped_unsaid += number
        now_s = time.monotonic()
        if self._num_dropped_unsaid and now_s >= self._said_s + _SAY_EVERY_S:
            log.warning(
                "records dropped before their time: the store keeps no more; see max_record_mb, max_record_share, and "
                "its maxmemory",
                num_dropped=self._num_dropped_unsaid,
            )
            self._num_dropped_unsaid, self._said_s = 0, now_s

    def _settle(self, batch: Sequence[Record]) -> None:
        for record in batch:
            pending = self._pending.get(record.request_id)
            if pending is not None and pending.record is record:  # else: put again meanwhile, or given up
                self._remove(record.request_id, is_kept=True)

    def _remove(self, request_id: str, *, is_kept: bool) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        tenant = pending.record.tenant
        num_bytes = self._pending_of[tenant].pop(request_id)
        self._pending_bytes -= num_bytes
        self._bytes_of[tenant] -= num_bytes
        if not self._pending_of[tenant]:
            del self._pending_of[tenant], self._bytes_of[tenant]
        if pending.on_settled is not None:
            pending.on_settled(is_kept)
