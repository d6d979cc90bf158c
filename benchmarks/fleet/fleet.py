"""A fleet in virtual time: schedulers that share out shards, workers that register, clients, the loss of a rack.

Who leads, where workers serve and which move is decided by the product's own code, from what processes would see.
"""

from collections.abc import Iterator
from random import Random

from benchmarks.fleet.fleet_config import (
    DETECT_S,
    HAND_OVER_S,
    LEASE_S,
    PUBLISH_S,
    REGISTER_S,
    ROLES_S,
    FleetConfig,
)
from benchmarks.fleet.fleet_outcome import FleetOutcome
from benchmarks.fleet.gateways import Gateways
from benchmarks.fleet.registrations import Registrations
from benchmarks.fleet.scheduler_process import SchedulerProcess
from benchmarks.fleet.seen_fleet import SeenFleet
from benchmarks.fleet.timeline import Timeline
from benchmarks.fleet.virtual_shard import Surroundings, VirtualShard
from benchmarks.fleet.virtual_worker import VirtualWorker
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.leadership.shard_choice import ShardView, next_roles
from scheduler_svc.leadership.shard_watch import look_every_s

SCHEDULERS_COME_S = 2.0  # within which schedulers begin at a cold start
WORKERS_COME_S = 15.0  # after which workers do: they load a model first
NUM_VIEWS = 8  # processes that look at the store at the same moments see the same
FREE_LEASES = 0.5  # lives of a lease without leader and standby, after which a scheduler of another shard comes


class Fleet:
    """One simulation, from the start to its end."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.timeline = Timeline()
        self.outcome = FleetOutcome(warm_s=config.warm_s, end_s=config.seconds)
        self.published = [pb.Shard(number=number) for number in range(config.num_shards)]
        self.seen = [SeenFleet(self.published) for _ in range(min(NUM_VIEWS, config.num_processes))]
        self.gateways = Gateways(config, self.timeline, self.outcome)
        self._random = Random(config.seed + 1)
        self.shards = [
            VirtualShard(
                number,
                Surroundings(config, self.timeline, self.outcome, self.gateways, self.seen[number % len(self.seen)]),
            )
            for number in range(config.num_shards)
        ]
        self.processes = [
            SchedulerProcess(f"s{number}", rack, self.timeline)
            for number, rack in enumerate(self._racks(config.num_processes))
        ]
        self.workers = [
            VirtualWorker(f"w{number}", rack, config.worker)
            for number, rack in enumerate(self._racks(config.num_workers))
        ]
        self._registrations = Registrations(self.timeline, self.shards, self.processes, self.outcome, self._random)
        self._notice_s = FREE_LEASES * LEASE_S + look_every_s(config.num_shards)  # until a free shard is in need
        self._views: tuple[float, list[ShardView]] = (-1.0, [])

    def run(self) -> FleetOutcome:
        """Run to the end. Returns what came of it, with every invariant of every core checked."""
        self._start()
        config, timeline = self.config, self.timeline
        views = [each.for_clients for each in self.seen]
        self.gateways.start(views, lambda request: self.shards[request.shard].submit(request))
        if config.rack_fails_s is not None:
            timeline.at(config.rack_fails_s, self._fail_rack)
        timeline.run_until(config.warm_s)
        busy_s = self._busy_s()
        timeline.run_until(config.seconds)
        after_s = self._busy_s()
        self.outcome.scheduler_busy_s, self.outcome.worker_busy_s = after_s[0] - busy_s[0], after_s[1] - busy_s[1]
        self.check()
        return self.outcome

    def moments(self, every_s: float) -> Iterator[float]:
        """Run to the end without clients, and stop at moments so far apart, for a look."""
        self._start()
        for number in range(1, round(self.config.seconds / every_s) + 1):
            self.timeline.run_until(number * every_s)
            yield self.timeline.now_s
        self.check()

    def check(self) -> None:
        """Assert that no request is lost: each that was submitted has ended, or is live in one shard or on its way."""
        for shard in self.shards:
            if shard.led is not None:
                shard.led.core.check()
        num_live = sum(len(shard.live) for shard in self.shards)
        on_way = self.outcome.num_submitted - self.outcome.num_ended - self.outcome.num_killed - num_live
        assert 0 <= on_way <= self.config.num_clients - num_live, f"{on_way} requests are on their way"

    @property
    def num_stalled(self) -> int:
        """Number of requests that the failure hit, and that got no token since."""
        return sum(shard.num_stalled for shard in self.shards)

    @property
    def is_settled(self) -> bool:
        """True if every shard has a leader, and no two shards differ by more than one worker."""
        counts = [len(shard.led.members) for shard in self.shards if shard.led is not None]
        return len(counts) == len(self.shards) and max(counts) - min(counts) <= 1

    def _racks(self, number: int) -> list[int]:
        """Rack of each of so many processes: as many in every rack, whatever they serve."""
        return [index % self.config.num_racks for index in self._random.sample(range(number), number)]

    def _start(self) -> None:
        config, timeline, random = self.config, self.timeline, self._random
        if not config.is_cold:
            self._share_out()
        look_s = look_every_s(config.num_shards)
        for index, seen in enumerate(self.seen):
            timeline.every(look_s, look_s * (index + 1) / len(self.seen), seen.look)
        for process in self.processes:
            begin_s = random.uniform(0, SCHEDULERS_COME_S if config.is_cold else ROLES_S)
            timeline.every(ROLES_S, begin_s, lambda process=process: self._change_roles(process))  # type: ignore[misc]
        for shard in self.shards:
            timeline.every(PUBLISH_S, random.uniform(0, PUBLISH_S), lambda shard=shard: self._publish(shard))  # type: ignore[misc]
        come_s = WORKERS_COME_S if config.is_cold else 0.0
        for worker in self.workers:
            begin_s = come_s + random.uniform(0, REGISTER_S)
            self._registrations.begin(worker, begin_s)

    def _share_out(self) -> None:
        """Begin where a deployment is after a while: shards and workers spread evenly."""
        for shard in self.shards:
            self._lead(shard, self.processes[shard.number % len(self.processes)])
        for index, worker in enumerate(self.workers):
            worker.shard = index % len(self.shards)
            self.shards[worker.shard].join(worker)
        for shard in self.shards:
            self._publish(shard)
        for seen in self.seen:
            seen.look()

    def _busy_s(self) -> tuple[float, float]:
        return sum(each.busy_s for each in self.processes), sum(each.busy_s for each in self.workers)

    def _publish(self, shard: VirtualShard) -> None:
        if shard.led is not None:
            self.published[shard.number] = shard.description()
        elif self.published[shard.number].leader and shard.free_since_s <= self.timeline.now_s:
            self.published[shard.number] = pb.Shard(number=shard.number)

    def _lead(self, shard: VirtualShard, process: SchedulerProcess) -> None:
        process.standing.discard(shard.number)
        process.leading.add(shard.number)
        if process in shard.standbys:
            shard.standbys.remove(process)
        shard.lead(process)
        self.published[shard.number] = shard.description()
        for worker in self.workers:
            if worker.shard == shard.number and worker.is_alive:
                self._registrations.join_again(worker)

    # Roles of schedulers.

    def _see_shards(self) -> list[ShardView]:
        now_s = self.timeline.now_s
        if self._views[0] != now_s:
            views = [
                ShardView(
                    number=shard.number,
                    leader=self._holder(shard),
                    standbys=tuple(process.address for process in shard.standbys),
                    is_in_need=shard.led is None and now_s > shard.free_since_s + self._notice_s,
                )
                for shard in self.shards
            ]
            self._views = now_s, views
        return self._views[1]

    def _holder(self, shard: VirtualShard) -> str:
        if shard.led is not None:
            return shard.led.process.address
        return self.published[shard.number].leader if self.timeline.now_s < shard.free_since_s else ""

    def _change_roles(self, process: SchedulerProcess) -> None:
        if not process.is_alive:
            return
        roles = next_roles(self._see_shards(), process.address, process.standing, process.leading)
        for number in roles.begin:
            self._stand_by(self.shards[number], process)
        for number in roles.leave:
            process.standing.discard(number)
            self.shards[number].standbys.remove(process)
        for number in roles.hand_over:
            self._hand_over(self.shards[number], process)

    def _stand_by(self, shard: VirtualShard, process: SchedulerProcess) -> None:
        process.standing.add(shard.number)
        shard.standbys.append(process)
        if shard.led is None:  # a leader that was seen may only have lost the lease: wait for one more
            ready_s = HAND_OVER_S if shard.epoch == 0 else LEASE_S
            self.timeline.after(ready_s, lambda: self._take_over(shard))

    def _take_over(self, shard: VirtualShard) -> None:
        """Have the first standby lead, if nobody does."""
        if shard.led is None and shard.standbys:
            self._lead(shard, shard.standbys[0])

    def _hand_over(self, shard: VirtualShard, process: SchedulerProcess) -> None:
        process.leading.discard(shard.number)
        shard.end_leadership()
        shard.free_since_s = self.timeline.now_s
        self.timeline.after(HAND_OVER_S, lambda: self._take_over(shard))

    # Loss of a rack.

    def _fail_rack(self) -> None:
        """Lose the workers and schedulers of rack 0 at once."""
        now_s = self.timeline.now_s
        for worker in self.workers:
            if worker.rack == 0:
                worker.is_alive, worker.died_s = False, now_s
                if worker.shard is not None:
                    shard = self.shards[worker.shard]
                    self.timeline.after(DETECT_S, lambda shard=shard, worker=worker: shard.lose(worker))  # type: ignore[misc]
        for process in self.processes:
            if process.rack == 0:
                for number in process.leading:
                    self.shards[number].end_leadership()
                    self.shards[number].free_since_s = now_s + LEASE_S * self._random.uniform(0.75, 1.0)
                    self.timeline.at(
                        self.shards[number].free_since_s,
                        lambda number=number: self._take_over(self.shards[number]),  # type: ignore[misc]
                    )
                for number in process.standing:
                    self.shards[number].standbys.remove(process)
                process.kill()
