"""Request records: what is left of a request after its end, for a late reader.

Written in the background, in pipelines of what piled up, and tried again while the store is away. Knows nothing of
the payload.
"""

import asyncio
from collections.abc import Callable

import structlog

from scheduler_svc.journal.store import Store, StoreUnavailableError

log = structlog.get_logger()

_MAX_BATCH = 256
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


class Records:
    """A record can be read from the moment it was put. Owned by the event loop's thread."""

    def __init__(
        self,
        store: Store,
        *,
        ttl_s: int = 3600,
        max_pending_bytes: int = 64 << 20,
        close_timeout_s: float = 5.0,
    ) -> None:
        """Takes a store that is open.

        Args:
            store: where records go.
            ttl_s: how long the store keeps a record.
            max_pending_bytes: when more than this waits for the store, the oldest are given up.
            close_timeout_s: how long `close` waits for what is pending.
        """
        self._store = store
        self._ttl_s = ttl_s
        self._max_pending_bytes = max_pending_bytes
        self._close_timeout_s = close_timeout_s
        self._pending: dict[str, tuple[bytes, Callable[[], None] | None]] = {}  # by request_id, oldest first
        self._pending_bytes = 0
        self._num_given_up = 0
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
    def num_given_up(self) -> int:
        """Records dropped because too much waited for the store."""
        return self._num_given_up

    def put(self, request_id: str, payload: bytes, on_settled: Callable[[], None] | None = None) -> None:
        """Keeps a record; never waits.

        `on_settled` is called once the record is in the store, or was given up: from then on the journal's entries
        of this request serve no one.
        """
        self._remove(request_id)
        self._pending[request_id] = (payload, on_settled)
        self._pending_bytes += len(payload)
        while self._pending_bytes > self._max_pending_bytes and len(self._pending) > 1:
            oldest = next(iter(self._pending))
            log.error("record given up: too many wait for the store", request_id=oldest)
            self._num_given_up += 1
            self._remove(oldest)
        self._wake.set()

    async def get(self, request_id: str) -> bytes | None:
        """The payload; None if unknown or expired. Raises StoreUnavailableError."""
        pending = self._pending.get(request_id)
        if pending is not None:
            return pending[0]
        return await self._store.get_record(request_id)

    async def run(self) -> None:
        """The one writer. Returns after `close`."""
        self._stopped.clear()
        backoff_s = _MIN_BACKOFF_S
        try:
            while await self._wait_for_pending():
                ids = list(self._pending)[:_MAX_BATCH]
                batch = {request_id: self._pending[request_id][0] for request_id in ids}
                try:
                    await self._store.put_records(batch, self._ttl_s)
                except StoreUnavailableError as error:
                    log.warning("records not written", reason=error.message, pending=len(self._pending))
                    if await self._gives_up_within(backoff_s):
                        log.error("records lost at the end", pending=len(self._pending))
                        return
                    backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
                    continue
                backoff_s = _MIN_BACKOFF_S
                self._settle(batch)
        finally:
            self._stopped.set()

    async def close(self) -> None:
        """Writes what is pending, for as long as the time limit allows, and ends `run`."""
        self._closing = True
        self._wake.set()
        try:
            await asyncio.wait_for(self._stopped.wait(), self._close_timeout_s)
        except TimeoutError:
            self._give_up.set()
            await self._stopped.wait()

    async def _wait_for_pending(self) -> bool:
        while not self._pending:
            if self._closing:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    async def _gives_up_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._give_up.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _settle(self, batch: dict[str, bytes]) -> None:
        for request_id, payload in batch.items():
            pending = self._pending.get(request_id)
            if pending is not None and pending[0] is payload:  # else: put again meanwhile, or given up
                self._remove(request_id)

    def _remove(self, request_id: str) -> None:
        payload, on_settled = self._pending.pop(request_id, (b"", None))
        self._pending_bytes -= len(payload)
        if on_settled is not None:
            on_settled()
