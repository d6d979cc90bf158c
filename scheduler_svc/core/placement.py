"""Choice of the worker that takes the head of the waiting queue: most cached prefix unless it is much busier, then most
available blocks.

Pure functions over worker states. They are asked while the step of one worker is planned: if another worker suits
better, the head is left to the next plan of that one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.starting import GroupStart, has_room_for, plan_start
from scheduler_svc.core.worker_state import WorkerState

# A stalled worker must not block the queue: after so many plans the next best worker takes the head.
MAX_TIMES_LEFT = 4
# A worker that has a long beginning of the prompt is waited for longer, also by one that has nothing to do: each time
# another worker is asked counts, and they are asked whenever anything changes.
MAX_TIMES_WAITED = 64
# It is, if it has so many tokens more of the prefix than the steps in flight there compute: so long takes a short step.
WORTH_WAITING_TOKENS = 128
# A cached block of the prefix makes up for so many more blocks in use. If only the prefix counted, requests with a
# common one would all go to the worker that has it, and the others would have nothing to do until its memory is full.
PREFIX_WEIGHT = 8
# A worker with a full pipeline is waited for if it has so many times fewer blocks in use, the group's own included. If
# the next worker to plan always took the head, some would have nothing to do while others have most of the requests.
FAR_LESS_BUSY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of what a worker may have at once."""

    max_num_seqs: int  # running
    pipeline_depth: int  # steps in flight


def can_ever_hold(worker: WorkerState, group: SequenceGroup, limits: WorkerLimits) -> bool:
    return (
        is_long_enough(worker, group)
        and is_wide_enough(worker, group, limits)
        and group.worst_case_blocks(worker.block_size) <= worker.capacity_blocks
    )


def is_long_enough(worker: WorkerState, group: SequenceGroup) -> bool:
    """True if the worker takes sequences as long as those of the group may become."""
    longest = worker.max_model_len
    return longest is None or all(sequence.worst_case_tokens <= longest for sequence in group.unfinished)


def is_wide_enough(worker: WorkerState, group: SequenceGroup, limits: WorkerLimits) -> bool:
    """True if all sequences of the group may run at once on the worker."""
    return len(group.unfinished) <= min(worker.num_seats, limits.max_num_seqs)


def may_take(worker: WorkerState, group: SequenceGroup, workers: Iterable[WorkerState], limits: WorkerLimits) -> bool:
    """True if the group may start there. A draining worker takes only groups that have run and fit nowhere else."""
    if not can_ever_hold(worker, group, limits):
        return False
    if not worker.is_draining:
        return True
    return group.is_preempted and not has_other_place(worker, group, workers, limits)


def has_other_place(
    worker: WorkerState, group: SequenceGroup, workers: Iterable[WorkerState], limits: WorkerLimits
) -> bool:
    """True if another worker, which does not drain, could hold the group."""
    others = (other for other in workers if other is not worker and not other.is_draining)
    return any(can_ever_hold(other, group, limits) for other in others)


def max_tokens_of_each(
    worker: WorkerState, limits: WorkerLimits, num_prompt_tokens: int, num_sequences: int, *, with_pins: bool = True
) -> int:
    """Return the most tokens, prompt and output, that each of `num_sequences` of one prompt could have; 0 for none.

    Without `with_pins`: as if no block were pinned there.
    """
    num_blocks = worker.capacity_blocks if with_pins else worker.capacity_blocks + worker.num_pinned_blocks
    if num_sequences > min(worker.num_seats, limits.max_num_seqs):
        return 0
    num_shared = num_prompt_tokens // worker.block_size
    num_own = (num_blocks - num_shared) // num_sequences
    return min(num_shared + num_own, num_blocks) * worker.block_size  # all blocks if the prompt alone needs more


def longest_prompt(worker: WorkerState, limits: WorkerLimits, num_sequences: int) -> int:
    """Return the longest prompt behind which each of `num_sequences` could have a token; 0 for none."""
    if num_sequences > min(worker.num_seats, limits.max_num_seqs):
        return 0
    num_shared = worker.capacity_blocks - num_sequences  # and each has a block of its own, which ends with its token
    return max(0, (num_shared + 1) * worker.block_size - 1)


def most_sequences(worker: WorkerState, limits: WorkerLimits) -> int:
    """Return the most sequences that a prompt of one token could have there."""
    num_blocks = worker.capacity_blocks if worker.block_size > 1 else worker.capacity_blocks - 1  # it fills one
    return max(0, min(limits.max_num_seqs, worker.num_seats, num_blocks))


def num_free_seats(worker: WorkerState, limits: WorkerLimits) -> int:
    """Count the seats that groups may still take there."""
    return min(len(worker.free_seats), limits.max_num_seqs - worker.num_members)


def has_free_seats(worker: WorkerState, group: SequenceGroup, limits: WorkerLimits) -> bool:
    """True if there is a seat for each member, and no group preempted here still waits for tokens in flight."""
    return len(group.unfinished) <= num_free_seats(worker, limits) and not worker.has_preempted


def goes_before_swapped(worker: WorkerState, group: SequenceGroup, limits: WorkerLimits) -> bool:
    """True if the group may start here before the first of the groups that are swapped out here.

    Within a priority no new group goes before that one, and a preempted group only if it is earlier in order.
    """
    if not worker.swapped:
        return True
    first = worker.swapped[0]
    is_before = group.priority < first.priority or (group.is_preempted and group.order < first.order)
    return is_before and can_ever_hold(worker, group, limits)


def claim_start(
    group: SequenceGroup,
    worker: WorkerState,
    others: Iterable[WorkerState],
    limits: WorkerLimits,
    *,
    is_busy: bool = False,
) -> GroupStart | None:
    """Return the start with which `worker`, which has tokens to spare, may take the group now.

    None: it has no room, or another worker suits better. A worker whose pipeline is full at the moment does if it saves
    more than the wait costs. `is_busy`: this one's plan has rows already, so it plans again soon, and can leave the
    group to such a worker also if that has any more of its prefix, or far less to do.
    """
    if not has_free_seats(worker, group, limits) or not can_ever_hold(worker, group, limits):
        return None
    start = plan_start(worker, group)
    if not has_room_for(worker, start):
        return None
    if group.num_times_left >= MAX_TIMES_WAITED:
        return start
    first = group.live[0]
    for other in others:
        if other is worker:
            continue
        num_more = len(other.find_prefix(first)) - start.num_prefix_blocks
        if not _suits_better(other, worker, group, num_more, limits, is_busy):
            continue
        if group.num_times_left < MAX_TIMES_LEFT or _is_worth_waiting(other, worker, num_more):
            group.num_times_left += 1
            return None
    return start


def _suits_better(
    other: WorkerState,
    worker: WorkerState,
    group: SequenceGroup,
    num_more: int,
    limits: WorkerLimits,
    is_busy: bool,
) -> bool:
    """True if `other`, which has so many blocks of the prefix more than `worker`, should take the group.

    The order is strict, so two workers never leave a group to each other.
    """
    if other.is_draining or other.trial is not None:
        return False
    if num_more and PREFIX_WEIGHT * num_more <= _num_blocks_in_use(other) - _num_blocks_in_use(worker):
        return False
    if not num_more and other.blocks.num_available_blocks <= worker.blocks.num_available_blocks:
        return False
    is_pipeline_full = len(other.in_flight) >= limits.pipeline_depth
    # Most often it is, and nothing speaks for a wait even if the group took no block there: so this is asked first.
    if is_pipeline_full and not _is_waited_for(other, worker, num_more, 0, is_busy):
        return False
    if not has_free_seats(other, group, limits) or not can_ever_hold(other, group, limits):
        return False
    if not goes_before_swapped(other, group, limits):
        return False
    start = plan_start(other, group)
    if is_pipeline_full and not _is_waited_for(other, worker, num_more, start.num_new_blocks, is_busy):
        return False
    return has_room_for(other, start) and other.has_spare_tokens()


def _is_waited_for(other: WorkerState, worker: WorkerState, num_more: int, num_new_blocks: int, is_busy: bool) -> bool:
    """True if the group waits for `other`, whose pipeline is full, and where it takes so many new blocks."""
    if is_busy and (num_more > 0 or _is_far_less_busy(other, worker, num_new_blocks)):
        return True
    return _is_worth_waiting(other, worker, num_more)


def _is_worth_waiting(other: WorkerState, worker: WorkerState, num_more: int) -> bool:
    """True if its `num_more` blocks of the prefix save more than the steps in flight there compute.

    Not if `worker` could fetch them: then it need neither wait nor compute.
    """
    if worker.can_fetch_from(other):
        return False
    num_worth = num_more * other.block_size - WORTH_WAITING_TOKENS
    return num_worth >= 0 and num_worth >= sum(sum(step.plan.num_tokens) for step in other.in_flight)


def _is_far_less_busy(other: WorkerState, worker: WorkerState, num_new_blocks: int) -> bool:
    """True if `other` would be so also with that many blocks more in use."""
    return FAR_LESS_BUSY * (_num_blocks_in_use(other) + num_new_blocks) <= _num_blocks_in_use(worker)


def _num_blocks_in_use(worker: WorkerState) -> int:
    """Number of blocks of the sequences that run there."""
    return worker.blocks.num_used_blocks - worker.num_pinned_blocks
