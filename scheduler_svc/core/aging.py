"""Aging of waiting groups: a group that a better priority class overtakes for too long is moved ahead of all.

Pure: the caller tells the time. Looks at the queue now and then, not at each step.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from itertools import chain

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.ordering import OrderPolicy, running_rank, waiting_rank
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.swapping import insert_swapped
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState

PROMOTED_PRIORITY = -(2**31) - 1  # before every priority that a client can ask for
STARTS_PER_PROMOTION = 8  # so that the better class keeps most of its advantage
LOOKS_PER_PATIENCE = 16


class Aging:
    """Promoter of groups, for good, so that a promoted group is not preempted for those that had overtaken it."""

    def __init__(self, policy: OrderPolicy, patience_s: float) -> None:
        self._policy: OrderPolicy = policy
        self._patience_s = patience_s
        self._look_s: float | None = None  # when to look next
        self._num_served = 0  # from the queue, at the last look
        self._num_starts = 0  # groups served since the last promotion

    def age(self, queue: WaitingQueue, workers: Iterable[WorkerState], now_s: float) -> None:
        """Promote groups that have waited for `patience_s` while a better class waits or runs, the longest first.

        One for every 8 that the queue has served, and none while a promoted one still waits. The first in order of
        the class is promoted, so that no group is overtaken within its class.
        """
        if self._look_s is not None and now_s < self._look_s:
            return
        self._look_s = now_s + self._patience_s / LOOKS_PER_PATIENCE
        self._num_starts += queue.num_served - self._num_served
        self._num_served = queue.num_served
        workers = list(workers)
        waiting = [*queue.in_order(), *chain.from_iterable(worker.swapped for worker in workers)]
        for group in waiting:
            if group.waits_since_s is None:
                group.waits_since_s = now_s
        num_promotions = self._num_starts // STARTS_PER_PROMOTION
        self._num_starts = min(self._num_starts, STARTS_PER_PROMOTION)
        overdue = self._overdue(waiting, workers, now_s)
        if num_promotions and overdue:
            self._num_starts = 0
            firsts = _in_order_by_class(self._policy, waiting)
            for _, priority in sorted(overdue)[:num_promotions]:
                self._promote(firsts[priority].popleft(), queue, workers)

    def _overdue(
        self, waiting: list[SequenceGroup], workers: list[WorkerState], now_s: float
    ) -> list[tuple[float, int]]:
        """Return (waiting since, class) of each group that a better class, waiting or running, has overtaken."""
        if any(group.priority == PROMOTED_PRIORITY for group in waiting):
            return []
        running = [sequence.group for worker in workers for sequence in worker.running]
        classes = {group.priority for group in [*waiting, *running]} - {PROMOTED_PRIORITY}
        best = min(classes, default=PROMOTED_PRIORITY)
        since_s = now_s - self._patience_s
        return [
            (group.waits_since_s, group.priority)
            for group in waiting
            if group.priority > best and group.waits_since_s is not None and group.waits_since_s <= since_s
        ]

    def _promote(self, group: SequenceGroup, queue: WaitingQueue, workers: list[WorkerState]) -> None:
        group.priority = PROMOTED_PRIORITY
        group.order = running_rank(self._policy, group)
        if group.state is not GroupState.SWAPPED:
            queue.reorder(group)
            return
        worker = next(each for each in workers if each.worker_id == group.worker_id)
        worker.take_out(group)
        insert_swapped(worker, group)


def _in_order_by_class(policy: OrderPolicy, waiting: Iterable[SequenceGroup]) -> dict[int, deque[SequenceGroup]]:
    firsts: dict[int, deque[SequenceGroup]] = defaultdict(deque)
    for group in sorted(waiting, key=partial(waiting_rank, policy)):
        firsts[group.priority].append(group)
    return firsts
