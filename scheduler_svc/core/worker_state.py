"""What the scheduler knows of one worker: its blocks, its slots, who runs there, which steps are in flight.

Blocks and slots change hands here. Who gets them, and when, is the scheduler's decision.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.scheduler_stats import WorkerStats
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan


class Release(NamedTuple):
    """What a sequence gave up: a slot, and one reference to each block of its table."""

    slot: int
    block_table: list[int]


@dataclass(slots=True)
class PlannedStep:
    """A plan, and what hangs on its execution. It is the holder of the blocks in its releases."""

    plan: StepPlan
    registered: list[int] = field(default_factory=list)  # blocks made findable in trust that it is executed
    releases: list[Release] = field(default_factory=list)  # freed once it is done: it is the last to use them
    num_starved: int = 0  # rows left out because their block is still to be released
    preempted: list[Sequence] = field(default_factory=list)  # to make room for its rows


class WorkerState:
    """One worker. Every running sequence holds one slot and one reference to each block of its table."""

    def __init__(
        self,
        worker_id: str,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        num_watermark_blocks: int,
        max_num_batched_tokens: int,
        enable_prefix_cache: bool,
    ) -> None:
        self.worker_id = worker_id
        self.block_size = block_size
        self.num_slots = num_slots
        self.num_watermark_blocks = num_watermark_blocks  # left available by admissions
        self.max_num_batched_tokens = max_num_batched_tokens  # in a step
        self.enable_prefix_cache = enable_prefix_cache
        self.blocks = BlockManager(num_blocks)
        self.running: list[Sequence] = []  # by sort_key
        self.parked: dict[int, Sequence] = {}  # preempted here, and their pending tokens are still to come
        self.in_flight: deque[PlannedStep] = deque()  # consecutive step ids
        self.unoffered: list[Sequence] = []  # have filled a block that the prefix cache does not know yet
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.freed_slots: list[int] = []  # the worker has not been told
        self.next_step_id = 1
        self.forced_step_id = 0  # the latest before which a preemption was forced
        self.needs_snapshot = True
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that it can hold alone, and so the longest that may be started here."""
        return (self.blocks.num_blocks - self.num_watermark_blocks) * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_spare_tokens(self) -> int:
        """What its running sequences would leave of the token budget of its next step."""
        budget = self.max_num_batched_tokens
        for sequence in self.running:
            if not sequence.has_all_tokens:
                budget -= sequence.num_tokens - sequence.num_computed_tokens
            if budget <= 0:
                return 0
        return budget

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of a sequence's head. At least its last token is left to compute."""
        if not (self.enable_prefix_cache and sequence.use_prefix_cache):
            return []
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        hashes = sequence.block_hashes
        extend_block_hashes(hashes, sequence.hash_seed, sequence.token_ids, self.block_size, num_blocks)
        return self.blocks.lookup(hashes[:num_blocks] if len(hashes) > num_blocks else hashes)

    def has_room_for(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether all its present tokens fit above the watermark."""
        num_needed = self.num_blocks_for(sequence.num_tokens) - len(prefix) + self.blocks.num_unreferenced(prefix)
        return num_needed + self.num_watermark_blocks <= self.blocks.num_available_blocks

    def start(self, sequence: Sequence, prefix: list[int], step_id: int) -> None:
        """Give a waiting sequence a slot, its cached prefix and blocks for all its present tokens."""
        self.blocks.share(prefix)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(prefix)
        sequence.block_table = prefix + self.blocks.allocate(num_new)
        sequence.num_computed_tokens = len(prefix) * self.block_size
        sequence.num_offered_blocks = len(prefix)
        sequence.slot = self.free_slots.pop()
        sequence.worker_id = self.worker_id
        sequence.status = SequenceStatus.RUNNING
        sequence.admitted_step = sequence.last_step = step_id
        sequence.num_tokens_at_start = sequence.num_tokens
        sequence.num_times_left = 0
        insort(self.running, sequence, key=_sort_key)

    def stop(self, sequence: Sequence) -> None:
        """Take slot and blocks from a running sequence: now, or when the last step in flight with it is done."""
        index = bisect_left(self.running, sequence.sort_key, key=_sort_key)
        assert self.running[index] is sequence
        del self.running[index]
        step = self._step_in_flight(sequence.last_step)
        self.offer_full_blocks(sequence, step)
        assert sequence.slot is not None
        release = Release(sequence.slot, sequence.block_table)
        sequence.slot = None
        sequence.block_table = []
        sequence.num_offered_blocks = 0
        if step is None:
            self._give_back(release)
        else:
            step.releases.append(release)

    def preempt(self, sequence: Sequence, step: PlannedStep) -> None:
        """Stop it while `step` is planned. It keeps the tokens in flight, and is parked until they are here."""
        self.stop(sequence)
        sequence.lose_computed_tokens()
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(sequence)
        if sequence.num_pending_tokens:
            self.parked[sequence.seq_id] = sequence

    def offer_full_blocks(self, sequence: Sequence, step: PlannedStep | None) -> None:
        """Make its blocks findable that are full, known, and computed once `step` is done (None: already)."""
        if not self.enable_prefix_cache:
            return
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_size
        if num_full <= sequence.num_offered_blocks:
            return
        hashes = sequence.block_hashes
        extend_block_hashes(hashes, sequence.hash_seed, sequence.token_ids, self.block_size, num_full)
        for index in range(sequence.num_offered_blocks, num_full):
            block = sequence.block_table[index]
            if self.blocks.register(block, hashes[index]) and step is not None:
                step.registered.append(block)
        sequence.num_offered_blocks = num_full

    def offer_filled_blocks(self) -> None:
        """Offer what decoding has filled: apart, because hashing takes time for which a step need not wait."""
        unoffered, self.unoffered = self.unoffered, []
        for sequence in unoffered:
            if sequence.worker_id == self.worker_id and sequence.status is SequenceStatus.RUNNING:
                self.offer_full_blocks(sequence, self._step_in_flight(sequence.last_step))

    def num_coming_blocks(self) -> int:
        """Blocks that become available when the steps in flight are done."""
        return self.blocks.num_freed_by(release.block_table for step in self.in_flight for release in step.releases)

    def complete_step(self) -> None:
        """The oldest step in flight was executed: free what waited for it."""
        for release in self.in_flight.popleft().releases:
            self._give_back(release)

    def undo_steps(self) -> list[Sequence]:
        """No step in flight was executed. Returns the sequences started in one of them, stopped again."""
        undone = list(self.in_flight)
        self.in_flight.clear()
        for step in reversed(undone):
            self._undo_rows(step)
        for step in undone:
            for release in step.releases:
                self._give_back(release)
        started = [s for s in self.running if undone and s.admitted_step >= undone[0].plan.step_id]
        for sequence in started:
            sequence.num_computed_tokens = 0  # not even its cached prefix: that may be undone as well
            self.stop(sequence)
        for sequence in self.running:
            self._trim(sequence)
        self.needs_snapshot = True
        return started

    def _undo_rows(self, step: PlannedStep) -> None:
        plan = step.plan
        for block in step.registered:
            self.blocks.unregister(block)
        for row in plan.sampled_rows:
            plan.sequences[row].num_pending_tokens -= 1
        for sequence, position in zip(plan.sequences, plan.positions, strict=True):
            # A later stay here began in a step that is undone too; one on another worker is none of ours.
            if sequence.status is SequenceStatus.RUNNING and sequence.worker_id == self.worker_id:
                sequence.num_computed_tokens = position
                sequence.num_offered_blocks = 0  # offering a block again does no harm

    def _trim(self, sequence: Sequence) -> None:
        """Give back the blocks that lie beyond the tokens."""
        num_needed = self.num_blocks_for(sequence.num_tokens)
        self.blocks.free(sequence.block_table[num_needed:])
        del sequence.block_table[num_needed:]

    def _step_in_flight(self, step_id: int) -> PlannedStep | None:
        if not self.in_flight or step_id < self.in_flight[0].plan.step_id:
            return None
        return self.in_flight[step_id - self.in_flight[0].plan.step_id]

    def _give_back(self, release: Release) -> None:
        self.blocks.free(release.block_table)
        self.free_slots.append(release.slot)
        self.freed_slots.append(release.slot)

    def stats(self) -> WorkerStats:
        blocks = self.blocks
        num_allocated = blocks.num_used_blocks * self.block_size
        # A shared block is full, so what is unfilled belongs to one table alone.
        num_unfilled = sum(len(s.block_table) * self.block_size - s.num_computed_tokens for s in self.running)
        return WorkerStats(
            worker_id=self.worker_id,
            num_blocks=blocks.num_blocks,
            num_used_blocks=blocks.num_used_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_running=len(self.running),
            num_allocated_token_slots=num_allocated,
            num_filled_token_slots=num_allocated - num_unfilled,
            num_prefix_query_tokens=self.num_prefix_query_tokens,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_in_flight_steps=len(self.in_flight),
        )

    def check(self) -> None:
        """Assert that blocks, slots and pending tokens add up."""
        releases = [release for step in self.in_flight for release in step.releases]
        tables = [s.block_table for s in self.running] + [release.block_table for release in releases]
        self.blocks.check(Counter(block for table in tables for block in table))
        slots = self.free_slots + [release.slot for release in releases]
        slots += [s.slot for s in self.running if s.slot is not None]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or held twice"
        assert [s.sort_key for s in self.running] == sorted(s.sort_key for s in self.running)
        first_id = self.next_step_id - len(self.in_flight)
        assert [step.plan.step_id for step in self.in_flight] == list(range(first_id, self.next_step_id))
        pending = Counter(step.plan.sequences[row] for step in self.in_flight for row in step.plan.sampled_rows)
        for s in self.running:
            assert s.status is SequenceStatus.RUNNING and s.worker_id == self.worker_id and s.slot is not None
            assert 0 <= s.num_computed_tokens < s.num_tokens <= s.worst_case_tokens
            assert s.num_pending_tokens == pending[s]
            num_most = self.num_blocks_for(s.num_tokens)
            assert self.num_blocks_for(s.num_computed_tokens) <= len(s.block_table) <= num_most
            assert s.num_offered_blocks <= len(s.block_hashes)
        for s in self.parked.values():
            assert s.status is SequenceStatus.PREEMPTED and s.num_pending_tokens == pending[s] > 0
            assert s.worker_id == self.worker_id and not s.block_table


def _sort_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.sort_key
