"""Handing over: a group that has its prompt and a token leaves a worker whose role is to compute prompts.

The worker that starts it again fetches its blocks. A role that no worker has left is taken by the others. Functions
over worker states; the caller puts the groups into the queue.
"""

from collections.abc import Iterable
from itertools import chain

from scheduler_svc.core.phases import BOTH_PHASES, Phase
from scheduler_svc.core.placement import WorkerLimits, can_ever_hold, num_free_seats
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState

# Of groups that wait to go on so many at most are counted, less one: while more wait, none is handed over.
MOST_WAITING = 32


def phases_of(worker: WorkerState, workers: Iterable[WorkerState]) -> frozenset[Phase]:
    """Return the phases that the worker serves: those of its role, and those that no other serving worker has."""
    if worker.role == "mixed":
        return BOTH_PHASES
    others = {other.role for other in workers if other is not worker and not other.is_draining}
    return frozenset(p for p in Phase if p.value == worker.role or others.isdisjoint({p.value, "mixed"}))


def groups_to_hand_over(
    worker: WorkerState, workers: Iterable[WorkerState], queue: WaitingQueue, limits: WorkerLimits
) -> list[SequenceGroup]:
    """Return the running groups that have computed their prompts here, and that another worker is to go on with.

    In order, while workers have room for them and for those that wait or are on their way already: one that had to wait
    would lose its blocks here to the next prompts, and compute them again. Until there is room it decodes here.
    """
    workers = list(workers)
    takers = [other for other in workers if _is_taker(other, worker)] if worker.role == "prefill" else []
    rooms = [_Room(taker, limits) for taker in takers]
    if not any(room.is_open for room in rooms):
        return []
    waiting = list(queue.first(MOST_WAITING, {Phase.DECODE}))
    if len(waiting) == MOST_WAITING:
        return []
    for group in chain(_on_their_way(workers, queue), waiting):
        _take(rooms, group)
    leaving = []
    for group in dict.fromkeys(sequence.group for sequence in worker.running):
        if not any(room.is_open for room in rooms):
            break
        if group.cohort is None and _may_leave(worker, group) and _take(rooms, group):
            leaving.append(group)
    return leaving


class _Room:
    """Room for more groups on a worker, less what `take` has counted."""

    def __init__(self, worker: WorkerState, limits: WorkerLimits) -> None:
        self._worker = worker
        self._limits = limits
        self._num_seats = num_free_seats(worker, limits)
        self._num_blocks = worker.blocks.num_available_blocks - worker.num_watermark_blocks
        self._num_fetchable = worker.num_fetchable_blocks
        self.is_open = worker.trial is None and not worker.swapped and self._num_seats > 0

    def is_for(self, group: SequenceGroup) -> bool:
        """True if it is open, and the group may grow there to its end."""
        return self.is_open and can_ever_hold(self._worker, group, self._limits)

    def take(self, group: SequenceGroup) -> bool:
        """Count a group, if there is room for its present tokens, and to fetch its blocks if it has not begun to."""
        num_blocks = num_fetched = _num_blocks(group, self._worker)
        if num_blocks > self._num_blocks or num_blocks > self._num_fetchable:
            cached = self._worker.blocks.lookup(group.live[0].block_hashes)
            num_fetched -= len(cached)
            num_blocks = num_fetched + self._worker.blocks.num_unreferenced(cached)
        num_fetched = 0 if group.fetch_id else min(num_fetched, self._worker.max_fetched_blocks)
        num_seats = len(group.unfinished)
        if num_seats > self._num_seats or num_blocks > self._num_blocks or num_fetched > self._num_fetchable:
            return False
        self._num_seats -= num_seats
        self._num_blocks -= num_blocks
        self._num_fetchable -= num_fetched
        self.is_open = self._num_seats > 0
        return True


def _take(rooms: list[_Room], group: SequenceGroup) -> bool:
    """Count a group where there is room for it. Where there will be, but is not yet, none is left for those behind."""
    rooms = [room for room in rooms if room.is_for(group)]
    if any(room.take(group) for room in rooms):
        return True
    for room in rooms:
        room.is_open = False
    return False


def _num_blocks(group: SequenceGroup, worker: WorkerState) -> int:
    """Return the blocks of its present tokens, as if its members shared no more than the prompt."""
    num_shared = group.sequences[0].num_prompt_tokens // worker.block_size
    return num_shared + sum(worker.num_blocks_for(sequence.num_tokens) - num_shared for sequence in group.live)


def _on_their_way(workers: Iterable[WorkerState], queue: WaitingQueue) -> Iterable[SequenceGroup]:
    """Groups that have left a worker for another, and have not started there."""
    parked = (group for worker in workers if worker.role == "prefill" for group in worker.parked)
    return chain(parked, queue.fetching())


def _is_taker(other: WorkerState, worker: WorkerState) -> bool:
    is_serving = other is not worker and other.role != "prefill" and not other.is_draining
    return is_serving and other.can_fetch_from(worker)


def _may_leave(worker: WorkerState, group: SequenceGroup) -> bool:
    return all(_has_its_prompt(worker, sequence) for sequence in group.live)


def _has_its_prompt(worker: WorkerState, sequence: Sequence) -> bool:
    """True if it has its prompt computed and a token, perhaps in flight, goes on, and can be found by its blocks."""
    num_tokens = len(sequence.token_ids) if sequence.group.awaits_host else sequence.num_tokens
    is_done = sequence.has_caught_up and num_tokens > sequence.num_prompt_tokens
    return is_done and not sequence.has_all_tokens and sequence.use_prefix_cache and worker.enable_prefix_cache
