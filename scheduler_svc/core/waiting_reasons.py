"""Reasons why a group does not run, in words for people.

Pure functions over the queue and worker states. They decide nothing: `admitting` decides which group starts.
"""

from collections.abc import Collection
from enum import Enum

from scheduler_svc.core import placement
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.handing_over import phases_of
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.starting import has_room_for, plan_start
from scheduler_svc.core.swapping import has_room_to_swap_in
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState


class WaitingReason(Enum):
    """Reason; its value is the text that users read."""

    NO_WORKER = "a worker: none is connected"
    DRAINING = "a worker: all are draining"
    NO_LONGER_WORKER = "a worker with a longer context: prompt and output are longer than --max-model-len allows"
    NO_WIDER_WORKER = "a worker that runs more at once: it has more samples or beams than --max-num-seqs allows"
    NO_LARGER_WORKER = "a worker with more KV memory: no connected one can hold it"
    SEAT = "a free seat: as many requests run as may run at once"
    BLOCKS = "KV blocks"
    EARLIER_REQUESTS = "earlier requests"
    DEADLINE = "its deadline: it cannot be met any more"
    TRIAL = "its trial: a step with it failed, so it runs apart from others"
    STEP_IN_FLIGHT = "the result of its last step"
    FETCH = "its KV blocks: they are on their way from another worker"
    NEXT_STEP = "the next step"
    RESUMPTION = "Resume"


def waiting_reason(
    group: SequenceGroup, queue: WaitingQueue, workers: Collection[WorkerState], limits: WorkerLimits
) -> WaitingReason | None:
    """Return what the group waits for; None if it runs or has ended."""
    if group.state in (GroupState.RUNNING, GroupState.ENDED):
        return None
    if group.state is GroupState.PAUSED:
        return WaitingReason.RESUMPTION
    if not workers:
        return WaitingReason.NO_WORKER
    if group.state is GroupState.FETCHING:
        return WaitingReason.FETCH
    if group in queue:
        return _reason_in_queue(group, queue, workers, limits)
    worker = next((each for each in workers if each.worker_id == group.worker_id), None)
    if worker is None or group.state is not GroupState.SWAPPED:
        return WaitingReason.STEP_IN_FLIGHT
    return _reason_swapped(group, worker, limits)


def _reason_in_queue(
    group: SequenceGroup, queue: WaitingQueue, workers: Collection[WorkerState], limits: WorkerLimits
) -> WaitingReason:
    takers = [worker for worker in workers if placement.may_take(worker, group, workers, limits)]
    if not takers:
        return _reason_without_taker(group, workers, limits)
    if group.state is GroupState.QUARANTINED:
        return WaitingReason.TRIAL
    if group.state is GroupState.DEFERRED:
        return WaitingReason.DEADLINE
    phase = queue.phase_of(group)
    if queue.peek({phase}) is not group:
        return WaitingReason.EARLIER_REQUESTS
    takers = [worker for worker in takers if phase in phases_of(worker, workers)] or takers
    with_seats = [worker for worker in takers if placement.has_free_seats(worker, group, limits)]
    if not with_seats:
        return WaitingReason.SEAT
    open_to_it = [worker for worker in with_seats if placement.goes_before_swapped(worker, group, limits)]
    if not open_to_it:
        return WaitingReason.EARLIER_REQUESTS
    if any(has_room_for(worker, plan_start(worker, group)) for worker in open_to_it):
        return WaitingReason.NEXT_STEP
    return WaitingReason.BLOCKS


def _reason_without_taker(
    group: SequenceGroup, workers: Collection[WorkerState], limits: WorkerLimits
) -> WaitingReason:
    long_enough = [worker for worker in workers if placement.is_long_enough(worker, group)]
    if not long_enough:
        return WaitingReason.NO_LONGER_WORKER
    wide_enough = [worker for worker in long_enough if placement.is_wide_enough(worker, group, limits)]
    if not wide_enough:
        return WaitingReason.NO_WIDER_WORKER
    can_be_held = any(placement.can_ever_hold(worker, group, limits) for worker in wide_enough)
    return WaitingReason.DRAINING if can_be_held else WaitingReason.NO_LARGER_WORKER


def _reason_swapped(group: SequenceGroup, worker: WorkerState, limits: WorkerLimits) -> WaitingReason:
    if worker.swapped and worker.swapped[0] is not group:
        return WaitingReason.EARLIER_REQUESTS
    if not placement.has_free_seats(worker, group, limits):
        return WaitingReason.SEAT
    return WaitingReason.NEXT_STEP if has_room_to_swap_in(worker, group, 0) else WaitingReason.BLOCKS
