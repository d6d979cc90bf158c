"""A second account of who holds which block, kept from plans and tables alone, and held against the scheduler's own.

It is told of every plan made, done or undone, and looks at the sequences after every call: it never asks the
scheduler who holds what, but only how many references a block has. It knows nothing of what blocks contain.
"""

from collections import Counter, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.worker_state import WorkerState


@dataclass(slots=True)
class _StepInFlight:
    """Blocks that a step holds until it is done."""

    members: set[Sequence]  # with a row or a sample, until they leave the worker
    copy_sources: set[int]
    deferred: list[int] = field(default_factory=list)  # tables whose owners left while it was the last to use them


@dataclass(frozen=True, slots=True)
class _Holding:
    """Blocks that a sequence had when it was last checked."""

    worker_id: str
    num_preemptions: int
    blocks: list[int]


@dataclass(slots=True)
class _Books:
    """Books of one worker."""

    in_flight: deque[_StepInFlight] = field(default_factory=deque)
    pins: dict[str, list[int]] = field(default_factory=dict)
    hashes: list[bytes | None] = field(default_factory=list)  # of all blocks, before the plan that is being made


class Ledger:
    """Call `look` after whatever may change a sequence, and what fits before it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._books: dict[str, _Books] = {}
        self._held: dict[Sequence, _Holding] = {}

    def add_worker(self, worker_id: str) -> None:
        self._books[worker_id] = _Books()

    def remove_worker(self, worker_id: str) -> None:
        del self._books[worker_id]

    def pin(self, worker_id: str, name: str, blocks: list[int]) -> None:
        self._books[worker_id].pins[name] = blocks

    def unpin(self, worker_id: str, name: str) -> None:
        self._books[worker_id].pins.pop(name, None)

    def before_plan(self, worker_id: str) -> None:
        self._books[worker_id].hashes = list(self._worker(worker_id).blocks._hashes)

    def is_cached(self, worker_id: str, block: int) -> bool:
        return self._worker(worker_id).blocks.ref_count(block) == 0

    def num_evicted(self, worker_id: str) -> int:
        """Count the blocks that since `before_plan` cannot be found any more, or only under another hash."""
        before, after = self._books[worker_id].hashes, self._worker(worker_id).blocks._hashes
        return sum(old is not None and old != new for old, new in zip(before, after, strict=True))

    def planned(self, plan: StepPlan, sequences: Iterable[Sequence]) -> None:
        sequences = list(sequences)
        self.look(sequences)  # who was preempted is not in the new step, or is in it in another stay
        members = {*plan.sequences, *plan.sampled_sequences}
        self._books[plan.worker_id].in_flight.append(_StepInFlight(members, set(plan.copies[::2])))
        self._check_writes(plan, [s for s in sequences if s.worker_id == plan.worker_id])

    def done(self, worker_id: str) -> None:
        self._books[worker_id].in_flight.popleft()

    def undone(self, worker_id: str) -> None:
        self._books[worker_id].in_flight.clear()

    def look(self, sequences: Iterable[Sequence]) -> None:
        """See who has left, and what everybody has now."""
        sequences = list(sequences)
        for sequence in sequences:
            held = self._held.pop(sequence, None)
            if held is not None and not _is_still_there(sequence, held):
                self._defer(sequence, held)
            assert not (sequence.is_finished and (_blocks_of(sequence) or sequence.host_blocks))
            if sequence.status is SequenceStatus.RUNNING and sequence.worker_id is not None:
                self._held[sequence] = _Holding(sequence.worker_id, sequence.num_preemptions, _blocks_of(sequence))

    def check(self, sequences: Iterable[Sequence]) -> None:
        """The reference count of every block is the number of its holders, on the device and on the host."""
        sequences = list(sequences)
        for worker_id, books in self._books.items():
            here = [s for s in sequences if s.worker_id == worker_id]
            worker = self._worker(worker_id)
            holders = Counter(block for s in here for block in _blocks_of(s))
            for blocks in [*books.pins.values(), *(step.deferred for step in books.in_flight)]:
                holders.update(blocks)
            for step in books.in_flight:
                holders.update(step.copy_sources)
            for block in range(worker.blocks.num_blocks):
                count = worker.blocks.ref_count(block)
                assert count == holders[block], f"{worker_id}: block {block} is counted {count}, held {holders[block]}"
            assert worker.blocks.num_used_blocks == len(+holders)
            self._check_host(worker, here)

    def _check_host(self, worker: WorkerState, here: list[Sequence]) -> None:
        holders = Counter(block for s in here for block in s.host_blocks)
        if worker.host is None:
            assert not holders
            return
        for block in range(worker.host.num_blocks):
            assert worker.host.ref_count(block) == holders[block], f"host block {block} leaks or is lost"

    def _check_writes(self, plan: StepPlan, here: list[Sequence]) -> None:
        """Check that each block written in the plan has one writer; other holders only read it, once it is full."""
        worker = self._worker(plan.worker_id)
        known = self._known(plan)
        writes = _writes(plan, worker.block_size)
        for block, (writer, start, end) in writes.items():
            is_new = writer.first_step_id == plan.step_id  # the block may have been evicted for it, and found again
            assert block not in known or is_new, f"block {block} is in the prefix cache, and {writer.seq_id} writes it"
            last_of_block = (writer.block_table.index(block) + 1) * worker.block_size
            if worker.blocks.is_findable(block):
                assert end >= last_of_block, f"block {block} can be found before it is full"
            for other in here:
                if other is writer or other.source is not None:  # who has a source does not read before it is computed
                    continue
                if block in other.block_table:
                    assert end >= last_of_block <= _first_written(plan, other), f"block {block} has two writers"
                if block == other.fork_tail and other not in plan.sampled_sequences:  # else it is forked here
                    assert start >= other.num_computed_tokens, f"block {block} is written where it is yet to be copied"
        self._check_copies(plan, known, here, writes.keys())

    def _known(self, plan: StepPlan) -> set[int]:
        """Blocks that could be found before the plan and were not evicted for it."""
        before, after = self._books[plan.worker_id].hashes, self._worker(plan.worker_id).blocks._hashes
        return {
            block for block, block_hash in enumerate(before) if block_hash is not None and block_hash == after[block]
        }

    def _check_copies(self, plan: StepPlan, known: set[int], here: list[Sequence], written: Set[int]) -> None:
        """Check that who holds a copy had it made. Members that start with it share the block that its writer fills."""
        forked = set(plan.sampled_sequences) - set(plan.sequences)  # from what the plan computes
        own = [s for s in here if s.source is None and s not in forked]
        owners = Counter(block for s in own for block in s.block_table)
        starters = Counter(block for s in own if s.first_step_id == plan.step_id for block in s.block_table)
        for destination in plan.copies[1::2]:
            is_new = destination in starters  # the block may have been evicted for it, and found again
            is_shared = destination in written and owners[destination] == starters[destination] > 0
            assert owners[destination] == 1 or is_shared, f"block {destination} is copied over"
            assert is_new or destination not in known, f"block {destination} is in the prefix cache, and copied over"
        destinations = set(plan.copies[1::2])
        assert len(destinations) == len(plan.copies) // 2, "a block is copied over twice"
        assert all(len(destinations.intersection(s.block_table)) <= 1 for s in own), "a sequence copies several blocks"

    def _defer(self, sequence: Sequence, held: _Holding) -> None:
        """Leave its blocks with the last step in flight that contains it, if there is one."""
        steps = self._books[held.worker_id].in_flight if held.worker_id in self._books else deque[_StepInFlight]()
        last = next((step for step in reversed(steps) if sequence in step.members), None)
        if last is not None:
            last.deferred += held.blocks
        for step in steps:
            step.members.discard(sequence)

    def _worker(self, worker_id: str) -> WorkerState:
        return self._scheduler._places.workers[worker_id]


def _is_still_there(sequence: Sequence, held: _Holding) -> bool:
    return (
        sequence.status is SequenceStatus.RUNNING
        and sequence.worker_id == held.worker_id
        and sequence.num_preemptions == held.num_preemptions
    )


def _blocks_of(sequence: Sequence) -> list[int]:
    tail = [] if sequence.fork_tail is None else [sequence.fork_tail]
    return [*sequence.block_table, *tail]


def _writes(plan: StepPlan, block_size: int) -> dict[int, tuple[Sequence, int, int]]:
    """Block -> who writes it, from where and to where in its tokens. Fails where a block has two writers."""
    writes: dict[int, tuple[Sequence, int, int]] = {}
    for sequence, start, num_tokens in zip(plan.sequences, plan.positions, plan.num_tokens, strict=True):
        end = start + num_tokens
        for block in sequence.block_table[start // block_size : -(-end // block_size)]:
            assert block not in writes, f"block {block} is written by two rows"
            writes[block] = (sequence, start, end)
    return writes


def _first_written(plan: StepPlan, sequence: Sequence) -> int:
    """The first position that it writes in the plan, or after it."""
    if sequence in plan.sequences:
        return plan.positions[plan.sequences.index(sequence)]
    return sequence.num_computed_tokens
