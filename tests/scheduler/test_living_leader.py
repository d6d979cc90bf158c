"""A scheduler that may not take over from a living one tells it from what a dead one has left."""

import asyncio
from collections.abc import Sequence

import pytest

from scheduler_svc.journal.leases import HeldLease, Lease
from scheduler_svc.journal.memory_leases import MemoryLeases
from scheduler_svc.leadership.living_leader import find_living_leader

US = Lease("here-1", "127.0.0.1:7847")
THEM = Lease("there-2", "127.0.0.1:7847", 5)
BEGINS = Lease("there-2", "10.0.0.2:7847")


class SeenLeases(MemoryLeases):
    """Leases that are seen in turn, the last one again and again."""

    def __init__(self, *seen: HeldLease | None) -> None:
        super().__init__()
        self._seen = list(seen)

    async def read(self) -> HeldLease | None:
        return self._seen.pop(0) if len(self._seen) > 1 else self._seen[0]


@pytest.mark.parametrize(
    ("seen", "living"),
    [
        ([None], None),
        ([HeldLease(THEM, 40), HeldLease(THEM, 20), None], None),  # dead: nobody renews it
        ([HeldLease(THEM, 40), HeldLease(THEM, 20), HeldLease(THEM, 40)], THEM),
        ([HeldLease(THEM, 40), HeldLease(BEGINS, 40)], BEGINS),
        ([HeldLease(Lease("here-0", US.address, 5), 40)], None),  # our predecessor: we listen where it did
        ([HeldLease(Lease("here-0", "127.0.0.1:7849", 5), 20), HeldLease(Lease("here-0", "127.0.0.1:7849", 5), 40)],
         Lease("here-0", "127.0.0.1:7849", 5)),
    ],
    ids=["nobody", "dead", "renews", "begins", "predecessor", "same host"],
)  # fmt: skip
async def test_a_leader_lives_that_renews_its_lease(seen: Sequence[HeldLease | None], living: Lease | None) -> None:
    assert await find_living_leader(SeenLeases(*seen), US, lease_ms=40) == living


async def test_a_lease_that_neither_ends_nor_is_renewed_keeps_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.leadership.living_leader.MOST_LONGER_MS", 100)
    leases = SeenLeases(HeldLease(THEM, 1 << 40))
    assert await asyncio.wait_for(find_living_leader(leases, US, lease_ms=40), None) is None
