"""A scheduler and fake workers, driven one call at a time: what the engine does, without a wire or a clock.

Every sequence's output is compared with that of an unconstrained run.
"""

from collections import deque
from typing import Any

from scheduler_svc.core.fetching import Fetch
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.isolation import Verdict
from scheduler_svc.core.phases import WorkerRole
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.scheduler_stats import WorkerCounters
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.worker_state import blocks_held
from tests.scheduler.core_executor import (
    STOP_TOKEN_ID,
    EncodedStep,
    FakeWorker,
    beam_candidates,
    choose_survivors,
    encode,
    unconstrained_beams,
    unconstrained_output,
)

Transition = tuple[GroupState, GroupState]


def single(sequence: Sequence, priority: int = 0) -> SequenceGroup:
    return SequenceGroup([sequence], arrival=sequence.seq_id, priority=priority)


class WatchedGroup(SequenceGroup):
    """A group that remembers which transitions it made, in a set that all groups of a cluster share."""

    transitions: set[Transition]

    def move_to(self, state: GroupState) -> None:
        before = self.state
        super().move_to(state)
        self.transitions.add((before, state))


class Cluster:
    """`start` and `complete` are the two halves of a step."""

    def __init__(self, config: SchedulerConfig, *, most_forced: int = 0) -> None:
        """`most_forced`: tokens that a row computes beside its own, as if a grammar forced them."""
        self.config = config
        self.most_forced = most_forced
        self.num_forced = 0
        self.scheduler = Scheduler(config)
        self.workers: dict[str, FakeWorker] = {}
        self.in_flight: dict[str, deque[EncodedStep]] = {}
        self.plans: dict[str, deque[StepPlan]] = {}  # beside in_flight
        self.fetches: list[Fetch] = []  # under way
        self.placing: list[Fetch] = []  # that have come, and are to be placed
        self.has_left_groups = False  # a plan has put groups into the queue: every worker is to be asked
        self.sequences: list[Sequence] = []
        self.num_plans = 0
        self.now_s = 0.0
        self.at_fault: set[str] = set()  # workers whose answers another has shown to be wrong
        self.transitions: set[Transition] = set()  # that groups have made
        self.candidate_sequences: dict[tuple[str, int], list[Sequence]] = {}  # by worker and step
        self.candidates: dict[Sequence, list[tuple[int, int]]] = {}  # of beams, the latest
        self.ranks: dict[SequenceGroup, list[Sequence]] = {}  # live beams, best first
        self.scores: dict[Sequence, int] = {}  # of live beams

    def add_worker(
        self,
        worker_id: str = "w",
        *,
        num_blocks: int,
        block_size: int = 4,
        num_seats: int = 64,
        num_host_blocks: int = 0,
        max_model_len: int | None = None,
        block_format: str = "",
        max_fetched_blocks: int = 1000,
        max_placed_blocks: int | None = None,
        role: WorkerRole = "mixed",
    ) -> None:
        self.scheduler.workers.add_worker(
            worker_id,
            num_blocks=num_blocks,
            block_size=block_size,
            num_seats=num_seats,
            num_host_blocks=num_host_blocks,
            max_model_len=max_model_len,
            block_format=block_format,
            max_fetched_blocks=max_fetched_blocks,
            max_placed_blocks=max_placed_blocks,
            role=role,
        )
        self.workers[worker_id] = FakeWorker(num_blocks, block_size, num_seats, num_host_blocks)
        self.workers[worker_id].most_forced = self.most_forced
        self.in_flight[worker_id] = deque()
        self.plans[worker_id] = deque()

    def remove_worker(self, worker_id: str) -> list[Sequence]:
        del self.workers[worker_id]
        del self.in_flight[worker_id]
        del self.plans[worker_id]
        return self.scheduler.workers.remove_worker(worker_id)

    def remove_all_memory(self, worker_id: str, *, num_blocks: int) -> list[Sequence]:
        """The worker dies, and comes back empty."""
        moved = self.remove_worker(worker_id)
        self.add_worker(worker_id, num_blocks=num_blocks)
        return moved

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        stops: bool = False,
        priority: int = 0,
        deadline_s: float | None = None,
        hash_seed: bytes = b"",
        use_prefix_cache: bool = True,
    ) -> Sequence:
        """A group of one. `stops`: it may end early, by the stop token."""
        (sequence,) = self.add_group(
            prompt,
            1,
            max_tokens,
            stops=stops,
            priority=priority,
            deadline_s=deadline_s,
            hash_seed=hash_seed,
            use_prefix_cache=use_prefix_cache,
        ).sequences
        return sequence

    def add_group(self, prompt: list[int], num_sequences: int, max_tokens: int = 4, **options: Any) -> SequenceGroup:
        group = self.new_group(prompt, num_sequences, max_tokens, **options)
        self.scheduler.add(group)
        return group

    def new_group(
        self,
        prompt: list[int],
        num_sequences: int,
        max_tokens: int = 4,
        *,
        stops: bool = False,
        priority: int = 0,
        deadline_s: float | None = None,
        hash_seed: bytes = b"",
        use_prefix_cache: bool = True,
        is_beam: bool = False,
    ) -> SequenceGroup:
        """One that the test is to add to the scheduler."""
        sequences = [
            Sequence(
                seq_id=len(self.sequences) + index,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                stop_token_ids=frozenset({STOP_TOKEN_ID}) if stops else frozenset(),
                hash_seed=hash_seed,
                use_prefix_cache=use_prefix_cache,
            )
            for index in range(num_sequences)
        ]
        group = WatchedGroup(
            sequences,
            arrival=len(self.sequences),
            priority=priority,
            deadline_s=deadline_s,
            awaits_host=is_beam,
        )
        group.transitions = self.transitions
        self.sequences += sequences
        return group

    def start(self, worker_id: str = "w") -> StepPlan | None:
        waiting = self.scheduler.waiting
        num_before = waiting.num_groups, len(waiting)
        plan = self.scheduler.schedule(worker_id, self.now_s)
        self.has_left_groups |= waiting.num_groups > num_before[0] or len(waiting) > num_before[1]
        self.fetches += self.scheduler.fetches.take_started()
        if plan is not None:
            self.num_plans += 1
            assert 0 < sum(plan.num_tokens) <= self.config.max_num_batched_tokens
            assert plan.seats == [sequence.seat for sequence in plan.sequences]
            assert len({sequence.group.cohort for sequence in plan.sequences}) == 1, "suspects and others in one step"
            self.in_flight[worker_id].append(encode(plan))
            self.plans[worker_id].append(plan)
            beams = [plan.sequences[row] for row in plan.candidate_rows]
            self.candidate_sequences[worker_id, plan.step_id] = beams
        return plan

    def complete(self, worker_id: str = "w") -> list[Sequence]:
        """Execute the oldest step in flight, apply its result. Returns the sequences that got a token."""
        if not self.workers[worker_id].fetches.has_come(self.in_flight[worker_id][0].placed):
            self.refuse_steps(worker_id)
            return []
        step = self.in_flight[worker_id].popleft()
        plan = self.plans[worker_id].popleft()
        tokens = self.workers[worker_id].execute(step)
        forced = self.workers[worker_id].forced
        for sample, token_ids in forced.items():
            if not plan.sampled_sequences[sample].is_finished:
                assert len(token_ids) <= self.scheduler.num_forceable(plan, sample)
                self.num_forced += len(token_ids)
        appended = self.scheduler.apply(worker_id, step.step_id, tokens, forced)
        gained: dict[Sequence, list[int]] = {}
        for sequence, token_id in appended:
            gained.setdefault(sequence, []).append(token_id)
        for sequence, token_ids in gained.items():
            assert sequence.token_ids[-len(token_ids) :] == token_ids
            assert sequence.num_output_tokens <= sequence.max_tokens
            if sequence.ends_with_stop_token() or sequence.num_output_tokens == sequence.max_tokens:
                self.scheduler.finish(sequence)
        self.search_on(worker_id, step.step_id)
        self.at_fault |= self.scheduler.record_executed_step(plan)
        self.close_fetches()
        return list(gained)

    def search_on(self, worker_id: str, step_id: int) -> None:
        """Beam search, as soon as the candidates of all beams of a group are there."""
        beams = self.candidate_sequences.pop((worker_id, step_id))
        for beam, last in zip(beams, self.workers[worker_id].last_of_candidates, strict=True):
            self.candidates[beam] = beam_candidates(last, len(beam.group.sequences))
        for group in dict.fromkeys(beam.group for beam in beams):
            if group.live and group.awaits_decision:
                live = self.by_rank(group)
                scores = [self.scores.get(beam, 0) for beam in live]
                survivors = choose_survivors(
                    scores, [self.candidates.pop(beam) for beam in live], len(group.unfinished)
                )
                placed = self.scheduler.replace_beams(group, [(live[beam], token) for _, beam, token in survivors])
                self.ranks[group] = placed
                self.scores.update(zip(placed, (score for score, _, _ in survivors), strict=True))
                if placed[0].num_output_tokens == placed[0].max_tokens:
                    self.scheduler.finish_group(group)

    def by_rank(self, group: SequenceGroup) -> list[Sequence]:
        """The live beams, best first; at the beginning the only one."""
        return self.ranks.get(group, group.live)

    def step(self, worker_id: str = "w") -> StepPlan:
        """A whole step at depth 1: there must be something to do."""
        plan = self.start(worker_id)
        assert plan is not None
        self.complete(worker_id)
        return plan

    def end_fetch(self, fetch: Fetch, num_blocks: int | None = None) -> int:
        """Have the first blocks of a fetch come, all by default. Returns how many are to be placed."""
        num_blocks = len(fetch.blocks) if num_blocks is None else num_blocks
        self.fetches.remove(fetch)
        present = self.scheduler._places.workers
        ends = (fetch.source, fetch.destination)
        if all(present.get(worker.worker_id) is worker for worker in ends):
            source, destination = (self.workers[worker.worker_id] for worker in ends)
            contents = [source.block_kv(block) for block in fetch.blocks[:num_blocks]]
            destination.fetches.deliver(fetch.fetch_id, contents, len(fetch.blocks))
        num_placed = self.scheduler.fetches.end(fetch, num_blocks)
        if num_placed:
            self.placing.append(fetch)
        return num_placed

    def close_fetches(self) -> None:
        """End the calls of fetches of which no plan places any more, as their carrier does."""
        for fetch in [each for each in self.placing if not self.scheduler.fetches.is_needed(each)]:
            self.drop_fetch(fetch)

    def drop_fetch(self, fetch: Fetch) -> None:
        """The destination keeps no more what has come; steps that place it, and are in flight, are refused."""
        self.placing.remove(fetch)
        if fetch.destination.worker_id in self.workers:
            self.workers[fetch.destination.worker_id].fetches.forget(fetch.fetch_id)
        self.scheduler.fetches.drop(fetch)

    def refuse_steps(self, worker_id: str = "w") -> None:
        """Execute none of the steps in flight: the worker asks for a snapshot."""
        self.in_flight[worker_id].clear()
        self.plans[worker_id].clear()
        self.scheduler.rollback(worker_id)

    def fail_steps(self, worker_id: str = "w") -> None:
        """Fail the worker in the middle of its oldest step; it refuses the later ones."""
        if self.in_flight[worker_id]:
            self.workers[worker_id].scramble(self.in_flight[worker_id][0])
        self.refuse_steps(worker_id)

    def blame_step(self, worker_id: str = "w") -> list[SequenceGroup]:
        """Fail like `fail_steps` and suspect the step's groups. Returns the groups that are failed for it."""
        failed = self.plans[worker_id][0]
        self.fail_steps(worker_id)
        return self.end_guilty(self.scheduler.record_failed_step([failed]))

    def lose_worker(self, worker_id: str = "w", *, is_proven: bool = False) -> list[SequenceGroup]:
        """The worker dies, or its link breaks. Returns who is failed for it."""
        verdicts = self.scheduler.record_worker_loss(worker_id, self.now_s, is_proven=is_proven)
        self.remove_worker(worker_id)
        return self.end_guilty(verdicts)

    def end_guilty(self, verdicts: list[Verdict]) -> list[SequenceGroup]:
        for verdict in verdicts:
            self.scheduler.finish_group(verdict.group)
        return [verdict.group for verdict in verdicts]

    def stats(self, worker_id: str = "w") -> WorkerCounters:
        (stats,) = [w for w in self.scheduler.stats().workers if w.worker_id == worker_id]
        return stats

    def run_until_idle(self, max_plans: int = 10_000) -> None:
        """Step all workers round robin; fail if none progresses while a sequence is unfinished."""
        stop_at = self.num_plans + max_plans
        while any(not sequence.is_finished for sequence in self.sequences):
            self.has_left_groups = False
            planned = [self.start(worker_id) for worker_id in self.workers]
            busy = [worker_id for worker_id, steps in self.in_flight.items() if steps]
            assert any(planned) or busy or self.fetches or self.has_left_groups, (
                "nothing runs although a sequence is unfinished"
            )
            assert self.num_plans <= stop_at, "the sequences do not get done"
            for worker_id in busy:
                if len(self.in_flight[worker_id]) == self.config.pipeline_depth or not any(planned):
                    self.complete(worker_id)
            for fetch in list(self.fetches):
                self.end_fetch(fetch)
        for worker_id, steps in self.in_flight.items():
            while steps:
                self.complete(worker_id)
        for fetch in list(self.fetches):
            self.end_fetch(fetch)

    def finish_and_compare(self) -> None:
        """Step until all is done: each output is what the model says, and nothing is left of it."""
        self.run_until_idle()
        self.assert_outputs_are_unconstrained()
        self.assert_idle_and_unleaked()

    def assert_outputs_are_unconstrained(self) -> None:
        """Each output is what the model says alone; a sequence cut short has the beginning of it."""
        for s in self.sequences:
            prompt = s.token_ids[: s.num_prompt_tokens]
            if s.group.awaits_host:
                self.assert_beams_are_unconstrained(s.group, prompt)
                continue
            sample_index = s.group.sequences.index(s)
            expected = unconstrained_output(prompt, s.max_tokens, s.stop_token_ids, sample_index)
            assert s.output_token_ids == expected[: s.num_output_tokens]

    def assert_beams_are_unconstrained(self, group: SequenceGroup, prompt: list[int]) -> None:
        """Compare beams with the unconstrained search, as far as it ran."""
        beams = self.ranks.get(group, group.sequences[:1])
        num_tokens = beams[0].num_output_tokens
        expected = unconstrained_beams(prompt, num_tokens, len(group.sequences))
        assert [beam.output_token_ids for beam in beams] == expected

    def assert_figures_add_up(self) -> None:
        """Statistics against a count block by block."""
        for worker in self.scheduler.stats().workers:
            held = [blocks_held(s) for s in self.sequences if s.worker_id == worker.worker_id and s.seat is not None]
            num_distinct = len({block for blocks in held for block in blocks})
            assert worker.num_sequence_blocks == num_distinct
            assert worker.num_saved_blocks == sum(map(len, held)) - num_distinct
            assert 0 <= worker.num_filled_token_slots <= worker.num_allocated_token_slots
            assert worker.num_reserved_token_slots >= 0 and worker.num_fragmented_token_slots >= 0

    def assert_groups_are_listed(self) -> None:
        """Every group is listed where its state says, and one that is new or has ended nowhere."""
        self.scheduler.check()
        listed = {group for group, _ in self.scheduler._places.listed_states()}
        for group in dict.fromkeys(sequence.group for sequence in self.sequences):
            is_listed = group.state not in (GroupState.NEW, GroupState.ENDED)
            assert (group in listed) == is_listed, f"group {group.arrival} is {group.state.name}"

    def assert_idle_and_unleaked(self) -> None:
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert stats.num_waiting == 0
        for worker in stats.workers:
            assert worker.num_used_blocks == worker.num_running == worker.num_in_flight_steps == 0
            assert worker.num_used_host_blocks == 0


def make_cluster(
    *,
    num_blocks: int = 100,
    depth: int = 1,
    budget: int = 64,
    max_num_seqs: int = 16,
    num_seats: int = 16,
    enable_prefix_cache: bool = False,
    preempt_every: int | None = None,
) -> Cluster:
    """One worker, on which groups of some sequences share blocks of 4 tokens."""
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        watermark=0.0,
        pipeline_depth=depth,
        enable_prefix_cache=enable_prefix_cache,
        preempt_every=preempt_every,
    )
    cluster = Cluster(config)
    cluster.add_worker(num_blocks=num_blocks, num_seats=num_seats)
    return cluster
