"""Shares of the shards in the workers: where a new worker serves, and which worker moves to a shard that has too few.

One per leader of a deployment with several shards. A worker is told by the answer to its registration.
"""

import time
from collections import Counter
from collections.abc import Callable

import structlog

from quire.v1 import cluster_pb2 as pb
from scheduler_svc.leadership.shard_choice import shard_in_need, shard_of_new_worker, starving_shard
from scheduler_svc.leadership.shard_watch import ShardWatch
from scheduler_svc.workers.latest import Latest
from scheduler_svc.workers.workers import Member, Workers

log = structlog.get_logger()

_SLICE_S = 3.0  # that a worker serves a shard before it is lent to one that has none
_SETTLE_S = 3.0  # after a worker was sent or given away, until it must show in what the shards publish


class WorkerShares:
    """The leader's view of the shares. `shard`: the one that it leads."""

    def __init__(self, shard: int, watch: ShardWatch, workers: Workers, num_running: Callable[[str], int]) -> None:
        """`num_running`: sequences that run on a worker, by its id."""
        self.shard = shard
        self.watch = watch
        self._workers = workers
        self._num_running = num_running
        self._sent: dict[str, tuple[int, float]] = {}  # by worker_id: the shard a new one was sent to, and when
        self._given: tuple[str, int] | None = None  # worker_id and its new shard, until it has left
        self._given_until_s = 0.0
        self._came: Latest[tuple[str, float]] = Latest()  # by worker_id: incarnation, and when it came

    def has_shard(self, shard: int) -> bool:
        """True if the deployment has such a shard."""
        return shard < len(self.watch.shards)

    def leader_of(self, shard: int) -> str | None:
        """Address of a shard's leader; None: none is known."""
        return self.watch.leader_of(shard)

    def shard_of(self, request: pb.RegisterRequest) -> int:
        """Number of the shard that the worker of this registration shall serve."""
        now_s = time.monotonic()
        if not request.HasField("shard"):
            return self._place_new(request.worker_id, now_s)
        member = self._workers.members.get(request.worker_id)
        return self.shard if member is None else self._place_known(member, now_s)

    def _place_new(self, worker_id: str, now_s: float) -> int:
        self._sent = {
            name: sent for name, sent in self._sent.items() if now_s - sent[1] < _SETTLE_S and name != worker_id
        }
        num_sent = Counter(number for number, _ in self._sent.values())
        chosen = shard_of_new_worker(
            [
                pb.Shard(number=each.number, leader=each.leader, num_workers=each.num_workers + num_sent[each.number])
                for each in self.watch.shards
            ]
        )
        self._sent[worker_id] = (chosen, now_s)
        return chosen

    def _place_known(self, member: Member, now_s: float) -> int:
        """The worker's new shard if it is the one that is given away; it stays so until it has left."""
        served_s = self._served_s(member, now_s)
        if self._given is not None and (self._given[0] in self._workers.members or now_s < self._given_until_s):
            return self._given[1] if self._given[0] == member.worker_id else self.shard
        self._given = None
        needy = shard_in_need(self.watch.shards, self.shard)
        if needy is None and served_s > _SLICE_S:
            needy = starving_shard(self.watch.shards, self.shard)
        if needy is None or member is not self._idlest():
            return self.shard
        log.info("worker moves to another shard", worker_id=member.worker_id, shard=needy)
        self._given, self._given_until_s = (member.worker_id, needy), now_s + _SETTLE_S
        return needy

    def _served_s(self, member: Member, now_s: float) -> float:
        """Seconds since this incarnation of the worker was first seen here."""
        incarnation, came_s = self._came.get(member.worker_id, ("", now_s))
        if incarnation != member.incarnation:
            self._came.put(member.worker_id, (member.incarnation, now_s))
            return 0.0
        return now_s - came_s

    def _idlest(self) -> Member | None:
        """The worker in service with the fewest running sequences."""
        serving = [each for each in self._workers.members.values() if each.loop is not None and not each.is_leaving]
        return min(serving, key=lambda each: (self._num_running(each.worker_id), each.worker_id), default=None)
