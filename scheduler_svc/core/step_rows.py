"""The rows of a step: what the running sequences of a worker compute next, and who must make room for it.

Functions over one worker's state and the step being planned; they know nothing of the queue or of other workers.
"""

from scheduler_svc.core.forking import copy_tail, sample_for_forks, take_over_tail
from scheduler_svc.core.pausing import num_reclaimable_host_blocks, reclaim_host_blocks
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.swapping import num_filled_blocks, should_swap, swap_out
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


def add_running_rows(worker: WorkerState, step: PlannedStep, budget: int) -> int:
    """A row for each running sequence with something to compute, first come first. Returns the budget left."""
    plan, running, block_size = step.plan, worker.running, worker.block_size
    sequences, step_id = plan.sequences, plan.step_id
    trial = worker.trial
    index = 0
    while budget > 0 and index < len(running):  # preemption takes from its end
        sequence = running[index]
        index += 1
        if sequence.group.cohort is not trial:
            continue
        if not sequence.is_decoding:
            budget -= add_row(worker, step, sequence, budget)
            continue
        # What follows is `add_row` for one token to decode: most rows are that.
        num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
        if num_tokens >= sequence.num_prompt_tokens + sequence.max_tokens:
            continue
        if num_tokens > len(sequence.block_table) * block_size and not _append_block(worker, step, sequence):
            continue
        plan.sampled_rows.append(len(sequences))
        plan.sampled_sequences.append(sequence)
        sequence.num_pending_tokens += 1
        sequences.append(sequence)
        plan.num_tokens.append(1)
        plan.positions.append(num_tokens - 1)
        sequence.num_computed_tokens = num_tokens
        sequence.last_step = step_id
        budget -= 1
    return budget


def add_row(worker: WorkerState, step: PlannedStep, sequence: Sequence, budget: int) -> int:
    """Compute as many of its tokens as the budget allows; sample where that is all. Returns how many: 0 for no row."""
    plan = step.plan
    if sequence.last_step == plan.step_id or not _may_compute(sequence):
        return 0  # with `last_step` here it has just been forked: it samples in this plan already
    position = sequence.num_computed_tokens
    num_new = min(sequence.num_tokens - position, budget)
    end = position + num_new
    if end > len(sequence.block_table) * worker.block_size and not _append_block(worker, step, sequence):
        return 0
    awaits_host = sequence.group.awaits_host
    if awaits_host or not sequence.first_step_id:
        sequence.first_step_id = sequence.first_step_id or plan.step_id
        plan.whole.append(sequence)
    row = len(plan.sequences)
    plan.sequences.append(sequence)
    plan.num_tokens.append(num_new)
    plan.positions.append(position)
    is_last = end == sequence.num_tokens
    sequence.num_computed_tokens = end
    sequence.last_step = plan.step_id
    if num_new > 1:
        worker.cache_full_blocks(sequence, step)
    if is_last:
        sequence.num_pending_tokens += 1
    if is_last and awaits_host:
        plan.candidate_rows.append(row)
    elif is_last:
        plan.sampled_rows.append(row)
        plan.sampled_sequences.append(sequence)
        sample_for_forks(step, sequence, row)
        sequence.is_decoding = sequence.group.has_caught_up
    return num_new


def force_preemption(worker: WorkerState, step: PlannedStep) -> None:
    """Preempt the last group that has sampled since it was started; so each stay gains at least a token."""
    if worker.forced_step_id == step.plan.step_id:
        return
    worker.forced_step_id = step.plan.step_id
    for sequence in reversed(worker.running):
        if all(member.has_gained_token for member in sequence.group.live):
            swap_or_preempt(worker, step, sequence.group)
            return


def _may_compute(sequence: Sequence) -> bool:
    """Whether it has a token to compute, and its group is as far as that takes."""
    source = sequence.source
    if source is not None:
        if source.num_computed_tokens < sequence.num_shared_tokens:
            return False
        sequence.source = None
        sequence.num_computed_tokens = sequence.num_shared_tokens
    if sequence.has_caught_up and not sequence.group.has_caught_up:
        return False
    if sequence.group.awaits_host and sequence.num_computed_tokens == len(sequence.token_ids):
        return False
    return not sequence.has_all_tokens


def _append_block(worker: WorkerState, step: PlannedStep, sequence: Sequence) -> bool:
    """One more block for a running sequence, its own copy if it is one shared. False: no row for it in this plan."""
    block = take_over_tail(worker, step, sequence)
    if block is None:
        if not _make_room(worker, step, sequence):
            return False
        block = worker.blocks.allocate_block()
        if sequence.fork_tail is not None:
            copy_tail(worker, step, sequence, block)
    sequence.block_table.append(block)
    assert sequence.slot is not None
    if 0 < sequence.first_step_id < step.plan.step_id and not sequence.group.awaits_host:
        step.plan.append_pairs += (sequence.slot, block)
    worker.uncached.append(sequence)
    return True


def _make_room(worker: WorkerState, step: PlannedStep, sequence: Sequence) -> bool:
    """Have a block available, at the cost of the last groups. False: its own group gives way, or the step has no block.

    Blocks that come back when a step in flight is done count: for those the sequence is only left out this time.
    So it is when a member of its own, last, group has a row already: that is not taken from the plan again.
    """
    blocks = worker.blocks
    while blocks.num_available_blocks <= step.num_starved:
        if blocks.num_available_blocks + worker.num_coming_blocks() > step.num_starved:
            step.num_starved += 1
            return False
        victim = _last_in_order(worker)
        if any(member.last_step == step.plan.step_id for member in victim.group.live):
            return False
        swap_or_preempt(worker, step, victim.group)
        if victim.group is sequence.group:
            return False
    return True


def _last_in_order(worker: WorkerState) -> Sequence:
    """In a trial those who have no part in it give way first."""
    if worker.trial is not None:
        for sequence in reversed(worker.running):
            if sequence.group.cohort is not worker.trial:
                return sequence
    return worker.running[-1]


def swap_or_preempt(worker: WorkerState, step: PlannedStep, group: SequenceGroup) -> None:
    """Preempt it, in the way that costs less, to make room for the step."""
    if should_swap(worker, group, num_reclaimable_host_blocks(worker)):
        reclaim_host_blocks(worker, num_filled_blocks(worker, group))
        swap_out(worker, group, step.plan.step_id)
    else:
        worker.preempt(group)
    step.preempted.append(group)
