"""Leases for tests that keep one by a long time to live, where a leader would renew it. Knows no leader."""

from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.redis_leases import RedisLeases


class RenewedLeases(RedisLeases):
    """Its leaders live: what a standby shortens they have renewed at once."""

    async def shorten(self, lease: Lease, ttl_ms: int) -> None:
        """Nothing is left of it."""
