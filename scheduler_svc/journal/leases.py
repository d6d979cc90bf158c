"""Interface to the lease of the leader and the list of standbys.

Two implementations: RedisLeases, also for several shards, and MemoryLeases within one process. A lease only decides
which scheduler tries to lead; leading is safe because the journal refuses the entries of older epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler_svc.journal.store import StoreUnavailableError

MOST_LONGER_MS = 10_000  # beyond its usual life a leader may hold the lease at most


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease of a leader. Epoch 0: it has no epoch yet."""

    leader_id: str
    address: str
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.epoch} {self.holder}"

    @property
    def holder(self) -> str:
        """Id and address of its leader, without the epoch."""
        return f"{self.leader_id} {self.address}"

    @classmethod
    def parse(cls, text: str) -> "Lease":
        """Parse the text that `str` gives. Raises ValueError for other text."""
        epoch, leader_id, address = text.split(" ", 2)
        return cls(leader_id, address, int(epoch))


class HeldLease(NamedTuple):
    """Lease as the store has it."""

    lease: Lease
    left_ms: int


class Leases(Protocol):
    """Lease and standbys of one shard. Every method may raise StoreUnavailableError, within a short time limit."""

    async def read(self) -> HeldLease | None:
        """Current lease; None if there is none."""

    async def take_lease(self, lease: Lease, ttl_ms: int, *, ended_epoch: int = 0) -> Lease | None:
        """Take the lease if it is free, or if it is that of the leader of `ended_epoch`, which handed over.

        Returns None if it is ours now, else the lease of its holder.
        """

    async def hold(self, lease: Lease, ttl_ms: int) -> Lease | None:
        """Take the lease or prolong ours, unless its holder has a later epoch or is about to take one.

        Returns None if it is ours now, else the lease of its holder.
        """

    async def shorten(self, lease: Lease, ttl_ms: int) -> None:
        """Make this lease end in so long, if it would end later: a store's clock may be set back."""

    async def release(self, lease: Lease) -> None:
        """Release the lease, if it is ours."""

    async def announce(self, address: str, ttl_ms: int) -> None:
        """Announce a standby as present for so long; withdraw it if that is 0."""

    async def standbys(self, longest_ms: int) -> Sequence[str]:
        """Addresses of the standbys that are present, without those announced by a clock that was set back since.

        `longest_ms`: longest time for which an announcement can count.
        """

    async def close(self) -> None:
        """Close every connection."""


class ShardLeases(Leases, Protocol):
    """Lease of one shard of several, and what its leader says of it."""

    async def publish_shard(self, load: bytes, cached: bytes, ttl_ms: int) -> None:
        """Publish what the leader says of its shard and of what is cached there, for so long."""


class ShardReading(NamedTuple):
    """Shard as the store has it. `load`: published last by its leader; empty if nothing is."""

    held: HeldLease | None
    load: bytes
    standbys: tuple[str, ...]  # addresses


class AllShardsReading(NamedTuple):
    """Shards by number, and the text of their plan, as the store has them; or why it could not be read."""

    plan: bytes | StoreUnavailableError | None
    shards: Sequence[ShardReading | StoreUnavailableError]


class ShardReader(Protocol):
    """Reader of all shards of a deployment at once."""

    async def read_shards(self, longest_ms: int) -> AllShardsReading:
        """Read every shard, and their plan, which is in the part of the store that has shard 0.

        Raises StoreUnavailableError, if that concerns all. Both within a short time limit.

        `longest_ms`: longest time for which a standby's announcement can count.
        """

    async def read_cached(self, shards: Sequence[int]) -> Sequence[bytes | None]:
        """Content that each of these shards published last of what is cached there; empty if nothing is.

        None: it could not be read.

        Raises StoreUnavailableError, within a short time limit.
        """

    async def close(self) -> None:
        """Close every connection."""
