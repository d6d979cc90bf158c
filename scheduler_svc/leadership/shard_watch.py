"""Watch of all shards of a deployment, for each of its schedulers: how many there are, who leads each of them, with
which load and cache.

All shards and their number are read at once, the less often the more there are: each scheduler reads each shard, so the
store's work would grow with the square of their number. Of one shard only the number is read. Knows leases; nothing of
requests.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog
from google.protobuf.message import DecodeError

from quire.v1 import cluster_pb2 as pb
from scheduler_svc.journal.leases import ShardReading
from scheduler_svc.journal.shard_plan import ShardPlan
from scheduler_svc.journal.shard_store import ShardStore
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError
from scheduler_svc.leadership.shard_choice import ShardView

log = structlog.get_logger()

_LOOK_S = 0.25
_ALONE_S = 0.5  # between two looks at the number of shards, while there is one
_SHARDS_A_LOOK = 16  # more of them are looked at less often
_LOAD_MS = 3000  # how long a published load counts
_FREE_LEASES = 0.5  # lives of a lease without leader and standby, after which a scheduler of another shard comes
_RETRY_S = 0.1  # to read the number at the start


def look_every_s(num_shards: int) -> float:
    """Seconds between two looks at so many shards."""
    return _LOOK_S * max(1.0, num_shards / _SHARDS_A_LOOK)


class ShardWatch:
    """One per process. `shards` and `cached` have what is known, by number; `changed` is replaced when it is set."""

    def __init__(self, store: ShardStore, plan: ShardPlan, *, lease_ms: int, expects_several: bool = False) -> None:
        """`plan`: as read from the store. `expects_several`: this process is set up for several shards anyway."""
        self.plan = plan
        self.plan_read_s = asyncio.get_running_loop().time()
        self.shards: list[pb.Shard] = []
        self.cached: list[pb.CachedBeginnings] = []
        self.changed = asyncio.Event()
        self.several = asyncio.Event()  # set for good once there are several shards, or traces of others
        self.has_ended = False  # streams of what is known shall end
        self.unseen: frozenset[int] = frozenset()  # shards of which is known what was, since the store does not answer
        self.store = store
        self._lease_ms = lease_ms
        self._free_since_s: list[float | None] = []  # on the loop's clock; None: led, or not known
        self._standbys: list[tuple[str, ...]] = []
        self._was_read = asyncio.Event()
        self._expects_several = expects_several
        self._fit_plan()

    @property
    def is_several(self) -> bool:
        """True if there are several shards, or may have been."""
        return self.several.is_set()

    @property
    def num_wanted(self) -> int:
        """Number of shards that take requests, or shall soon."""
        return self.plan.num_wanted

    def takes_requests(self, shard: int) -> bool:
        """True if a shard takes new requests."""
        return shard < self.plan.num_shards

    def leader_of(self, shard: int) -> str | None:
        """Address of a shard's leader; None: none is known."""
        return (self.shards[shard].leader or None) if shard < len(self.shards) else None

    @property
    def first_pins_digest(self) -> int | None:
        """Digest of the pins of shard 0, as its leader says; None: it is not known now."""
        first = self.shards[0]
        return first.pins_digest if first.leader and first.epoch and 0 not in self.unseen else None

    async def run(self, me: str = "") -> None:
        """Look at every shard again and again, until cancelled. `me`: address of this scheduler."""
        unseen: list[int] = []
        while True:
            was_unseen, plan = unseen, self.plan
            unseen, reason = await self._look_around(me)
            self.unseen = frozenset(unseen)
            if unseen and unseen != was_unseen:
                log.warning("shards not seen", shards=unseen, reason=reason)
            for number in [each for each in unseen if each < len(self.shards)]:
                self._free_since_s[number] = None
            self._was_read.set()
            if self.plan is plan:  # else there may be shards that were not looked at
                await asyncio.sleep(look_every_s(len(self.shards)) if self.is_several else _ALONE_S)

    async def read_plan(self) -> None:
        """Read how many shards there are. Raises StoreUnavailableError."""
        began_s = asyncio.get_running_loop().time()
        await self._settle_plan(await self.store.read_plan(), began_s)

    async def _settle_plan(self, found: ShardPlan | None, began_s: float) -> None:
        """Take a plan that was read, or write ours where the store has lost it. Raises StoreUnavailableError.

        `began_s`: when the reading began, on the loop's clock.
        """
        if found is None or found.version < self.plan.version:  # the store has lost what this process has read
            found = await self.store.replace_plan(self.plan, found.version if found is not None else 0)
        if found is not None and found.version == self.plan.version and found != self.plan:
            plan = found.merged_with(self.plan)
            found = await self.store.replace_plan(plan, found.version)
        if found is not None and found.version >= self.plan.version:
            self._take_plan(found)
            self.plan_read_s = max(self.plan_read_s, began_s)

    async def set_wanted(self, num_shards: int) -> ShardPlan:
        """Change the number of shards; return the plan that stands then. Raises StoreUnavailableError."""
        while True:
            await self.read_plan()
            plan = self.plan.with_wanted(num_shards)
            if plan == self.plan or await self._replace_plan(plan):
                return self.plan

    async def publish(self, shard: pb.Shard, cached: pb.CachedBeginnings) -> None:
        """Publish what the leader says of its shard and of what is cached there."""
        published = shard.SerializeToString(), cached.SerializeToString()
        with suppress(StoreUnavailableError):  # others take it for unloaded, then; it is published again soon
            await self.store.leases(shard.number).publish_shard(*published, _LOAD_MS)
        self._set(shard, cached)

    def end_streams(self) -> None:
        """End the streams of what is known: this process is about to end."""
        self.has_ended = True
        self._say_changed()

    async def close(self) -> None:
        """Close all connections."""
        await self.store.close()

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

    async def _look_around(self, me: str) -> tuple[list[int], str]:
        """Read the plan, look at every shard and advance the plan. Returns the shards that were not seen, and why."""
        every = list(range(len(self.shards)))
        try:
            if not self.is_several:
                await self.read_plan()
                return [], ""
            began_s = asyncio.get_running_loop().time()
            plan, shards = await self.store.read_shards(len(every), 4 * self._lease_ms)
            is_settled = await self._try_to_settle_plan(plan, began_s)  # shards elsewhere in the store are seen anyway
            unseen, reason = await self._take_readings(shards)
            if is_settled and not unseen:
                await self._advance(me)
        except StoreUnavailableError as error:
            return every, error.message
        return unseen, reason

    async def _try_to_settle_plan(self, plan: ShardPlan | StoreUnavailableError | None, began_s: float) -> bool:
        """Settle a plan, as `_settle_plan` does. False: the store did not answer for it."""
        if isinstance(plan, StoreUnavailableError):
            return False
        try:
            await self._settle_plan(plan, began_s)
        except StoreUnavailableError:
            return False
        return True

    async def _take_readings(self, shards: Sequence[ShardReading | StoreUnavailableError]) -> tuple[list[int], str]:
        """Record what was seen of every shard. Returns those whose part of the store did not answer, and why.

        Raises StoreUnavailableError, and then has recorded nothing, if no part answers for what they have cached.
        """
        answers = list(enumerate(shards))
        readings = {number: each for number, each in answers if isinstance(each, ShardReading)}
        errors = {number: each.message for number, each in answers if isinstance(each, StoreUnavailableError)}
        seen = [_shard_of(number, each) for number, each in readings.items()]
        changed = [each for each in seen if each.cache_version != self._cache_version(each.number)]
        with_content = [each.number for each in changed if each.cache_version]
        content = await self.store.read_cached(with_content) if with_content else []
        cached = _cached_of(changed, content)
        for shard in [each for each in seen if each.number < len(self.shards)]:  # some may be removed by now
            reading = readings[shard.number]
            self._standbys[shard.number] = reading.standbys
            self._record_freedom(shard.number, is_free=reading.held is None)
            self._set(shard, cached.get(shard.number, self.cached[shard.number]))
        return list(errors), next(iter(errors.values()), "")

    def _cache_version(self, number: int) -> int:
        return self.cached[number].version if number < len(self.cached) else 0

    async def _advance(self, me: str) -> None:
        """Let new shards take requests once they can, and forget removed ones: the leader of shard 0 does.

        Raises StoreUnavailableError.
        """
        if self.leader_of(0) != me or len(self.shards) < self.plan.num_kept:
            return
        coming = self.shards[self.plan.num_shards : self.plan.num_wanted]
        plan = self.plan
        if coming and all(shard.leader and shard.num_workers for shard in coming):
            plan = plan.with_ready()
        elif not coming and not plan.is_settled:
            plan = plan.without_settled([shard.settled_version if shard.leader else 0 for shard in self.shards])
        if plan != self.plan:
            await self._replace_plan(plan)

    async def _replace_plan(self, plan: ShardPlan) -> bool:
        """Put a plan in the place of ours. False: another one stands there. Raises StoreUnavailableError."""
        found = await self.store.replace_plan(plan, self.plan.version)
        if found is not None:
            self._take_plan(found)
        return found == plan

    def _take_plan(self, plan: ShardPlan) -> None:
        if plan.version <= self.plan.version:
            return
        self.plan = plan
        log.info(
            "number of shards",
            version=plan.version,
            taking_requests=plan.num_shards,
            wanted=plan.num_wanted,
            kept=plan.num_kept,
        )
        self._fit_plan()
        self._say_changed()

    def _fit_plan(self) -> None:
        """Make the lists as long as there are shards."""
        num_kept, num_before = self.plan.num_kept, len(self.shards)
        new = range(num_before, num_kept)
        self.shards = [*self.shards[:num_kept], *(pb.Shard(number=number) for number in new)]
        self.cached = [*self.cached[:num_kept], *(pb.CachedBeginnings(shard=number) for number in new)]
        self._free_since_s = [*self._free_since_s[:num_kept], *[None] * len(new)]
        self._standbys = [*self._standbys[:num_kept], *[()] * len(new)]
        if self._expects_several or not self.plan.is_plain:
            self.several.set()

    def _record_freedom(self, number: int, *, is_free: bool) -> None:
        if not is_free:
            self._free_since_s[number] = None
        elif self._free_since_s[number] is None:
            self._free_since_s[number] = asyncio.get_running_loop().time()

    def _set(self, shard: pb.Shard, cached: pb.CachedBeginnings) -> None:
        if shard.number >= len(self.shards):
            return  # it was removed meanwhile
        if shard == self.shards[shard.number] and cached.version == self.cached[shard.number].version:
            return
        self.shards[shard.number], self.cached[shard.number] = shard, cached
        self._say_changed()

    def _say_changed(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


async def open_watch(store: ShardStore, num_shards: int, *, lease_ms: int, patience_s: float) -> ShardWatch:
    """Watch the shards of a store; if it has no number yet, it gets this one.

    Raises StoreUnavailableError if the store does not answer for so long, StoreConfigurationError at once.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + patience_s
    is_told = False
    while True:
        try:
            plan = await store.read_plan() or await store.replace_plan(ShardPlan.first(num_shards), 0)
        except StoreConfigurationError:
            raise
        except StoreUnavailableError as error:
            if loop.time() > until_s:
                raise
            if not is_told:
                log.warning("waiting for the number of shards", reason=error.message)
            is_told, plan = True, None
        if plan is not None:
            break
        await asyncio.sleep(_RETRY_S)
    if plan.num_wanted != num_shards:
        log.warning(
            "the store has another number of shards than the setting, and it counts; change it with `quire shards N`",
            shards=plan.num_wanted,
            setting=num_shards,
        )
    return ShardWatch(store, plan, lease_ms=lease_ms, expects_several=num_shards > 1)


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
