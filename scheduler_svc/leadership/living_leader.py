"""Tells a living leader from the lease that a dead one has left. Knows no journal."""

import asyncio

from scheduler_svc.journal.leases import MOST_LONGER_MS, Lease, Leases

_LOOKS = 8  # within the life of a lease, which its leader renews four times meanwhile


async def find_living_leader(leases: Leases, me: Lease, *, lease_ms: int) -> Lease | None:
    """Find the lease of another scheduler that renews it; None if there is none, or what a dead one left has ended.

    A lease of our own address is that of our predecessor: this process listens there. Two machines may have the same,
    such as that of loopback, so the host counts, too. Raises StoreUnavailableError.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + (lease_ms + MOST_LONGER_MS) / 1000  # a store's clock may be set back
    before = await leases.read()
    while before is not None and not _is_predecessor(before.lease, me) and loop.time() < until_s:
        await asyncio.sleep(lease_ms / 1000 / _LOOKS)
        held = await leases.read()
        if held is not None and (held.lease != before.lease or held.left_ms > before.left_ms):
            return None if _is_predecessor(held.lease, me) else held.lease
        before = held
    return None


def _is_predecessor(lease: Lease, me: Lease) -> bool:
    host, our_host = (each.leader_id.rpartition("-")[0] for each in (lease, me))
    return (host, lease.address) == (our_host, me.address)
