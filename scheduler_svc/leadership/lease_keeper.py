"""A leader's lease: held from when it begins to lead, as long as it does, and given up at its end.

A store that does not answer ends no leader, and neither does a lease that is lost: the lease only says who may try to
lead. Who leads is said by the journal, which is looked at when somebody else has the lease.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from scheduler_svc.journal.leases import MOST_LONGER_MS, Lease, Leases
from scheduler_svc.journal.store import StoreUnavailableError

log = structlog.get_logger()

_RENEWALS = 4  # within the life of a lease
_LONGEST_PRESENT_LEASES = 4  # lives of a lease; standbys say that they are there for two


class LeaseKeeper:
    """One per leader. `keep` is its one task."""

    def __init__(
        self, leases: Leases, lease: Lease, *, lease_ms: int, epoch: Callable[[], int], on_doubt: Callable[[], None]
    ) -> None:
        """Takes whose lease it is, and what tells the epoch that we lead in; 0: we are about to lead.

        `on_doubt` is called whenever somebody else has the lease.
        """
        self._leases = leases
        self._lease = lease
        self._lease_ms = lease_ms
        self._epoch = epoch
        self._on_doubt = on_doubt
        self._longer_ms = 0
        self._is_released = self._is_late = False
        self._other: Lease | None = None  # who has it, as last seen

    async def keep(self) -> None:
        """Takes the lease, renews it, and takes it again where it was lost, until cancelled."""
        while True:
            if not self._is_released:
                await self._hold()
            await asyncio.sleep(self._lease_ms / 1000 / _RENEWALS)

    @asynccontextmanager
    async def longer(self, seconds: float) -> AsyncIterator[None]:
        """Inside, each renewal holds for so much longer: what is done there may keep the process from the next one.

        For 10 s longer at most: a standby takes more for a store whose clock was set back, and shortens the lease.
        """
        longer_ms = min(round(seconds * 1000), MOST_LONGER_MS - self._longer_ms)
        self._longer_ms += longer_ms
        try:
            if not self._is_released:
                await self._hold()
            yield
        finally:
            self._longer_ms -= longer_ms

    async def standbys(self) -> list[str]:
        """Addresses of the standbys that are present; none if the store does not say."""
        try:
            return list(await self._leases.standbys(_LONGEST_PRESENT_LEASES * self._lease_ms))
        except StoreUnavailableError as error:
            log.warning("standbys not known", reason=error.message)
            return []

    async def release(self) -> None:
        """Gives the lease up, so that nobody has to wait for its end."""
        self._is_released = True
        try:
            await self._leases.release(self._lease)
        except StoreUnavailableError as error:
            log.warning("lease not given up", reason=error.message)

    async def _hold(self) -> None:
        lease = replace(self._lease, epoch=self._epoch())
        try:
            other = await self._leases.hold(lease, self._lease_ms + self._longer_ms)
        except StoreUnavailableError as error:
            if not self._is_late:
                log.warning("lease not renewed", reason=error.message)
            self._is_late = True
            return
        self._is_late = False
        if other is not None and not self._is_released:
            if self._other != other:
                log.warning("another scheduler has the lease", epoch=lease.epoch, other=str(other))
            self._on_doubt()
        self._other = other
