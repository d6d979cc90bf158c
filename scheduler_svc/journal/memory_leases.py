"""Lease inside the process: always granted, since no other scheduler can ask for it."""

import time
from collections.abc import Sequence

from scheduler_svc.journal.leases import HeldLease, Lease


class MemoryLeases:
    """Knows one leader, and no standbys."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._until_s = 0.0

    async def read(self) -> HeldLease | None:
        left_ms = round((self._until_s - time.monotonic()) * 1000)
        return HeldLease(self._lease, left_ms) if self._lease is not None and left_ms > 0 else None

    async def take_lease(self, lease: Lease, ttl_ms: int, *, ended_epoch: int = 0) -> Lease | None:
        self._keep(lease, ttl_ms)
        return None

    async def hold(self, lease: Lease, ttl_ms: int) -> Lease | None:
        self._keep(lease, ttl_ms)
        return None

    async def shorten(self, lease: Lease, ttl_ms: int) -> None:
        """Do nothing: its clock is never set."""

    async def release(self, lease: Lease) -> None:
        self._lease = None

    async def announce(self, address: str, ttl_ms: int) -> None:
        """Do nothing: no other process reads it."""

    async def standbys(self, longest_ms: int) -> Sequence[str]:
        return ()

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _keep(self, lease: Lease, ttl_ms: int) -> None:
        self._lease, self._until_s = lease, time.monotonic() + ttl_ms / 1000
