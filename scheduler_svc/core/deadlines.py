"""Whether work is still worth beginning: pure functions of a group's deadline and what is known of speed."""

from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus


def quickest_prefill(costs: PreemptionCosts, max_num_batched_tokens: int) -> float:
    """Tokens per second at best: as if a full step took no longer than those that were seen.

    Small steps show what a step costs at least, not how many tokens one could have taken in that time.
    """
    seen = costs.prefill_step_tokens or max_num_batched_tokens
    return costs.prefill_tokens_per_s * max(1.0, max_num_batched_tokens / seen)


def is_hopeless(group: SequenceGroup, num_tokens: int, now_s: float, prefill_tokens_per_s: float | None) -> bool:
    """Whether it has never run, and its deadline passes before `num_tokens` of it could be computed.

    With an unknown speed only a deadline that has passed counts. What has run is never given up here.
    """
    if group.deadline_s is None or any(s.status is not SequenceStatus.WAITING for s in group.live):
        return False
    prefill_s = num_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
    return now_s + prefill_s > group.deadline_s
