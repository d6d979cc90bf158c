"""The rows of a step: what the running sequences of a worker compute next, and who must make room for it.

Functions over one worker's state and the step being planned; they know nothing of the queue or of other workers.
"""

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


def add_row(worker: WorkerState, step: PlannedStep, sequence: Sequence, num_new: int, num_tokens: int) -> None:
    """Compute the next `num_new` of its `num_tokens` tokens in this step; sample where that is all of them."""
    plan = step.plan
    position = sequence.num_computed_tokens
    if position + num_new == num_tokens:
        plan.sampled_rows.append(len(plan.sequences))
        sequence.num_pending_tokens += 1
    plan.sequences.append(sequence)
    plan.num_tokens.append(num_new)
    plan.positions.append(position)
    sequence.num_computed_tokens = position + num_new
    sequence.last_step = plan.step_id
    if num_new > 1:
        worker.offer_full_blocks(sequence, step)


def add_running_rows(worker: WorkerState, step: PlannedStep, budget: int) -> int:
    """A row for each running sequence with something to compute, first come first. Returns the budget left."""
    block_size = worker.block_size
    for sequence in worker.running:  # preemption takes from its end, which the iteration notices
        if budget <= 0:
            break
        num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
        if num_tokens >= sequence.num_prompt_tokens + sequence.max_tokens:
            continue
        position = sequence.num_computed_tokens
        num_new = num_tokens - position
        if num_new > budget:
            num_new = budget
        if position + num_new > len(sequence.block_table) * block_size and not _append_block(worker, step, sequence):
            continue
        add_row(worker, step, sequence, num_new, num_tokens)
        budget -= num_new
    return budget


def force_preemption(worker: WorkerState, step: PlannedStep) -> None:
    """Preempt the last sequence that has sampled since it was started; so each stay gains at least a token."""
    if worker.forced_step_id == step.plan.step_id:
        return
    worker.forced_step_id = step.plan.step_id
    for sequence in reversed(worker.running):
        if sequence.num_tokens > sequence.num_tokens_at_start:
            worker.preempt(sequence, step)
            return


def _append_block(worker: WorkerState, step: PlannedStep, sequence: Sequence) -> bool:
    """One more block for a running sequence, at the cost of the last ones. False: no row for it in this plan.

    Blocks that come back when a step in flight is done count: for those it is only left out this time.
    """
    blocks = worker.blocks
    while blocks.num_available_blocks <= step.num_starved:
        if blocks.num_available_blocks + worker.num_coming_blocks() > step.num_starved:
            step.num_starved += 1
            return False
        victim = worker.running[-1]
        worker.preempt(victim, step)
        if victim is sequence:
            return False
    block = blocks.allocate_block()
    sequence.block_table.append(block)
    assert sequence.slot is not None
    step.plan.append_pairs += (sequence.slot, block)
    worker.unoffered.append(sequence)
    return True
