"""Start of groups in the step being planned: those swapped out on the worker, and the first in the queue, in order.

A group whose deadline cannot be met, by the measured speed of prefill, is not started.
"""

from collections.abc import Collection, Iterable, Sequence

from scheduler_svc.core import placement
from scheduler_svc.core.fetching import BlockFetches
from scheduler_svc.core.handing_over import phases_of
from scheduler_svc.core.phases import BOTH_PHASES, Phase
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.starting import GroupStart, count_prefix_hits, start_group
from scheduler_svc.core.step_rows import add_row, last_outsider, swap_or_preempt
from scheduler_svc.core.swapping import has_room_to_swap_in, swap_in
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import PlannedStep, WorkerState

# A worker for which the first groups in order are too large looks at so many of them for one that it may take.
MAX_PASSED_OVER = 32


class GroupStarter:
    """Starter of groups, from the queue that all workers share."""

    def __init__(self, queue: WaitingQueue, limits: WorkerLimits, fetches: BlockFetches) -> None:
        self._queue = queue
        self._limits = limits
        self._fetches = fetches

    def start_groups(
        self, worker: WorkerState, workers: Iterable[WorkerState], step: PlannedStep, budget: int, now_s: float
    ) -> None:
        """Start groups in order, up to the first that cannot be started here and now."""
        workers = list(workers)
        phases = phases_of(worker, workers)
        while budget > 0 and worker.free_seats and not worker.has_preempted:
            head = group = self._head(phases, workers, now_s)
            if head is not None and not placement.may_take(worker, head, workers, self._limits):
                group = self._first_for(worker, phases, workers, now_s)
            if worker.swapped and (group is None or not placement.goes_before_swapped(worker, group, self._limits)):
                group = worker.swapped[0]
            if group is None or any(sequence.has_all_tokens for sequence in group.live):
                return
            if group.swap_step is not None:
                if not self._restore(worker, step, group):
                    return
            else:
                start = self._claim(worker, workers, step, group, head)
                if start is None:
                    return
                if self._fetches.begin(worker, group):
                    continue
                self._queue.pop(group)
                start_group(worker, group, start, step)
                count_prefix_hits(worker, start)
            for sequence in group.live:
                if budget > 0:
                    budget -= add_row(worker, step, sequence, budget)

    def start_suspects(
        self, worker: WorkerState, workers: Iterable[WorkerState], step: PlannedStep, budget: int
    ) -> None:
        """Start the groups that wait for the trial there, in order. Groups without a part in it make room."""
        workers = list(workers)
        for group in self._queue.quarantined_in(worker.trial) if worker.trial is not None else ():
            if budget <= 0 or not placement.may_take(worker, group, workers, self._limits):
                continue
            while (start := placement.claim_start(group, worker, (), self._limits)) is None:
                last = last_outsider(worker)
                if last is None or worker.parked:
                    return
                swap_or_preempt(worker, step, last.group)
            self._queue.pop_quarantined(group)
            start_group(worker, group, start, step)
            count_prefix_hits(worker, start)
            for sequence in group.live:
                if budget > 0:
                    budget -= add_row(worker, step, sequence, budget)

    def _claim(
        self,
        worker: WorkerState,
        workers: list[WorkerState],
        step: PlannedStep,
        group: SequenceGroup,
        head: SequenceGroup | None,
    ) -> GroupStart | None:
        # A worker that has preempted itself idle leaves no group to others: they may not plan again.
        others = [] if step.preempted else self._serving(self._queue.phase_of(group), workers)
        if head is not None and head is not group:  # those that may take the head are to start it first
            others = [each for each in others if not placement.may_take(each, head, workers, self._limits)]
        is_busy = bool(step.plan.sequences)
        return placement.claim_start(group, worker, others, self._limits, is_busy=is_busy)

    def _restore(self, worker: WorkerState, step: PlannedStep, group: SequenceGroup) -> bool:
        if not placement.has_free_seats(worker, group, self._limits):
            return False
        if not has_room_to_swap_in(worker, group, step.num_starved):
            return False
        swap_in(worker, group, step)
        return True

    def _head(self, phases: Collection[Phase], workers: list[WorkerState], now_s: float) -> SequenceGroup | None:
        """Return the first group in these phases that a worker could hold, and in time. Defer those before it."""
        for phase in BOTH_PHASES.difference(phases):
            self._next_held(phase, workers)  # which leaves us those that none of that phase could hold
        while (group := self._queue.peek(phases)) is not None:
            if self._next_held(self._queue.phase_of(group), workers) is not group:
                continue
            if not is_too_late(group, workers, now_s):
                return group
            self._queue.defer_head(phases, is_late=True)
        return None

    def _first_for(
        self, worker: WorkerState, phases: Collection[Phase], workers: list[WorkerState], now_s: float
    ) -> SequenceGroup | None:
        """Return the first group that the worker may take, of those right behind a head that only others may.

        The head loses nothing by it.
        """
        for group in self._queue.first(MAX_PASSED_OVER, phases):
            if placement.may_take(worker, group, workers, self._limits) and not is_too_late(group, workers, now_s):
                return group
        return None

    def _next_held(self, phase: Phase, workers: list[WorkerState]) -> SequenceGroup | None:
        """Return the first group in a phase that a worker with this phase could hold.

        Those before it are left to the workers of the other phase, or deferred if no worker could hold them.
        """
        serving = self._serving(phase, workers)
        while (group := self._queue.peek({phase})) is not None:
            if self._can_be_held(group, serving, workers):
                return group
            if self._can_be_held(group, workers, workers):
                self._queue.change_phase(group)
            else:
                self._queue.defer_head({phase})
        return None

    def _serving(self, phase: Phase, workers: list[WorkerState]) -> list[WorkerState]:
        return [worker for worker in workers if phase in phases_of(worker, workers)]

    def _can_be_held(self, group: SequenceGroup, by: list[WorkerState], workers: list[WorkerState]) -> bool:
        return any(placement.may_take(worker, group, workers, self._limits) for worker in by)


def is_too_late(group: SequenceGroup, workers: Sequence[WorkerState], now_s: float) -> bool:
    """True if the deadline cannot be met even on the quickest worker, with the longest prefix that any has cached."""
    return bool(late_groups([group], workers, now_s))


def late_groups(groups: Iterable[SequenceGroup], workers: Sequence[WorkerState], now_s: float) -> list[SequenceGroup]:
    """Return those for which `is_too_late` is true. Of each with time to spare this looks at deadline and prompt."""
    rates = (_quickest_prefill(w.costs, w.max_num_batched_tokens) for w in workers if w.costs is not None)
    rate = max(rates, default=None)
    return [
        group
        for group in groups
        if group.deadline_s is not None
        and _is_hopeless(group, num_tokens := group.sequences[0].num_prompt_tokens, now_s, rate)
        and _is_hopeless(group, num_tokens - _num_cached(group, workers), now_s, rate)
    ]


def _num_cached(group: SequenceGroup, workers: Sequence[WorkerState]) -> int:
    """Return the most tokens of the group that any worker has cached."""
    return max((len(w.find_prefix(group.live[0])) * w.block_size for w in workers), default=0)


def _quickest_prefill(costs: PreemptionCosts, max_num_batched_tokens: int) -> float:
    """Return the tokens per second at best: as if a full step took no longer than the measured ones.

    Small steps show the least that a step costs, not how many tokens it could have computed in that time.
    """
    seen = costs.prefill_step_tokens or max_num_batched_tokens
    return costs.prefill_tokens_per_s * max(1.0, max_num_batched_tokens / seen)


def _is_hopeless(group: SequenceGroup, num_tokens: int, now_s: float, prefill_tokens_per_s: float | None) -> bool:
    """True if the group has never run, and its deadline passes before `num_tokens` of its prompt could be computed.

    While the speed is unknown only a deadline that has passed counts. A group that has run is never hopeless.
    """
    prefill_s = num_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
    if group.deadline_s is None or now_s + prefill_s <= group.deadline_s:
        return False
    return all(sequence.status is SequenceStatus.WAITING for sequence in group.live)
