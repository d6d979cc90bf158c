"""Forecast of free seats: how far each running group is, and the most that it may output. Changes nothing."""

from collections.abc import Iterable
from typing import NamedTuple

from scheduler_svc.core.draining import serving_workers
from scheduler_svc.core.placement import WorkerLimits, num_free_seats
from scheduler_svc.core.worker_state import WorkerState


class RunningGroup(NamedTuple):
    """Progress of a group, in output tokens of its first running member; the others are as far, or nearly."""

    num_output_tokens: int  # those in flight included
    max_tokens: int


class SeatUse(NamedTuple):
    """Seats of one worker."""

    worker_id: str
    num_free: int  # that a new group may have; below 0 if preempted groups wait at the worker itself
    groups: list[RunningGroup]


def seat_use(workers: Iterable[WorkerState], limits: WorkerLimits) -> list[SeatUse]:
    """Return the use of seats on each worker that new groups are given to."""
    return [
        SeatUse(
            worker.worker_id,
            num_free_seats(worker, limits) - len(worker.parked) - len(worker.swapped),
            _running_groups(worker),
        )
        for worker in serving_workers(workers)
    ]


def _running_groups(worker: WorkerState) -> list[RunningGroup]:
    groups: list[RunningGroup] = []
    last = None
    for sequence in worker.running:  # the members of a group stand together
        if sequence.group is not last:
            last = sequence.group
            groups.append(RunningGroup(sequence.num_tokens - sequence.num_prompt_tokens, sequence.max_tokens))
    return groups
