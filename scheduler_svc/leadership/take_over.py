"""The way from a scheduler that may lead to one that leads: it takes an epoch, reads the journal, and says so.

Whatever the store does on the way, nothing has been served yet: the attempt is given up, and another one begins from
nothing. Knows no gRPC.
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
    """What a scheduler holds of requests, made for one attempt to lead."""

    journal: Journal
    records: Records
    engine: Engine
    readers: Readers
    recovery: Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading:
    """An attempt that came to its end. `keeping_lease` runs until it is cancelled."""

    attempt: Attempt
    epoch: int
    lease: LeaseKeeper
    keeping_lease: "asyncio.Task[None]"


class TakeOver:
    """Tries until it leads: a standby for ever, going back to stand by; who is none as long as the store is waited for.

    A standby's memory of the journal outlives every attempt.
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
        """`standby` and `hot` belong together: who stands by, and what it reads meanwhile."""
        self._new_attempt = new_attempt
        self._store = store
        self._leases = leases
        self._me = me
        self._lease_ms = lease_ms
        self._store_timeout_s = store_timeout_s
        self._standby = standby
        self._hot = hot

    async def lead(self) -> Leading:
        """Returns once this process leads, and may serve.

        Raises DataLossError if an entry of the journal is damaged; who is no standby raises StoreUnavailableError and
        FencedError, too.
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
                log.warning("not leading yet: the take-over came to nothing", reason=str(error))
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
        keeping_lease = asyncio.create_task(lease.keep())
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
                await lease.release()  # it is that of who was faster
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
    """Returns the epoch in which this process leads: earlier leaders are fenced, and what they left is known.

    Args:
        journal: not opened yet.
        recovery: takes what has not ended.
        store: the journal's.
        hot: what was read of the journal before, if this was a standby.
        patience_s: how long to wait for a leader that lives and knows more than the journal has: the journal is
            empty, or its last leader had not become ready.

    Raises StoreUnavailableError, JournalLostError or FencedError if it comes to nothing, DataLossError if an entry of
    the journal is damaged.
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
