"""Take-over of leadership: take an epoch, read the journal, declare the start.

Nothing is served before that: if the store fails on the way, the attempt is dropped and a new one begins from nothing.
Knows no gRPC.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.leases import Lease, Leases
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.store import (
    FencedError,
    JournalLostError,
    Store,
    StoreConfigurationError,
    StoreUnavailableError,
)
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.lease_keeper import LeaseKeeper
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.recovery.recovery import Recovery

log = structlog.get_logger()

_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Parts that hold requests, made anew for each attempt to lead."""

    journal: Journal
    records: Records
    engine: Engine
    readers: Readers
    recovery: Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading:
    """Attempt that succeeded. `keeping_lease` runs until it is cancelled."""

    attempt: Attempt
    epoch: int
    lease: LeaseKeeper
    keeping_lease: "asyncio.Task[None]"


class TakeOver:
    """Tries until this process leads: a standby for ever, others as long as `store_timeout_s`.

    A standby goes back to stand by after a failed attempt, and keeps the journal that it has read.
    """

    def __init__(
        self,
        new_attempt: Callable[[], Attempt],
        store: Store,
        leases: Leases,
        me: Lease,
        *,
        lease_ms: int,
        store_timeout_s: float,
        standby: Standby | None = None,
        hot: HotJournal | None = None,
    ) -> None:
        """`standby` and `hot` come together: the standby, and the journal that it follows meanwhile."""
        self._new_attempt = new_attempt
        self._store = store
        self._leases = leases
        self._me = me
        self._lease_ms = lease_ms
        self._store_timeout_s = store_timeout_s
        self._standby = standby
        self._hot = hot

    async def lead(self) -> Leading:
        """Return once this process leads, and may serve.

        Raises JournalDamagedError if an entry of the journal is damaged; without `standby` also StoreUnavailableError
        and FencedError.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._store_timeout_s
        while True:
            if self._standby is not None:
                await self._standby.wait()
            try:
                return await self._try()
            except (StoreUnavailableError, JournalLostError, FencedError) as error:
                is_final = isinstance(error, FencedError | StoreConfigurationError) or loop.time() > give_up_s
                if self._standby is None and is_final:
                    raise
                log.warning("not leading yet: the take-over failed, trying again", reason=str(error))
            await asyncio.sleep(_RETRY_S)

    async def _try(self) -> Leading:
        attempt = self._new_attempt()
        journal = attempt.journal
        lease = LeaseKeeper(
            self._leases,
            self._me,
            lease_ms=self._lease_ms,
            epoch=lambda: journal.stats.epoch,
            on_doubt=journal.probe_soon,
        )
        keeping_lease = asyncio.create_task(lease.keep_lease())
        try:
            epoch = await take_over(
                journal,
                attempt.recovery,
                self._store,
                self._hot,
                patience_s=self._lease_ms / 1000 if self._store.durable else 0.0,
            )
        except BaseException as error:
            keeping_lease.cancel()
            await asyncio.gather(keeping_lease, return_exceptions=True)
            await attempt.recovery.close()
            if isinstance(error, FencedError):
                await lease.release()  # another process was faster
            raise
        return Leading(attempt=attempt, epoch=epoch, lease=lease, keeping_lease=keeping_lease)


async def take_over(
    journal: Journal,
    recovery: Recovery,
    store: Store,
    hot: HotJournal | None,
    *,
    patience_s: float,
) -> int:
    """Fence earlier leaders and read what they left; returns the epoch in which this process leads.

    Args:
        journal: not opened yet.
        recovery: takes the requests that have not ended.
        store: the journal's.
        hot: the journal as read before, if this was a standby.
        patience_s: wait for a living leader that may know more than the journal has: the journal is empty, or its
            last leader had not become ready.

    Raises StoreUnavailableError, JournalLostError or FencedError if the take-over fails, JournalDamagedError if an
    entry of the journal is damaged.
    """
    epoch = await journal.open(
        after_epoch=hot.last.epoch if hot is not None else 0,
        says_all_again=hot is not None and await hot.outlives_journal(),
    )
    begun = await hot.begun(epoch) if hot is not None else None
    if not await recovery.read(store, begun) and patience_s:
        log.info("waiting for a leader that may know more than the journal has", seconds=patience_s, epoch=epoch)
        await asyncio.sleep(patience_s)
    await journal.begin()
    return journal.stats.epoch
