"""A shard in virtual time: the real core schedules its requests, and its leader's process pays for that.

Requests outlive the leader, as the journal has them; its core, and all KV, do not.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from benchmarks.fleet.fleet_config import BLOCK_SIZE, JOURNAL_S, NETWORK_S, FleetConfig
from benchmarks.fleet.fleet_outcome import FleetOutcome
from benchmarks.fleet.fleet_request import FleetRequest
from benchmarks.fleet.gateways import Gateways
from benchmarks.fleet.scheduler_process import SchedulerProcess
from benchmarks.fleet.timeline import Timeline
from benchmarks.fleet.virtual_worker import VirtualWorker
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.api.worker_shares import SeenShards, WorkerShares
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan

_REBUILT_AT_ONCE = 16  # requests, by a leader that takes over; its other jobs wait meanwhile


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Parts that all shards have in common."""

    config: FleetConfig
    timeline: Timeline
    outcome: FleetOutcome
    gateways: Gateways
    seen: SeenShards


class Leadership:
    """Leadership of one shard: ends with its process, or by a hand-over."""

    def __init__(self, number: int, process: SchedulerProcess, around: Surroundings) -> None:
        config = around.config
        self.process = process
        settings = SchedulerConfig(max_num_batched_tokens=config.max_batched_tokens, max_num_seqs=config.num_seats)
        self.core = Scheduler(settings)
        self.depth = settings.pipeline_depth
        self.members: dict[str, VirtualWorker] = {}
        self.in_flight: Counter[VirtualWorker] = Counter()  # steps
        self.idle: dict[VirtualWorker, None] = {}  # that have room for a step, and got none
        self.arrivals = count()
        self.shares = WorkerShares(
            number, around.seen, self.members, self.core.workers.num_sequences_on, lambda: around.timeline.now_s
        )


class VirtualShard:
    """Requests of one shard, and its present leadership."""

    def __init__(self, number: int, around: Surroundings) -> None:
        self.number = number
        self.led: Leadership | None = None
        self.epoch = 0
        self.free_since_s = 0.0  # when the last lease ended
        self.standbys: list[SchedulerProcess] = []
        self.live: dict[FleetRequest, None] = {}  # that were admitted, or are on their way
        self._around = around
        self._request_of: dict[SequenceGroup, FleetRequest] = {}
        self._without_token: set[Sequence] = set()
        self._stalled: dict[FleetRequest, float] = {}  # since when

    @property
    def num_members(self) -> int:
        """Number of workers that the leader drives; 0 without a leader."""
        return len(self.led.members) if self.led is not None else 0

    @property
    def num_stalled(self) -> int:
        """Number of requests that a failure hit, and that got no token since."""
        return len(self._stalled)

    def submit(self, request: FleetRequest) -> None:
        """Take a request that arrives. Without a leader it waits for the next one, as its client tries again."""
        self.live[request] = None
        if self.led is not None:
            led = self.led
            led.process.post(lambda: self._admit(led, [request], self._around.config.scheduler.request_s))

    def lead(self, process: SchedulerProcess) -> None:
        """Begin to lead: read the journal, then rebuild what is live, some requests at a time between other jobs."""
        self.epoch += 1
        led = self.led = Leadership(self.number, process, self._around)
        costs = self._around.config.scheduler
        self._request_of.clear()
        self._without_token.clear()
        requests = list(self.live)
        process.post(lambda: costs.journal_read_s * len(requests))
        for start in range(0, len(requests), _REBUILT_AT_ONCE):
            part = requests[start : start + _REBUILT_AT_ONCE]
            process.post(lambda part=part: self._admit(led, part, costs.rebuild_s))  # type: ignore[misc]

    def end_leadership(self) -> None:
        """End the present leadership. All KV of its requests is lost; its workers wait for the next leader."""
        if self.led is None:
            return
        for worker in self.led.members.values():
            worker.is_driven = False
        self._around.outcome.num_lost_tokens += sum(
            request.sequence.num_computed_tokens for request in self.live if request.sequence is not None
        )
        self._stall(self.live, self._around.timeline.now_s)
        self.led = None

    def join(self, worker: VirtualWorker) -> None:
        """Take a worker that registers."""
        if self.led is None:
            return
        led, config = self.led, self._around.config

        def add() -> float:
            if self.led is not led or not worker.is_alive or worker.shard != self.number or worker.is_driven:
                return 0.0
            led.core.workers.add_worker(
                worker.worker_id,
                num_blocks=config.num_blocks,
                block_size=BLOCK_SIZE,
                num_seats=config.num_seats,
            )
            led.members[worker.worker_id] = worker
            led.in_flight[worker] = 0
            worker.is_driven = True
            led.idle[worker] = None
            self._plan_idle(led, 0.0)
            return 0.0

        led.process.post(add)

    def lose(self, worker: VirtualWorker) -> None:
        """Give up a worker that has gone; what ran there is computed again."""
        led = self.led
        if led is None or worker.worker_id not in led.members:
            return

        def remove() -> float:
            if led.members.pop(worker.worker_id, None) is None or self.led is not led:
                return 0.0
            led.idle.pop(worker, None)
            worker.is_driven = False
            killed = led.core.record_worker_loss(worker.worker_id, self._around.timeline.now_s)
            lost = led.core.workers.remove_worker(worker.worker_id)
            self._around.outcome.num_killed += len(killed)
            self._around.outcome.num_lost_tokens += sum(sequence.num_lost_tokens for sequence in lost)
            self._stall([self._request_of[sequence.group] for sequence in lost], worker.died_s)
            self._plan_idle(led, 0.0)
            return 0.0

        led.process.post(remove)

    def drain(self, worker: VirtualWorker) -> None:
        """Move what runs on a worker to the others."""
        led = self.led
        if led is not None:

            def drain() -> float:
                if worker.worker_id in led.members:
                    led.core.workers.drain_worker(worker.worker_id)
                    self._plan_idle(led, 0.0)
                return 0.0

            led.process.post(drain)

    def num_on(self, worker: VirtualWorker) -> int:
        """Sequences on a worker; 0 if it is not one of the leader's."""
        led = self.led
        return led.core.workers.num_sequences_on(worker.worker_id) if led and worker.worker_id in led.members else 0

    def description(self) -> pb.Shard:
        """Describe the shard, as its leader publishes it."""
        led = self.led
        assert led is not None, "only a leader describes its shard"
        return pb.Shard(
            number=self.number,
            leader=led.process.address,
            epoch=self.epoch,
            num_workers=len(led.members),
            num_running=sum(led.core.workers.num_sequences_on(worker_id) for worker_id in led.members),
            num_waiting=led.core.waiting.num_groups,
            gives_to=led.shares.gives_to(),
        )

    def _admit(self, led: Leadership, requests: list[FleetRequest], cost_s: float) -> float:
        if self.led is not led:
            return 0.0
        for request in requests:
            before = request.sequence
            sequence = request.sequence = Sequence(
                seq_id=next(led.arrivals),
                token_ids=list(request.prompt) if before is None else before.token_ids,
                num_prompt_tokens=len(request.prompt),
                max_tokens=request.num_output,
                stop_token_ids=frozenset(),
            )
            group = SequenceGroup([sequence], arrival=sequence.seq_id)
            self._request_of[group] = request
            if request.first_s is None:
                self._without_token.add(sequence)
            led.core.add(group)
        cost_s *= len(requests)
        self._plan_idle(led, cost_s)
        return cost_s

    def _plan_idle(self, led: Leadership, after_s: float) -> None:
        for worker in list(led.idle):
            self._plan(led, worker, after_s)

    def _plan(self, led: Leadership, worker: VirtualWorker, after_s: float) -> None:
        """Plan steps for a worker until its pipeline is full, or there is nothing to do."""
        timeline, life = self._around.timeline, worker.life
        while (plan := led.core.schedule(worker.worker_id, timeline.now_s)) is not None:

            def answer(plan: StepPlan = plan) -> None:
                if worker.is_alive and worker.life == life and self.led is led:
                    led.process.post(lambda: self._take_answer(led, worker, plan))

            worker.execute(plan, timeline.now_s + after_s, timeline, answer)
            led.in_flight[worker] += 1
        if led.in_flight[worker] < led.depth:
            led.idle[worker] = None
        else:
            led.idle.pop(worker, None)

    def _take_answer(self, led: Leadership, worker: VirtualWorker, plan: StepPlan) -> float:
        if self.led is not led or worker.worker_id not in led.members:
            return 0.0
        config, outcome = self._around.config, self._around.outcome
        now_s, num_rows = self._around.timeline.now_s, len(plan.sequences)
        cost_s = config.scheduler.of_step(num_rows)
        led.in_flight[worker] -= 1
        began_ns = time.thread_time_ns() if config.is_timed else 0
        got = led.core.apply(worker.worker_id, plan.step_id, [0] * len(plan.sampled_sequences))
        led.core.record_executed_step(plan)
        delivered_s = now_s + cost_s + JOURNAL_S + NETWORK_S
        outcome.num_answered_rows += num_rows
        if now_s >= config.warm_s:
            outcome.num_steps += 1
            outcome.num_rows += num_rows
        self._deliver(led, got, delivered_s)
        self._plan(led, worker, cost_s * config.scheduler.turn_part)
        if led.idle:
            self._plan_idle(led, cost_s * config.scheduler.turn_part)
        if config.is_timed:
            outcome.core_cpu_s += (time.thread_time_ns() - began_ns) / 1e9
        return cost_s

    def _deliver(self, led: Leadership, got: list[tuple[Sequence, int]], delivered_s: float) -> None:
        """Send the token of each of these sequences to its client, and end those that have all."""
        gateways, request_of = self._around.gateways, self._request_of
        come_s = delivered_s
        if gateways.are_charged:
            come_s = gateways.pass_tokens([request_of[sequence.group] for sequence, _ in got], delivered_s)
        else:
            self._around.outcome.count_tokens(delivered_s, len(got))
        # One pass over all, since these are most of what a simulation does: those with the first or the last token.
        at_an_end = [s for s, _ in got if (num := len(s.token_ids) - s.num_prompt_tokens) == 1 or num >= s.max_tokens]
        for sequence in at_an_end:
            if sequence in self._without_token:
                self._without_token.discard(sequence)
                gateways.note_first(request_of[sequence.group], come_s)
        if self._stalled:
            for sequence, _ in got:
                since_s = self._stalled.pop(request_of[sequence.group], None)
                if since_s is not None:
                    self._around.outcome.stalls_s.append(come_s - since_s)
        for sequence in [each for each in at_an_end if each.num_output_tokens >= each.max_tokens]:
            group = sequence.group
            led.core.finish(sequence)
            led.core.forget_group(group)
            request = request_of.pop(group)
            del self.live[request]
            gateways.note_end(request, come_s)

    def _stall(self, requests: Iterable[FleetRequest], since_s: float) -> None:
        """Note that these requests get no token since a moment."""
        for request in requests:
            if request.first_s is not None:
                self._stalled.setdefault(request, since_s)
