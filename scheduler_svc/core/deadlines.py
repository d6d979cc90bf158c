"""Deadlines that cannot be met: pure functions of a group's deadline and the measured speed of prefill."""

from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus


def quickest_prefill(costs: PreemptionCosts, max_num_batched_tokens: int) -> float:
    """Return the tokens per second at best: as if a full step took no longer than the measured ones.

    Small steps show the least that a step costs, not how many tokens it could have computed in that time.
    """
    seen = costs.prefill_step_tokens or max_num_batched_tokens
    return costs.prefill_tokens_per_s * max(1.0, max_num_batched_tokens / seen)


def is_hopeless(group: SequenceGroup, num_tokens: int, now_s: float, prefill_tokens_per_s: float | None) -> bool:
    """True if the group has never run, and its deadline passes before `num_tokens` of it could be computed.

    While the speed is unknown only a deadline that has passed counts. A group that has run is never hopeless.
    """
    if group.deadline_s is None or any(s.status is not SequenceStatus.WAITING for s in group.live):
        return False
    prefill_s = num_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
    return now_s + prefill_s > group.deadline_s
