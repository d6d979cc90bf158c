"""Lease of a leader: held from the beginning of a take-over to the end of leading.

Neither a store that does not answer nor a lost lease ends a leader: the lease only decides which scheduler may try to
lead. The journal decides which one leads; it is probed when another scheduler has the lease.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from common.waits import is_set_within
from scheduler_svc.journal.leases import MOST_LONGER_MS, Lease, Leases
from scheduler_svc.journal.store import StoreUnavailableError
from scheduler_svc.leadership.seen_leaders import SeenLeaders

log = structlog.get_logger()

_RENEWALS = 4  # within the life of a lease
_LONGEST_PRESENT_LEASES = 4  # lives of a lease; standbys announce themselves for two


class LeaseKeeper:
    """One per leader. `keep_lease` is its one task."""

    def __init__(
        self,
        leases: Leases,
        lease: Lease,
        *,
        lease_ms: int,
        epoch: Callable[[], int],
        on_other: Callable[[int], None],
        seen_leaders: SeenLeaders,
    ) -> None:
        """`epoch` returns the epoch in which we lead; 0: none yet.

        `on_other` is called with the epoch of another scheduler whenever that one has the lease; 0: none yet.
        """
        self._leases = leases
        self._lease = lease
        self._lease_ms = lease_ms
        self._epoch = epoch
        self._on_other = on_other
        self._seen_leaders = seen_leaders
        self._longer_ms = 0
        self._is_released = False
        self._is_due = asyncio.Event()
        self.is_late = False  # the store did not take the last renewal
        self._knows_standbys = True  # the store said last time
        self._other: Lease | None = None  # of another holder, as last seen

    async def keep_lease(self) -> None:
        """Take the lease, renew it, and take it again if it was lost, until cancelled."""
        while True:
            if not self._is_released:
                await self._hold()
            await is_set_within(self._is_due, self._lease_ms / 1000 / _RENEWALS)
            self._is_due.clear()

    def renew_now(self) -> None:
        """Let `keep_lease` renew at once: the lease shall tell our epoch, which is new."""
        self._is_due.set()

    @asynccontextmanager
    async def longer(self, seconds: float) -> AsyncIterator[None]:
        """Make each renewal inside hold for so much longer: work there may keep the process from the next one.

        By 10 s at most: a standby takes a longer lease for one of a store whose clock was set back, and shortens it.
        """
        longer_ms = min(round(seconds * 1000), MOST_LONGER_MS - self._longer_ms)
        self._longer_ms += longer_ms
        try:
            if not self._is_released:
                await self._hold()
            yield
        finally:
            self._longer_ms -= longer_ms

    async def standbys(self) -> list[str] | None:
        """Addresses of the standbys that are present; None if the store does not answer."""
        try:
            addresses = list(await self._leases.standbys(_LONGEST_PRESENT_LEASES * self._lease_ms))
        except StoreUnavailableError as error:
            if self._knows_standbys:  # who drains asks again and again
                log.warning("standbys not known", reason=error.message)
            self._knows_standbys = False
            return None
        self._knows_standbys = True
        return addresses

    async def release(self) -> None:
        """Release the lease, so that no standby has to wait for its end."""
        self._is_released = True
        try:
            await self._leases.release(self._lease)
        except StoreUnavailableError as error:
            log.warning("lease not released", reason=error.message)

    async def _hold(self) -> None:
        lease = replace(self._lease, epoch=self._epoch())
        try:
            other = await self._leases.hold(lease, self._lease_ms + self._longer_ms)
        except StoreUnavailableError as error:
            if not self.is_late:
                log.warning("lease not renewed", reason=error.message)
            self.is_late = True
            return
        self.is_late = False
        if other is not None and not self._is_released:
            if self._other != other:
                log.warning("another scheduler has the lease", epoch=lease.epoch, other=str(other))
            self._on_other(other.epoch)
        if other is not None:
            self._seen_leaders.record(other)
        self._other = other
