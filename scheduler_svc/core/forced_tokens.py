"""Forced tokens: those that a worker computed before the sampled one, since the sequence's grammar allows no other.

The scheduler hears of them when the step is answered. The step behind it was planned without them, so it computes
later positions than it says.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.worker_state import WorkerState


def num_forceable(worker: WorkerState, plan: StepPlan, sample: int) -> int:
    """Return how many tokens the oldest step in flight may have forced before its sample of this index.

    They fill the blocks of the sequence but for the spare positions. Of one that has left the worker the blocks are
    not known any more: the last of them had room for less than a block. It may have more than it is to get: what it
    cannot use is dropped.
    """
    row, sequence = plan.sampled_rows[sample], plan.sampled_sequences[sample]
    if plan.num_tokens[row] > 1 or plan.sequences[row] is not sequence:
        return 0
    if not _has_stayed(sequence):
        return max(0, worker.block_size - 1 - plan.num_spare_positions)
    num_filled = plan.positions[row] + 1 + plan.num_spare_positions
    return len(sequence.block_table) * worker.block_size - num_filled


def append_with_forced(
    worker: WorkerState, plan: StepPlan, token_ids: Iterable[int], forced: Mapping[int, Seq[int]]
) -> list[tuple[Sequence, int]]:
    """Append what the oldest step in flight has forced, by index of the sample, and the tokens that it has sampled.

    Return them with their sequences, but for those behind an end.
    """
    appended: list[tuple[Sequence, int]] = []
    for sample, (sequence, token_id) in enumerate(zip(plan.sampled_sequences, token_ids, strict=True)):
        sequence.num_pending_tokens -= 1
        if sequence.is_finished:
            continue
        if sample in forced:
            appended += _append_forced(worker, plan, sample, forced[sample])
            if sequence.has_ended:
                continue
        sequence.token_ids.append(token_id)
        appended.append((sequence, token_id))
    return appended


def _append_forced(worker: WorkerState, plan: StepPlan, sample: int, token_ids: Seq[int]) -> list[tuple[Sequence, int]]:
    """Append the forced tokens of a sample, of a sequence that has not finished, up to its end. Return them with it.

    The plan, which was executed, and those behind it get the positions that they have in truth.
    """
    sequence, appended = plan.sampled_sequences[sample], []
    for token_id in token_ids:
        sequence.token_ids.append(token_id)
        appended.append((sequence, token_id))
        if sequence.has_ended:
            return appended
    plan.num_tokens[plan.sampled_rows[sample]] += len(token_ids)
    if _has_stayed(sequence):
        sequence.num_computed_tokens += len(token_ids)
        for later in worker.in_flight:
            if later.plan is not plan and sequence in later.plan.sequences:
                later.plan.positions[later.plan.sequences.index(sequence)] += len(token_ids)
    return appended


def _has_stayed(sequence: Sequence) -> bool:
    """True if the sequence of a sample in flight was not stopped: it does not start again before the token is known."""
    return sequence.status is SequenceStatus.RUNNING
