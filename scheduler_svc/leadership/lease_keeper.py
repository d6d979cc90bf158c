"""A leader's lease: claimed when it leads, renewed as long as it does, and given up at its end.

A store that does not answer ends no leader: the lease only says who may try to lead.
"""

import asyncio

import structlog

from scheduler_svc.journal.leases import Lease, Leases
from scheduler_svc.journal.store import FencedError, StoreUnavailableError

log = structlog.get_logger()

_RENEWALS = 4  # within the life of a lease


class LeaseKeeper:
    """One per leader. `keep` is its one task."""

    def __init__(self, leases: Leases, lease: Lease, *, lease_ms: int) -> None:
        """`lease` has the epoch that the journal was opened with."""
        self._leases = leases
        self._lease = lease
        self._lease_ms = lease_ms
        self._is_claimed = self._is_released = self._is_late = False

    async def keep(self) -> None:
        """Claims the lease and renews it until cancelled. Raises FencedError when another scheduler leads."""
        while True:
            if not self._is_released:
                await self._renew()
            await asyncio.sleep(self._lease_ms / 1000 / _RENEWALS)

    async def standbys(self) -> list[str]:
        """Addresses of the standbys that are present; none if the store does not say."""
        try:
            return list(await self._leases.standbys())
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

    async def _renew(self) -> None:
        try:
            if self._is_claimed:
                lost_by = await self._leases.renew(self._lease, self._lease_ms)
            else:
                last = await self._leases.claim(self._lease, self._lease_ms)
                lost_by = f"epoch {last} was taken" if last > self._lease.epoch else ""
        except StoreUnavailableError as error:
            if not self._is_late:
                log.warning("lease not renewed", reason=error.message)
            self._is_late = True
            return
        if lost_by and not self._is_released:
            raise FencedError(f"another scheduler leads: we lost the lease of epoch {self._lease.epoch}, {lost_by}")
        self._is_claimed, self._is_late = True, False
