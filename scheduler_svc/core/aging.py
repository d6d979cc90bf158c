"""Keeps a flood of a better priority class from starving the others: who is overtaken for long is moved ahead of all.

Pure: it is told the time. It looks at those that wait now and then, not at each step.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import chain

from scheduler_svc.core.ordering import OrderPolicy, running_rank
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.swapping import insert_swapped
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState

PROMOTED_PRIORITY = -(2**31) - 1  # before all that can be asked for
STARTS_PER_PROMOTION = 8  # so that a class keeps most of what it is before others for
LOOKS_PER_PATIENCE = 16


class Aging:
    """Promotes a group for good, so that it is not preempted for those that it was overtaken by."""

    def __init__(self, policy: OrderPolicy, patience_s: float) -> None:
        self._policy: OrderPolicy = policy
        self._patience_s = patience_s
        self._look_s: float | None = None  # when to look next
        self._num_served = 0  # from the queue, at the last look
        self._num_starts = 0  # of those, on the way to the next promotion

    def age(self, queue: WaitingQueue, workers: Iterable[WorkerState], now_s: float) -> None:
        """Promote who waited `patience_s` ago and waits (again) beside a better class, the longest first.

        One for every 8 that the queue has served, and none while one that was promoted still waits. Of its class the
        first in order goes, so that within a class nobody is overtaken.
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
            firsts = _in_order_by_class(waiting)
            for _, priority in sorted(overdue)[:num_promotions]:
                self._promote(firsts[priority].popleft(), queue, workers)

    def _overdue(
        self, waiting: list[SequenceGroup], workers: list[WorkerState], now_s: float
    ) -> list[tuple[float, int]]:
        """Since when they wait, and their classes: of those that a better class, waiting or running, has overtaken."""
        if any(group.priority == PROMOTED_PRIORITY for group in waiting):
            return []
        running = (sequence.group for worker in workers for sequence in worker.running)
        classes = {group.priority for group in chain(waiting, running)} - {PROMOTED_PRIORITY}
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
        for worker in workers:
            if group in worker.swapped:
                worker.swapped.remove(group)
                insert_swapped(worker, group)
                return
        queue.reorder(group)


def _in_order_by_class(waiting: Iterable[SequenceGroup]) -> dict[int, deque[SequenceGroup]]:
    firsts: dict[int, deque[SequenceGroup]] = defaultdict(deque)
    for group in sorted(waiting, key=lambda each: each.order):
        firsts[group.priority].append(group)
    return firsts
