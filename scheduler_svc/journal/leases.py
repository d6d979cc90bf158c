"""What leadership asks of the store: one lease for whoever leads, and a list of those who stand by.

Two implementations: RedisLeases, and MemoryLeases, which nobody else can see. A lease only decides who tries to lead;
what makes leading safe is that the journal refuses the entries of older epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MOST_LONGER_MS = 10_000  # beyond its usual life a leader may hold the lease at most


@dataclass(frozen=True, slots=True)
class Lease:
    """Who leads. Epoch 0: it is about to, and has no epoch yet."""

    leader_id: str
    address: str
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.epoch} {self.holder}"

    @property
    def holder(self) -> str:
        """Whose it is, whatever the epoch."""
        return f"{self.leader_id} {self.address}"

    @classmethod
    def parse(cls, text: str) -> "Lease":
        """Of `str`. Raises ValueError if it is no such text."""
        epoch, leader_id, address = text.split(" ", 2)
        return cls(leader_id, address, int(epoch))


class HeldLease(NamedTuple):
    """A lease as the store has it."""

    lease: Lease
    left_ms: int


class Leases(Protocol):
    """The lease and the standbys of one deployment. Every method may raise StoreUnavailableError, and soon."""

    async def read(self) -> HeldLease | None:
        """The lease; None if nobody has it."""

    async def take(self, lease: Lease, ttl_ms: int, *, ended_epoch: int = 0) -> Lease | None:
        """Takes the lease if nobody else has it, or if it is that of the leader of `ended_epoch`, which handed over.

        Returns None if it is ours now, else whose it is.
        """

    async def hold(self, lease: Lease, ttl_ms: int) -> Lease | None:
        """Makes the lease ours, or prolongs it, unless it is held by who has a later epoch or is about to take one.

        Returns None if it is ours now, else whose it is.
        """

    async def shorten(self, lease: Lease, ttl_ms: int) -> None:
        """Has the lease end in so long, if it is still this one and would end later: a store's clock may go back."""

    async def release(self, lease: Lease) -> None:
        """Gives the lease up, if it is ours."""

    async def announce(self, address: str, ttl_ms: int) -> None:
        """Counts a standby as present for so long; for no longer, if that is 0."""

    async def standbys(self, longest_ms: int) -> Sequence[str]:
        """Addresses of the standbys that are present, but for those that said so by a clock since set back.

        `longest_ms` is how long none counts as present without saying so again.
        """

    async def close(self) -> None:
        """Lets go of every connection."""
