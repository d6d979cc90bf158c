"""Which worker takes the head of the waiting queue: most cached prefix, then most available blocks.

Pure functions over worker states. A worker asks, while its own step is planned, whether the head is its to take;
if another suits better the head is left to that one's next plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.starting import GroupStart, has_room_for, plan_start
from scheduler_svc.core.worker_state import WorkerState

# A worker that stands still must not hold the queue for good: after so many plans the next best takes the head.
MAX_TIMES_LEFT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What a worker may have at once."""

    max_num_seqs: int  # running
    pipeline_depth: int  # steps in flight


def can_ever_hold(worker: WorkerState, group: SequenceGroup, limits: WorkerLimits) -> bool:
    num_members = len(group.unfinished)
    longest = worker.max_model_len
    if longest is not None and any(sequence.worst_case_tokens > longest for sequence in group.unfinished):
        return False
    return (
        num_members <= min(worker.num_slots, limits.max_num_seqs)
        and group.worst_case_blocks(worker.block_size) <= worker.capacity_blocks
    )


def may_take(worker: WorkerState, group: SequenceGroup, workers: Iterable[WorkerState], limits: WorkerLimits) -> bool:
    """Whether it may start there at all. A worker that drains takes only what has run and can be nowhere else."""
    if not can_ever_hold(worker, group, limits):
        return False
    if not worker.is_draining:
        return True
    has_run = any(sequence.status is SequenceStatus.PREEMPTED for sequence in group.live)
    return has_run and not has_other_place(worker, group, workers, limits)


def has_other_place(
    worker: WorkerState, group: SequenceGroup, workers: Iterable[WorkerState], limits: WorkerLimits
) -> bool:
    """Whether another worker, which does not drain, could hold it."""
    others = (other for other in workers if other is not worker and not other.is_draining)
    return any(can_ever_hold(other, group, limits) for other in others)


def max_tokens_of_each(
    worker: WorkerState, limits: WorkerLimits, num_prompt_tokens: int, num_sequences: int, *, with_pins: bool = True
) -> int:
    """The longest prompt and output with which `num_sequences` of one prompt could be held together; 0 for none.

    They are held beside the pins there, or without `with_pins` as if there were none.
    """
    num_blocks = worker.capacity_blocks if with_pins else worker.capacity_blocks + worker.num_pinned_blocks
    if num_sequences > min(worker.num_slots, limits.max_num_seqs):
        return 0
    num_shared = num_prompt_tokens // worker.block_size
    num_own = max(0, num_blocks - num_shared) // num_sequences
    return min(num_shared + num_own, num_blocks) * worker.block_size


def num_free_slots(worker: WorkerState, limits: WorkerLimits) -> int:
    """Slots that groups may still take there."""
    return min(len(worker.free_slots), limits.max_num_seqs - worker.num_members)


def has_free_slots(worker: WorkerState, group: SequenceGroup, limits: WorkerLimits) -> bool:
    """Nothing new while a group preempted here still waits for tokens that are in flight."""
    return len(group.unfinished) <= num_free_slots(worker, limits) and not worker.parked


def goes_before_swapped(worker: WorkerState, group: SequenceGroup, limits: WorkerLimits) -> bool:
    """Whether it may start here although groups are swapped out here, of which the first in order waits to go on.

    That one is preempted: within a priority nothing new goes before it, and of what is preempted the first in order.
    """
    if not worker.swapped:
        return True
    first = worker.swapped[0]
    is_preempted = any(sequence.status is SequenceStatus.PREEMPTED for sequence in group.live)
    is_before = group.priority < first.priority or (is_preempted and group.order < first.order)
    return is_before and can_ever_hold(worker, group, limits)


def claim_start(
    group: SequenceGroup,
    worker: WorkerState,
    others: Iterable[WorkerState],
    limits: WorkerLimits,
    *,
    is_busy: bool,
) -> GroupStart | None:
    """The start with which `worker`, which has tokens to spare, may take the group now.

    None: it has no room, or another worker suits better. `is_busy`: its plan has rows already, so it will be
    asked again soon and can afford to leave the group to a worker whose pipeline is full at the moment.
    """
    if not has_free_slots(worker, group, limits) or not can_ever_hold(worker, group, limits):
        return None
    start = plan_start(worker, group)
    if not has_room_for(worker, start):
        return None
    if group.num_times_left >= MAX_TIMES_LEFT:
        return start
    for other in others:
        if other is not worker and _suits_better(other, worker, group, start.num_prefix_blocks, limits, is_busy):
            group.num_times_left += 1
            return None
    return start


def _suits_better(
    other: WorkerState,
    worker: WorkerState,
    group: SequenceGroup,
    num_prefix_blocks: int,
    limits: WorkerLimits,
    is_busy: bool,
) -> bool:
    """A strict order, so two workers never leave a group to each other."""
    if other.is_draining or other.trial is not None:
        return False
    if not has_free_slots(other, group, limits) or not can_ever_hold(other, group, limits):
        return False
    if not goes_before_swapped(other, group, limits):
        return False
    start = plan_start(other, group)
    if start.num_prefix_blocks < num_prefix_blocks:
        return False
    has_longer_prefix = start.num_prefix_blocks > num_prefix_blocks
    if not has_longer_prefix and other.blocks.num_available_blocks <= worker.blocks.num_available_blocks:
        return False
    is_pipeline_full = len(other.in_flight) >= limits.pipeline_depth
    if is_pipeline_full and not (has_longer_prefix and is_busy):
        return False
    return has_room_for(other, start) and other.num_spare_tokens() > 0
