"""Shares of the shards in the workers: where a new worker serves, and which worker moves to a shard that has too few.

One per leader of a deployment with several shards. A worker is told by the answer to its registration.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from quire.v1 import cluster_pb2 as pb
from scheduler_svc.leadership.shard_choice import shard_in_need, shard_of_new_worker, starving_shard
from scheduler_svc.workers.latest import Latest

log = structlog.get_logger()

SHORT_LEASE_MS = 1500  # told to workers where a shard has none, so that they hear soon when they are to move
# That a worker serves a shard before it is lent to one that has none: while requests wait, and while all of them run. A
# move takes about half a second; the requests that run end before it.
_BUSY_SLICE_S = 3.0
_SLICE_S = 1.0
_SETTLE_S = 3.0  # after a worker was sent or given away, until it must show in what the shards publish
_LENT_S = 1.0  # likewise after it was lent: no shard has two, so a second one is not given by mistake
# That a shard counts as one that a worker is on its way to, from the order to move, and again from when it has left. A
# worker that starts slowly comes within it; one that dies leaves its new shard without a worker for no longer.
_ON_WAY_S = 4.0
# That a shard has no worker under one leader before it is lent one: until those of the leader before have come to this
# one, and that shows. Half a second each for a worker to register, to be published and to be seen.
_FRESH_S = 1.5


class SeenShards(Protocol):
    """Shards of the deployment, by number, as the leader sees them."""

    @property
    def shards(self) -> Sequence[pb.Shard]:
        """Every shard."""

    @property
    def num_wanted(self) -> int:
        """Number of shards that take requests, or shall soon; those behind them were removed."""

    @property
    def unseen(self) -> Collection[int]:
        """Shards of which only is known what was, since their part of the store does not answer."""

    def leader_of(self, shard: int) -> str | None:
        """Address of a shard's leader; None: none is known."""


class SharedWorker(Protocol):
    """Worker that has registered with the leader."""

    @property
    def worker_id(self) -> str:
        """Name of the worker, which it keeps."""

    @property
    def incarnation(self) -> str:
        """Name of its present life."""

    @property
    def is_in_service(self) -> bool:
        """True if it takes new requests."""


@dataclass(frozen=True, slots=True)
class _Gift:
    """A worker's life that is given away, and the shard that it goes to."""

    worker_id: str
    incarnation: str
    shard: int


class WorkerShares:
    """The leader's view of the shares. `shard`: the one that it leads."""

    def __init__(
        self,
        shard: int,
        watch: SeenShards,
        members: Mapping[str, SharedWorker],
        num_running: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what the leader knows.

        Args:
            shard: number of the shard that it leads.
            watch: all shards.
            members: its registered workers by id, as they come and go.
            num_running: sequences that run on a worker, by its id.
            clock: seconds of a clock that is never set.
        """
        self.shard = shard
        self.watch = watch
        self._members = members
        self._num_running = num_running
        self._clock = clock
        self._sent: dict[str, tuple[int, float]] = {}  # by worker_id: the shard a new one was sent to, and when
        self._given: _Gift | None = None  # until it has left, and that shows
        self._given_until_s = 0.0
        self._leaving: _Gift | None = None  # until it has left
        self._on_way: dict[int, float] = {}  # by shard without a worker that one goes to: until when it counts
        self._came: Latest[tuple[str, float]] = Latest()  # by worker_id: incarnation, and when it came
        self._without: dict[tuple[int, int], float] = {}  # by shard without a worker, and its leader

    def has_shard(self, shard: int) -> bool:
        """True if the deployment has such a shard."""
        return shard < len(self.watch.shards)

    def leader_of(self, shard: int) -> str | None:
        """Address of a shard's leader; None: none is known."""
        return self.watch.leader_of(shard)

    @property
    def are_scarce(self) -> bool:
        """True if a shard has no worker, and may need one."""
        num_wanted = self.watch.num_wanted
        return any(
            shard.leader and not shard.num_workers and (shard.number < num_wanted or shard.num_waiting)
            for shard in self._present_shards()
        )

    def gives_to(self) -> list[int]:
        """Numbers of the shards without a worker that one of this shard is on its way to."""
        now_s, gift = self._clock(), self._leaving
        if gift is not None and not self._is_here(gift):
            self._leaving = None
            self._on_way[gift.shard] = now_s + _ON_WAY_S
        shards = self.watch.shards
        self._on_way = {
            number: until_s
            for number, until_s in self._on_way.items()
            if now_s < until_s and number < len(shards) and not shards[number].num_workers
        }
        return sorted(self._on_way)

    def is_given_away(self, worker_id: str) -> bool:
        """True if a worker was told to move to another shard, and has not left yet."""
        gift = self._given
        return gift is not None and gift.worker_id == worker_id and self._is_here(gift)

    def shard_of(self, request: pb.RegisterRequest) -> int:
        """Number of the shard that the worker of this registration shall serve."""
        now_s = self._clock()
        if not request.HasField("shard"):
            return self._place_new(request.worker_id, now_s)
        member = self._members.get(request.worker_id)
        return self.shard if member is None else self._place_known(member, now_s)

    def _place_new(self, worker_id: str, now_s: float) -> int:
        self._sent = {
            name: sent for name, sent in self._sent.items() if now_s - sent[1] < _SETTLE_S and name != worker_id
        }
        num_sent = Counter(number for number, _ in self._sent.values())
        chosen = shard_of_new_worker(
            [
                pb.Shard(number=each.number, leader=each.leader, num_workers=each.num_workers + num_sent[each.number])
                for each in self._present_shards()
            ],
            worker_id,
            self.watch.num_wanted,
        )
        self._sent[worker_id] = (chosen, now_s)
        return chosen

    def _present_shards(self) -> list[pb.Shard]:
        """Every shard, those that cannot be seen now without a leader: they neither give nor get a worker."""
        hidden = set(self.watch.unseen) - {self.shard}
        return [pb.Shard(number=each.number) if each.number in hidden else each for each in self.watch.shards]

    def _place_known(self, member: SharedWorker, now_s: float) -> int:
        """The worker's new shard if it is the one that is given away; it stays so until it has left.

        A worker that was given away, and then to this shard again, is another incarnation, and stays.
        """
        served_s = self._served_s(member, now_s)
        if self._given is not None:
            is_here = self._is_here(self._given)
            if is_here or now_s < self._given_until_s:
                return self._given.shard if is_here and member.worker_id == self._given.worker_id else self.shard
        self._given = None
        if not self.has_shard(self.shard):  # it was just forgotten
            return self.shard
        shards = self._present_shards()
        helped = {*self.gives_to(), *self._update_fresh(shards, now_s)}
        needy, settle_s = shard_in_need(shards, self.shard, self.watch.num_wanted), _SETTLE_S
        if needy is None and served_s >= _slice_s(shards[self.shard]):
            needy, settle_s = starving_shard(shards, self.shard, helped), _LENT_S
        if needy is None or member is not self._idlest():
            return self.shard
        log.info("worker moves to another shard", worker_id=member.worker_id, shard=needy)
        self._given = self._leaving = _Gift(member.worker_id, member.incarnation, needy)
        self._given_until_s = now_s + settle_s
        self._on_way[needy] = now_s + _ON_WAY_S
        return needy

    def _update_fresh(self, shards: Sequence[pb.Shard], now_s: float) -> list[int]:
        """Record which shards have no worker; return those whose own may still come, being without for a short time."""
        lacking = [(each.number, each.epoch) for each in shards if each.leader and not each.num_workers]
        self._without = {each: self._without.get(each, now_s) for each in lacking}
        return [number for (number, _), since_s in self._without.items() if now_s - since_s < _FRESH_S]

    def _is_here(self, gift: _Gift) -> bool:
        """True until the worker's life that is given away has left."""
        member = self._members.get(gift.worker_id)
        return member is not None and member.incarnation == gift.incarnation

    def _served_s(self, member: SharedWorker, now_s: float) -> float:
        """Seconds since this incarnation of the worker was first seen here."""
        incarnation, came_s = self._came.get(member.worker_id, ("", now_s))
        if incarnation != member.incarnation:
            self._came.put(member.worker_id, (member.incarnation, now_s))
            return 0.0
        return now_s - came_s

    def _idlest(self) -> SharedWorker | None:
        """The worker in service with the fewest running sequences.

        One that an administrator drains is not, and so stays: no other shard knows that it is drained.
        """
        serving = [each for each in self._members.values() if each.is_in_service]
        return min(serving, key=lambda each: (self._num_running(each.worker_id), each.worker_id), default=None)


def _slice_s(shard: pb.Shard) -> float:
    """Seconds that a worker serves a shard, at least, before it is lent to another one."""
    if shard.num_waiting:
        return _BUSY_SLICE_S
    return _SLICE_S if shard.num_running else 0.0
