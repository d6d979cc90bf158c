"""Leases for tests that keep one by a long time to live, where a leader would renew it. Knows no leader."""

from typing import Any

from scheduler_svc.journal.leases import HeldLease, Lease
from scheduler_svc.journal.redis_leases import RedisLeases
from tests.patience import patient


class RenewedLeases(RedisLeases):
    """Leases whose leaders live: they renew at once a lease that a standby shortens, and a slow store is no trouble."""

    def __init__(self, url: str, *, timeout_s: float = 20.0, **options: Any) -> None:
        super().__init__(url, timeout_s=patient(timeout_s), **options)

    async def shorten(self, lease: Lease, ttl_ms: int) -> None:
        """Drop the lease."""


class ReturningLeases(RenewedLeases):
    """Leases of a leader that takes its own again one look after a standby found it gone, while `returns` is set."""

    def __init__(self, url: str, leader: Lease, *, left_ms: int | None = None) -> None:
        """`left_ms`: what each lease is said to have left; None: what it has."""
        super().__init__(url)
        self.returns = True
        self._leader = leader
        self._left_ms = left_ms
        self._was_gone = False

    async def read(self) -> HeldLease | None:
        """Look at the lease, as the standby does."""
        if self._was_gone and self.returns:
            await self.hold(self._leader, 60_000)
        held = await super().read()
        self._was_gone = held is None
        return held if held is None or self._left_ms is None else HeldLease(held.lease, self._left_ms)
