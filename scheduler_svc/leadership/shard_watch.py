"""Watch of all shards of a deployment, for each of its schedulers: who leads each of them, with which load and cache.

Each shard is read by a task of its own, so that a node of the store that does not answer delays no other shard. Knows
leases; nothing of requests.
"""

import asyncio
from collections.abc import Sequence

import structlog
from google.protobuf.message import DecodeError

from common.waits import end_tasks
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.journal.leases import Lease, ShardLeases
from scheduler_svc.journal.store import StoreUnavailableError
from scheduler_svc.leadership.shard_choice import ShardView

log = structlog.get_logger()

_LOOK_S = 0.25
_LOAD_MS = 3000  # how long a published load counts
_FREE_LEASES = 0.5  # lives of a lease without leader and standby, after which a scheduler of another shard comes


class ShardWatch:
    """One per process. `shards` and `cached` have what is known, by number; `changed` is replaced when it is set."""

    def __init__(self, leases: Sequence[ShardLeases], *, lease_ms: int) -> None:
        """`leases`: of each shard, by number."""
        self.shards = [pb.Shard(number=number) for number in range(len(leases))]
        self.cached = [pb.CachedBeginnings(shard=number) for number in range(len(leases))]
        self.changed = asyncio.Event()
        self._leases = leases
        self._lease_ms = lease_ms
        self._free_since_s: list[float | None] = [None] * len(leases)  # on the loop's clock; None: led, or not known
        self._standbys: list[tuple[str, ...]] = [()] * len(leases)
        self._was_read = [asyncio.Event() for _ in leases]

    def leader_of(self, shard: int) -> str | None:
        """Address of a shard's leader; None: none is known."""
        return (self.shards[shard].leader or None) if shard < len(self.shards) else None

    async def run(self) -> None:
        """Look at every shard again and again, until cancelled."""
        looking = [asyncio.create_task(self._look_at(shard)) for shard in range(len(self._leases))]
        try:
            await asyncio.gather(*looking)
        finally:
            await end_tasks(*looking)

    async def publish(self, shard: pb.Shard, cached: pb.CachedBeginnings) -> None:
        """Publish what the leader says of its shard and of what is cached there."""
        published = shard.SerializeToString(), cached.SerializeToString()
        try:
            await self._leases[shard.number].publish_shard(*published, _LOAD_MS)
        except StoreUnavailableError:
            return  # others take it for unloaded, then; it is published again soon
        self._set(shard, cached)

    async def until_seen(self) -> None:
        """Return when every shard was looked at, or could not be."""
        for was_read in self._was_read:
            await was_read.wait()

    def views(self) -> list[ShardView]:
        """View each shard as it is known, for the choice of what to lead."""
        now_s = asyncio.get_running_loop().time()
        free_s = _FREE_LEASES * self._lease_ms / 1000
        return [
            ShardView(
                number=shard.number,
                leader=shard.leader,
                standbys=self._standbys[shard.number],
                is_in_need=shard.is_leaving or (since_s is not None and now_s - since_s > free_s),
            )
            for shard, since_s in zip(self.shards, self._free_since_s, strict=True)
        ]

    async def _look_at(self, number: int) -> None:
        is_told = False
        while True:
            try:
                held, load = await self._leases[number].read_shard()
                self._standbys[number] = tuple(await self._leases[number].standbys(4 * self._lease_ms))
                seen = self._seen(number, held.lease if held is not None else None, load)
                cached = await self._seen_cached(seen)
            except StoreUnavailableError as error:
                if not is_told:
                    log.warning("shard not seen", shard=number, reason=error.message)
                is_told = True
                self._free_since_s[number] = None
            else:
                is_told = False
                self._record_freedom(number, is_free=held is None)
                self._set(seen, cached)
            self._was_read[number].set()
            await asyncio.sleep(_LOOK_S)

    def _seen(self, number: int, lease: Lease | None, load: bytes) -> pb.Shard:
        """Shard with this lease and load. What another leader than that of the lease said does not count."""
        seen = pb.Shard()
        if lease is not None and lease.epoch:  # else it does not serve yet
            try:
                seen.ParseFromString(load)
            except DecodeError:
                seen.Clear()
            if seen.epoch != lease.epoch:  # of an earlier leader
                seen.Clear()
            seen.leader = lease.address
        seen.number = number
        return seen

    async def _seen_cached(self, seen: pb.Shard) -> pb.CachedBeginnings:
        """Summary of what a shard has cached, read only if it is another one than before."""
        known = self.cached[seen.number]
        if seen.cache_version == known.version:
            return known
        cached = pb.CachedBeginnings()
        if seen.cache_version:
            try:
                cached.ParseFromString(await self._leases[seen.number].read_cached())
            except DecodeError:
                cached.Clear()
        cached.shard = seen.number
        return cached

    def _record_freedom(self, number: int, *, is_free: bool) -> None:
        if not is_free:
            self._free_since_s[number] = None
        elif self._free_since_s[number] is None:
            self._free_since_s[number] = asyncio.get_running_loop().time()

    def _set(self, shard: pb.Shard, cached: pb.CachedBeginnings) -> None:
        if shard == self.shards[shard.number] and cached.version == self.cached[shard.number].version:
            return
        self.shards[shard.number], self.cached[shard.number] = shard, cached
        self.changed.set()
        self.changed = asyncio.Event()
