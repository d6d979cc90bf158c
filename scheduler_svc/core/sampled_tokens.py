"""Sampled tokens of a step that was executed: each goes to its sequence, unless that has finished meanwhile.

Where a worker has computed forced tokens before them, see `forced_tokens`.
"""

from collections.abc import Iterable

from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan


def append_sampled(plan: StepPlan, token_ids: Iterable[int]) -> list[tuple[Sequence, int]]:
    """Append the token of each sample to its sequence, unless that has finished. Return those appended."""
    finished, num_finished = SequenceStatus.FINISHED, 0
    samples = list(zip(plan.sampled_sequences, token_ids, strict=True))
    for sequence, token_id in samples:
        sequence.num_pending_tokens -= 1
        if sequence.status is finished:
            num_finished += 1
        else:
            sequence.token_ids.append(token_id)
    return samples if not num_finished else [each for each in samples if each[0].status is not finished]
