"""Registrations of workers in virtual time: where each serves, when it is told to move, and what it does then.

Where a worker serves is decided by the product's own code, with the leaders.
"""

from collections.abc import Sequence
from random import Random

from benchmarks.fleet.fleet_config import DRAIN_POLL_S, LEADERLESS_S, REGISTER_S, RETURN_S
from benchmarks.fleet.fleet_outcome import FleetOutcome
from benchmarks.fleet.scheduler_process import SchedulerProcess
from benchmarks.fleet.timeline import Timeline
from benchmarks.fleet.virtual_shard import VirtualShard
from benchmarks.fleet.virtual_worker import VirtualWorker
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.api.worker_shares import SHORT_LEASE_MS


class Registrations:
    """Registrations of all workers of a fleet."""

    def __init__(
        self,
        timeline: Timeline,
        shards: Sequence[VirtualShard],
        processes: Sequence[SchedulerProcess],
        outcome: FleetOutcome,
        random: Random,
    ) -> None:
        """Take the parts of a fleet that workers have to do with."""
        self._timeline = timeline
        self._shards = shards
        self._processes = processes
        self._outcome = outcome
        self._random = random

    def begin(self, worker: VirtualWorker, first_s: float) -> None:
        """Have a worker register from a moment on: each third of its lease, or more often where a leader says so."""
        self._timeline.at(first_s, lambda: self.begin(worker, self._timeline.now_s + self._register(worker)))

    def join_again(self, worker: VirtualWorker) -> None:
        """Have a worker register with the leader of its shard, which it tries ten times a second."""
        life, shard = worker.life, worker.shard
        assert shard is not None, "a worker that was told where to serve"

        def join() -> None:
            if worker.is_alive and worker.life == life and worker.shard == shard:
                self._shards[shard].join(worker)

        self._timeline.after(RETURN_S, join)

    def _register(self, worker: VirtualWorker) -> float:
        """Register once; without a shard ask where to serve. Returns after how many seconds to do so again."""
        if not worker.is_alive or worker.moving_to is not None:
            return REGISTER_S
        if worker.shard is None:
            self._ask_where(worker)
            return REGISTER_S
        led, now_s = self._shards[worker.shard].led, self._timeline.now_s
        if led is None:
            if now_s - worker.led_s > LEADERLESS_S:
                worker.shard = None
            return REGISTER_S
        worker.led_s = now_s
        if not worker.is_driven:
            return REGISTER_S
        target = led.shares.shard_of(pb.RegisterRequest(worker_id=worker.worker_id, shard=worker.shard))
        if target != worker.shard:
            worker.moving_to = target
            self._shards[worker.shard].drain(worker)
            self._timeline.after(DRAIN_POLL_S, lambda: self._leave_when_empty(worker))
        return SHORT_LEASE_MS / 3000 if led.shares.are_scarce else REGISTER_S

    def _ask_where(self, worker: VirtualWorker) -> None:
        """Ask any scheduler that leads."""
        leaders = [process for process in self._processes if process.is_alive and process.leading]
        if leaders:
            asked = self._random.choice(leaders)
            led = self._shards[min(asked.leading)].led
            assert led is not None, "a process leads what it says"
            self._serve(worker, led.shares.shard_of(pb.RegisterRequest(worker_id=worker.worker_id)))

    def _leave_when_empty(self, worker: VirtualWorker) -> None:
        if not worker.is_alive:
            return
        assert worker.shard is not None and worker.moving_to is not None
        shard = self._shards[worker.shard]
        if shard.num_on(worker):
            self._timeline.after(DRAIN_POLL_S, lambda: self._leave_when_empty(worker))
            return
        worker.died_s = self._timeline.now_s
        shard.lose(worker)
        worker.life += 1
        self._outcome.num_moves += 1
        self._outcome.last_move_s = self._timeline.now_s
        self._serve(worker, worker.moving_to)

    def _serve(self, worker: VirtualWorker, shard: int) -> None:
        worker.shard, worker.moving_to, worker.led_s = shard, None, self._timeline.now_s
        worker.is_driven = False
        self.join_again(worker)
