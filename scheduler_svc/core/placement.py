"""Which worker takes the head of the waiting queue: most cached prefix, then most available blocks.

Pure functions over worker states. A worker asks, while its own step is planned, whether the head is its to take;
if another suits better the head is left to that one's next plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.worker_state import WorkerState

# A worker that stands still must not hold the queue for good: after so many plans the next best takes the head.
MAX_TIMES_LEFT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What a worker may have at once."""

    max_num_seqs: int  # running
    pipeline_depth: int  # steps in flight


def can_ever_hold(worker: WorkerState, sequence: Sequence) -> bool:
    return sequence.worst_case_tokens <= worker.capacity_tokens


def has_free_slot(worker: WorkerState, limits: WorkerLimits) -> bool:
    """Nothing new while a sequence preempted here still waits for tokens that are in flight."""
    return bool(worker.free_slots) and len(worker.running) < limits.max_num_seqs and not worker.parked


def claim(
    sequence: Sequence,
    worker: WorkerState,
    others: Iterable[WorkerState],
    limits: WorkerLimits,
    *,
    is_busy: bool,
) -> list[int] | None:
    """The cached prefix with which `worker`, which has a slot and tokens to spare, may start the sequence now.

    None: it has no room, or another worker suits better. `is_busy`: its plan has rows already, so it will be
    asked again soon and can afford to leave the sequence to a worker whose pipeline is full at the moment.
    """
    prefix = worker.find_prefix(sequence)
    if not can_ever_hold(worker, sequence) or not worker.has_room_for(sequence, prefix):
        return None
    if sequence.num_times_left >= MAX_TIMES_LEFT:
        return prefix
    for other in others:
        if other is not worker and _suits_better(other, worker, sequence, len(prefix), limits, is_busy):
            sequence.num_times_left += 1
            return None
    return prefix


def _suits_better(
    other: WorkerState,
    worker: WorkerState,
    sequence: Sequence,
    num_prefix_blocks: int,
    limits: WorkerLimits,
    is_busy: bool,
) -> bool:
    """A strict order, so two workers never leave a sequence to each other."""
    if not has_free_slot(other, limits) or not can_ever_hold(other, sequence):
        return False
    prefix = other.find_prefix(sequence)
    if len(prefix) < num_prefix_blocks:
        return False
    has_longer_prefix = len(prefix) > num_prefix_blocks
    if not has_longer_prefix and other.blocks.num_available_blocks <= worker.blocks.num_available_blocks:
        return False
    is_pipeline_full = len(other.in_flight) >= limits.pipeline_depth
    if is_pipeline_full and not (has_longer_prefix and is_busy):
        return False
    return other.has_room_for(sequence, prefix) and other.num_spare_tokens() > 0
