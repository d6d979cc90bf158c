"""Handing over: a group that has its prompt and a token leaves a worker whose role is to compute prompts.

The worker that starts it again fetches its blocks. A role that no worker has left is taken by the others. Functions
over worker states; the caller puts the groups into the queue.
"""

from collections.abc import Iterable

from scheduler_svc.core.phases import BOTH_PHASES, Phase
from scheduler_svc.core.placement import WorkerLimits, can_ever_hold
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.worker_state import WorkerState


def phases_of(worker: WorkerState, workers: Iterable[WorkerState]) -> frozenset[Phase]:
    """Return the phases that the worker serves: those of its role, and those that no other serving worker has."""
    if worker.role == "mixed":
        return BOTH_PHASES
    others = {other.role for other in workers if other is not worker and not other.is_draining}
    return frozenset(p for p in Phase if p.value == worker.role or others.isdisjoint({p.value, "mixed"}))


def groups_to_hand_over(
    worker: WorkerState, workers: Iterable[WorkerState], limits: WorkerLimits
) -> list[SequenceGroup]:
    """Return the running groups that have computed their prompts here, and that another worker is to go on with."""
    takers = [other for other in workers if _is_taker(other, worker)] if worker.role == "prefill" else []
    if not takers:
        return []
    running = dict.fromkeys(sequence.group for sequence in worker.running)
    return [
        group
        for group in running
        if group.cohort is None
        and all(_may_leave(worker, sequence) for sequence in group.live)
        and any(can_ever_hold(taker, group, limits) for taker in takers)
    ]


def _is_taker(other: WorkerState, worker: WorkerState) -> bool:
    is_serving = other is not worker and other.role != "prefill" and not other.is_draining
    return is_serving and other.can_fetch_from(worker)


def _may_leave(worker: WorkerState, sequence: Sequence) -> bool:
    """True if it has its prompt computed and a token, perhaps in flight, goes on, and can be found by its blocks."""
    num_tokens = len(sequence.token_ids) if sequence.group.awaits_host else sequence.num_tokens
    is_done = sequence.has_caught_up and num_tokens > sequence.num_prompt_tokens
    return is_done and not sequence.has_all_tokens and sequence.use_prefix_cache and worker.enable_prefix_cache
