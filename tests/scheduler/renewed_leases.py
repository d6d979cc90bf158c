"""Leases for tests that keep one by a long time to live, where a leader would renew it. Knows no leader."""

from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.redis_leases import RedisLeases


class RenewedLeases(RedisLeases):
    """Leases whose leaders live: they renew at once a lease that a standby shortens."""

    async def shorten(self, lease: Lease, ttl_ms: int) -> None:
        """Drop the lease."""
