"""Watch of all shards of a deployment, for each of its schedulers: who leads each of them, with which load and cache.

All shards are read at once, the less often the more there are: each scheduler reads each shard, so the store's work
would grow with the square of their number. Knows leases; nothing of requests.
"""

import asyncio
from collections.abc import Sequence

import structlog
from google.protobuf.message import DecodeError

from quire.v1 import cluster_pb2 as pb
from scheduler_svc.journal.leases import ShardLeases, ShardReader, ShardReading
from scheduler_svc.journal.store import StoreUnavailableError
from scheduler_svc.leadership.shard_choice import ShardView

log = structlog.get_logger()

_LOOK_S = 0.25
_SHARDS_A_LOOK = 16  # more of them are looked at less often
_LOAD_MS = 3000  # how long a published load counts
_FREE_LEASES = 0.5  # lives of a lease without leader and standby, after which a scheduler of another shard comes


def look_every_s(num_shards: int) -> float:
    """Seconds between two looks at so many shards."""
    return _LOOK_S * max(1.0, num_shards / _SHARDS_A_LOOK)


class ShardWatch:
    """One per process. `shards` and `cached` have what is known, by number; `changed` is replaced when it is set."""

    def __init__(self, leases: Sequence[ShardLeases], reader: ShardReader, *, lease_ms: int) -> None:
        """`leases`: of each shard, by number; `reader` reads all of them."""
        self.shards = [pb.Shard(number=number) for number in range(len(leases))]
        self.cached = [pb.CachedBeginnings(shard=number) for number in range(len(leases))]
        self.changed = asyncio.Event()
        self._leases = leases
        self._reader = reader
        self._lease_ms = lease_ms
        self._free_since_s: list[float | None] = [None] * len(leases)  # on the loop's clock; None: led, or not known
        self._standbys: list[tuple[str, ...]] = [()] * len(leases)
        self._was_read = asyncio.Event()

    def leader_of(self, shard: int) -> str | None:
        """Address of a shard's leader; None: none is known."""
        return (self.shards[shard].leader or None) if shard < len(self.shards) else None

    async def run(self) -> None:
        """Look at every shard again and again, until cancelled."""
        unseen: list[int] = []
        while True:
            was_unseen = unseen
            try:
                unseen, reason = await self._look()
            except StoreUnavailableError as error:
                unseen, reason = list(range(len(self.shards))), error.message
            if unseen and unseen != was_unseen:
                log.warning("shards not seen", shards=unseen, reason=reason)
            for number in unseen:
                self._free_since_s[number] = None
            self._was_read.set()
            await asyncio.sleep(look_every_s(len(self.shards)))

    async def publish(self, shard: pb.Shard, cached: pb.CachedBeginnings) -> None:
        """Publish what the leader says of its shard and of what is cached there."""
        published = shard.SerializeToString(), cached.SerializeToString()
        try:
            await self._leases[shard.number].publish_shard(*published, _LOAD_MS)
        except StoreUnavailableError:
            return  # others take it for unloaded, then; it is published again soon
        self._set(shard, cached)

    async def close(self) -> None:
        """Close the connection that it reads by."""
        await self._reader.close()

    async def until_seen(self) -> None:
        """Return when every shard was looked at, or could not be."""
        await self._was_read.wait()

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

    async def _look(self) -> tuple[list[int], str]:
        """Look at every shard once. Returns those that were not seen, whose part of the store did not answer, and why.

        Raises StoreUnavailableError if that holds for all, and then has recorded nothing.
        """
        answers = list(enumerate(await self._reader.read_shards(4 * self._lease_ms)))
        readings = {number: each for number, each in answers if isinstance(each, ShardReading)}
        errors = {number: each.message for number, each in answers if isinstance(each, StoreUnavailableError)}
        seen = [_shard_of(number, each) for number, each in readings.items()]
        changed = [each for each in seen if each.cache_version != self.cached[each.number].version]
        with_content = [each.number for each in changed if each.cache_version]
        content = await self._reader.read_cached(with_content) if with_content else []
        cached = _cached_of(changed, content)
        for shard in seen:
            reading = readings[shard.number]
            self._standbys[shard.number] = reading.standbys
            self._record_freedom(shard.number, is_free=reading.held is None)
            self._set(shard, cached.get(shard.number, self.cached[shard.number]))
        return list(errors), next(iter(errors.values()), "")

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


def _shard_of(number: int, reading: ShardReading) -> pb.Shard:
    """Shard with this lease and load. What another leader than that of the lease said does not count."""
    seen = pb.Shard()
    lease = reading.held.lease if reading.held is not None else None
    if lease is not None and lease.epoch:  # else it does not serve yet
        try:
            seen.ParseFromString(reading.load)
        except DecodeError:
            seen.Clear()
        if seen.epoch != lease.epoch:  # of an earlier leader
            seen.Clear()
        seen.leader = lease.address
    seen.number = number
    return seen


def _cached_of(shards: Sequence[pb.Shard], content: Sequence[bytes | None]) -> dict[int, pb.CachedBeginnings]:
    """Summary of each of these shards; `content` of those that have something cached, in their order.

    Without those whose content could not be read.
    """
    contents = iter(content)
    cached: dict[int, pb.CachedBeginnings] = {}
    for shard in shards:
        found = next(contents) if shard.cache_version else b""
        if found is None:
            continue
        cached[shard.number] = pb.CachedBeginnings()
        try:
            cached[shard.number].ParseFromString(found)
        except DecodeError:
            cached[shard.number].Clear()
        cached[shard.number].shard = shard.number
    return cached
