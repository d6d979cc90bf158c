"""The scheduler's fake cluster under audit: each call is entered in a ledger, each cached block compared with its hash.

Beams survive at random, and may be decided late: what they should consist of is kept here.
"""

import hashlib
import random
import struct
from collections import Counter
from typing import Any

from scheduler_svc.core.placement import can_ever_hold
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.worker_state import WorkerState
from tests.memory.ledger import Ledger
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.core_executor import KV, VOCAB_SIZE, context_kv


class AuditedCluster(Cluster):
    """Use its own methods in place of the scheduler's where it has one."""

    def __init__(self, config: SchedulerConfig, seed: int = 0, seen: Counter[str] | None = None) -> None:
        super().__init__(config)
        self.seen = Counter() if seen is None else seen  # what happened, so that a test can tell that it did
        self.ledger = Ledger(self.scheduler)
        self.decides_at_once = True
        self._random = random.Random(seed)
        self._beam_tokens: dict[Sequence, list[int]] = {}  # of beams that were decided
        self._active: list[Sequence] = []  # unfinished when last looked at
        self._num_known = 0  # of `sequences`: those that came into it
        self._dropped: list[tuple[bytes, list[int]]] = []  # hash seed and tokens of beams that are no more

    def add_worker(self, worker_id: str = "w", **options: Any) -> None:
        super().add_worker(worker_id, **options)
        self.ledger.add_worker(worker_id)

    def remove_worker(self, worker_id: str) -> list[Sequence]:
        moved = super().remove_worker(worker_id)
        self.ledger.remove_worker(worker_id)
        self.look()
        return moved

    def start(self, worker_id: str = "w") -> StepPlan | None:
        self.look()
        fresh = {group for group in self.scheduler.waiting if _never_ran(group)}
        self.ledger.before_plan(worker_id)
        plan = super().start(worker_id)
        if plan is not None:
            self.ledger.planned(plan, self._active)
            self._count(plan)
        self.look()
        self._check_admissions(worker_id, fresh)
        return plan

    def complete(self, worker_id: str = "w") -> list[Sequence]:
        self.ledger.done(worker_id)
        appended = super().complete(worker_id)
        self.look()
        if self.decides_at_once:
            self.decide_all()
        return appended

    def fail_steps(self, worker_id: str = "w") -> None:
        self.seen["failed steps"] += len(self.in_flight[worker_id])
        super().fail_steps(worker_id)
        self.ledger.undone(worker_id)
        self.look()

    def has_cached(self, worker_id: str, block_hashes: list[bytes]) -> bool:
        blocks = self.scheduler._places.workers[worker_id].blocks
        return len(blocks.lookup(block_hashes)) == len(block_hashes) > 0

    def pin(self, worker_id: str, name: str, block_hashes: list[bytes]) -> bool:
        blocks = self.scheduler._places.workers[worker_id].blocks.lookup(block_hashes)
        num_used = sum(not self.ledger.is_cached(worker_id, block) for block in blocks)
        is_pinned = self.scheduler.workers.pin_blocks(worker_id, name, block_hashes)
        if is_pinned:
            self.seen["pinned blocks"] += len(blocks)
            self.seen["pinned blocks in use"] += num_used
            self.ledger.pin(worker_id, name, blocks)
        return is_pinned

    def unpin(self, worker_id: str, name: str) -> None:
        self.scheduler.workers.unpin_blocks(worker_id, name)
        self.ledger.unpin(worker_id, name)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.look()

    def finish_group(self, group: SequenceGroup) -> None:
        self.scheduler.finish_group(group)
        self.look()

    def end_expired(self) -> None:
        for group in self.scheduler.expired_groups(self.now_s):
            assert group.deadline_s is not None and _never_ran(group)
            self.seen["expired groups"] += 1
            self.finish_group(group)

    def undecided(self) -> list[SequenceGroup]:
        groups = dict.fromkeys(s.group for s in self._active if s.group.awaits_host)
        return [group for group in groups if group.live and group.awaits_decision]

    def decide_all(self) -> None:
        for group in self.undecided():
            self.decide(group, self._random)

    def decide(self, group: SequenceGroup, rng: random.Random) -> None:
        """Random beams survive with random tokens: none to all others are dropped, one may have all children."""
        token_ids = rng.sample(range(1, VOCAB_SIZE), rng.randint(1, len(group.unfinished)))
        survivors = [(rng.choice(group.live), token_id) for token_id in token_ids]
        before = {beam: list(beam.token_ids) for beam in group.live}
        self._dropped += [(beam.hash_seed, tokens) for beam, tokens in before.items()]
        num_parents = len({parent for parent, _ in survivors})
        self.seen["dropped beams"] += len(before) - num_parents
        self.seen["forked beams"] += len(survivors) - num_parents
        placed = self.scheduler.replace_beams(group, survivors)
        for beam, (parent, token_id) in zip(placed, survivors, strict=True):
            self._beam_tokens[beam] = [*before[parent], token_id]
        assert group.live == [beam for beam in group.sequences if beam in placed]
        self.look()
        if placed[0].num_output_tokens == placed[0].max_tokens:
            self.finish_group(group)

    def search_on(self, worker_id: str, step_id: int) -> None:
        del self.candidate_sequences[worker_id, step_id]

    def unfinished(self) -> list[Sequence]:
        new = self.sequences[self._num_known :]
        return [s for s in [*self._active, *new] if not s.is_finished]

    def look(self) -> None:
        self._active += self.sequences[self._num_known :]
        self._num_known = len(self.sequences)
        self.ledger.look(self._active)
        self._active = self.unfinished()

    def check(self) -> None:
        """The scheduler's own invariants, then the ledger's."""
        self.scheduler.check()
        self.assert_figures_add_up()
        self.ledger.check(self._active)
        for beam, token_ids in self._beam_tokens.items():
            if beam.status is SequenceStatus.RUNNING:
                assert beam.token_ids == token_ids

    def check_cached_contents(self) -> int:
        """Every block that can be found holds what its hash says, where no step is in flight. Returns how many."""
        contents: dict[bytes, list[KV]] = {}
        chains = {(s.hash_seed, tuple(s.token_ids)) for s in self.sequences}
        chains.update((seed, tuple(token_ids)) for seed, token_ids in self._dropped)
        num_checked = 0
        for worker_id, fake in self.workers.items():
            if self.in_flight[worker_id]:
                continue
            if not contents:
                for seed, token_ids in chains:
                    contents.update(_contents(seed, list(token_ids), fake.block_size))
            for block, block_hash in enumerate(self.scheduler._places.workers[worker_id].blocks._hashes):
                if block_hash is not None:
                    content = contents[block_hash]
                    kv = fake.block_kv(block)[: len(content)]
                    assert kv == content, f"block {block} is not what its hash says"
                    num_checked += 1
        return num_checked

    def assert_beams_are_unconstrained(self, group: SequenceGroup, prompt: list[int]) -> None:
        for beam in group.sequences:
            if beam in self._beam_tokens and beam.is_live:
                assert beam.token_ids == self._beam_tokens[beam]

    def _count(self, plan: StepPlan) -> None:
        worker = self.scheduler._places.workers[plan.worker_id]
        preempted = worker.in_flight[-1].preempted
        self.seen["groups swapped out"] += sum(group.swap_step is not None for group in preempted)
        self.seen["groups to recompute"] += sum(group.swap_step is None for group in preempted)
        self.seen["blocks swapped in"] += len(plan.swap_in) // 2
        self.seen["shared host blocks"] += worker.host.num_shared_blocks if worker.host is not None else 0
        self.seen["copied blocks"] += len(plan.copies) // 2
        self.seen["forked samples"] += len(plan.sampled_sequences) - len(set(plan.sampled_rows))
        self.seen["candidates"] += len(plan.candidate_rows)
        self.seen["deferred blocks"] += sum(len(release.blocks) for s in worker.in_flight for release in s.releases)
        self.seen["evicted blocks"] += self.ledger.num_evicted(plan.worker_id)
        self.seen["blocks shared between groups"] += _num_shared_by_groups(worker)

    def _check_admissions(self, worker_id: str, fresh: set[SequenceGroup]) -> None:
        """Assert that no new group starts before one preempted here, nor before an earlier one preempted anywhere.

        One that this worker can never hold waits for another.
        """
        worker, waiting = self.scheduler._places.workers[worker_id], self.scheduler.waiting
        gave_way = [
            group
            for group in waiting
            if group not in waiting._deferred
            and not _never_ran(group)
            and can_ever_hold(worker, group, self.scheduler._limits)
        ]
        for group in fresh:
            if group.worker_id == worker_id:
                assert all(other.priority > group.priority for other in [*worker.parked, *worker.swapped])
                assert all(other.order > group.order for other in gave_way)


def _num_shared_by_groups(worker: WorkerState) -> int:
    users = {(block, s.group.arrival) for s in worker.running for block in s.block_table}
    return sum(1 for count in Counter(block for block, _ in users).values() if count > 1)


def _never_ran(group: SequenceGroup) -> bool:
    return any(s.status is SequenceStatus.WAITING for s in group.sequences)


def _contents(hash_seed: bytes, token_ids: list[int], block_size: int) -> dict[bytes, list[KV]]:
    """Contents that the blocks of these tokens must hold, by hash; of tails only their first tokens."""
    contents = {}
    kv = context_kv(token_ids)
    parent = hashlib.sha256(hash_seed).digest()
    for start in range(0, len(token_ids), block_size):
        tokens = token_ids[start : start + block_size]
        chained = [
            hashlib.sha256(parent + struct.pack(f"<{n}i", *tokens[:n])).digest() for n in range(1, len(tokens) + 1)
        ]
        for n, each in enumerate(chained, 1):
            is_full = n == block_size
            contents[each if is_full else hashlib.sha256(b"tail" + each).digest()] = kv[start : start + n]
        parent = chained[-1]
    return contents
