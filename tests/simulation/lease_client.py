"""A scheduler's side of the simulated store beside the journal's writer: the lease, and the journal as it grows."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from scheduler_svc.journal.leases import HeldLease, Lease
from scheduler_svc.journal.store import JOURNAL_START, EntryId, StoredEntry
from tests.simulation.store_client import Link, Way
from tests.simulation.store_server import LossyStore

LEASE_TIMEOUT_S = 0.5
TAIL_TIMEOUT_S = 3.0
TAIL_POLL_S = 0.02  # in place of a blocking read
TAIL_WAIT_S = 0.25  # that a read finds nothing


class LeaseClient:
    """Implements Leases. Each method is one step of the server, as the scripts of RedisLeases are, and by its clock."""

    def __init__(self, way: Way) -> None:
        self._link = Link(way, LEASE_TIMEOUT_S)

    async def read(self) -> HeldLease | None:
        held: HeldLease | None = await self._call("lease?", self._read, is_write=False)
        return held

    async def take_lease(self, lease: Lease, ttl_ms: int, *, ended_epoch: int = 0) -> Lease | None:
        async def work(store: LossyStore) -> Lease | None:
            held = await self._read(store)
            if held is not None and held.lease.holder != lease.holder and held.lease.epoch != (ended_epoch or -1):
                return held.lease
            self._keep(store, lease, ttl_ms)
            return None

        other: Lease | None = await self._call(f"take {lease}", work)
        return other

    async def hold(self, lease: Lease, ttl_ms: int) -> Lease | None:
        async def work(store: LossyStore) -> Lease | None:
            held = await self._read(store)
            is_others = held is not None and held.lease.holder != lease.holder
            if held is not None and is_others and (held.lease.epoch == 0 or held.lease.epoch > lease.epoch):
                return held.lease
            self._keep(store, lease, ttl_ms)
            return None

        other: Lease | None = await self._call(f"hold {lease}", work)
        return other

    async def shorten(self, lease: Lease, ttl_ms: int) -> None:
        async def work(store: LossyStore) -> None:
            held = await self._read(store)
            if held is not None and held.lease == lease and held.left_ms > ttl_ms:
                self._keep(store, lease, ttl_ms)

        await self._call(f"shorten {lease}", work)

    async def release(self, lease: Lease) -> None:
        async def work(store: LossyStore) -> None:
            if store.lease is not None and store.lease[0].holder == lease.holder:
                store.lease = None

        await self._call(f"release {lease}", work)

    async def announce(self, address: str, ttl_ms: int) -> None:
        async def work(store: LossyStore) -> None:
            store.standbys[address] = store.now_s + ttl_ms / 1000

        await self._call(f"announce {address}", work)

    async def standbys(self, longest_ms: int) -> Sequence[str]:
        async def work(store: LossyStore) -> Sequence[str]:
            latest_s = store.now_s + longest_ms / 1000
            return [address for address, until_s in store.standbys.items() if store.now_s < until_s <= latest_s]

        found: Sequence[str] = await self._call("standbys?", work, is_write=False)
        return found

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    async def _call(self, name: str, work: Callable[[LossyStore], Any], *, is_write: bool = True) -> Any:
        return await self._link.call(name, work, is_write=is_write)

    async def _read(self, store: LossyStore) -> HeldLease | None:
        if store.lease is None:
            return None
        lease, until_s = store.lease
        left_ms = round((until_s - store.now_s) * 1000)
        return HeldLease(lease, left_ms) if left_ms > 0 else None

    def _keep(self, store: LossyStore, lease: Lease, ttl_ms: int) -> None:
        store.lease = (lease, store.now_s + ttl_ms / 1000)


class TailClient:
    """Implements JournalTail: asks often in place of a blocking read."""

    def __init__(self, way: Way) -> None:
        self._link = Link(way, TAIL_TIMEOUT_S)

    async def read_after(self, last: EntryId, limit: int) -> Sequence[StoredEntry]:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + TAIL_WAIT_S
        while True:
            await asyncio.sleep(TAIL_POLL_S)
            found = await self._read(EntryId(last.epoch, last.seq + 1), limit)
            if found or loop.time() >= until_s:
                return found

    async def first(self) -> StoredEntry | None:
        found = await self._read(JOURNAL_START, 1)
        return found[0] if found else None

    async def has(self, entry_id: EntryId) -> bool:
        found = await self._read(entry_id, 1)
        return bool(found) and found[0].entry_id == entry_id

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    async def _read(self, first: EntryId, limit: int) -> Sequence[StoredEntry]:
        found: Sequence[StoredEntry] = await self._link.call(
            f"tail {first}", lambda store: store.read_entries(first, limit)
        )
        return found
