"""Rows of a step: what the running sequences of a worker compute next, and which groups make room for it.

Functions over one worker's state and the step being planned. They know nothing of the queue or of other workers.
"""

from scheduler_svc.core.forking import copy_tail, sample_for_forks, take_over_tail
from scheduler_svc.core.pausing import num_reclaimable_host_blocks, reclaim_host_blocks
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.swapping import num_filled_blocks, should_swap, swap_out
from scheduler_svc.core.trials import may_run
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


def add_running_rows(worker: WorkerState, step: PlannedStep, budget: int, *, has_suspects: bool) -> int:
    """Add a row for each running sequence with something to compute, in order. Return the budget left.

    Those that catch up, such as after their worker was lost, leave those that decode behind them a token each, but for
    one token in all.

    `has_suspects`: some group is suspected, so that each must be asked for with `may_run`.
    """
    plan, running, block_size = step.plan, worker.running, worker.block_size
    sequences, step_id = plan.sequences, plan.step_id
    add_sequence, add_num_tokens, add_position = sequences.append, plan.num_tokens.append, plan.positions.append
    add_sampled_row, add_sampled = plan.sampled_rows.append, plan.sampled_sequences.append
    index = num_catching_up = 0  # of those that come later, and of those that came and still catch up
    least = 1  # token for the next that catches up
    while budget > 0 and index < len(running):  # preemption takes from its end
        sequence = running[index]
        index += 1
        if has_suspects and not may_run(worker, sequence.group):
            continue
        if not sequence.is_decoding:
            if has_suspects:
                num_decoding = sum(each.is_decoding and may_run(worker, each.group) for each in running[index:])
            else:
                num_decoding = max(0, len(running) - index - (len(worker.catching_up) - num_catching_up - 1))
            most = max(budget - num_decoding, least)
            if most > 0 and (num_new := add_row(worker, step, sequence, most)):
                budget -= num_new
                least = 0
            num_catching_up += not sequence.is_decoding
            continue
        # The rest is `add_row` for one token to decode, in line: most rows are that.
        num_pending = sequence.num_pending_tokens
        num_tokens = len(sequence.token_ids) + num_pending
        if num_tokens >= sequence.num_prompt_tokens + sequence.max_tokens:
            continue
        if num_tokens > len(sequence.block_table) * block_size and not _append_block(worker, step, sequence):
            continue
        add_sampled_row(len(sequences))
        add_sampled(sequence)
        sequence.num_pending_tokens = num_pending + 1
        add_sequence(sequence)
        add_num_tokens(1)
        add_position(sequence.num_computed_tokens)  # all but one
        sequence.num_computed_tokens = num_tokens
        sequence.last_step = step_id
        budget -= 1
    return budget


def add_row(worker: WorkerState, step: PlannedStep, sequence: Sequence, budget: int) -> int:
    """Add a row with as many tokens as the budget allows, and sample if those are all. Return how many; 0: no row."""
    plan = step.plan
    if sequence.last_step == plan.step_id or not _may_compute(sequence):
        return 0  # with `last_step` here it has just been forked, and samples in this plan already
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
        if sequence.group.has_caught_up:
            sequence.is_decoding = True
            worker.catching_up.pop(sequence, None)
    return num_new


def force_preemption(worker: WorkerState, step: PlannedStep) -> None:
    """Preempt the last group that has sampled since it was started, so that each start gains at least a token."""
    if worker.forced_step_id == step.plan.step_id:
        return
    worker.forced_step_id = step.plan.step_id
    for sequence in reversed(worker.running):
        if all(member.has_gained_token for member in sequence.group.live):
            swap_or_preempt(worker, step, sequence.group)
            return


def _may_compute(sequence: Sequence) -> bool:
    """True if it has a token to compute now; a member that has caught up waits for the rest of its group."""
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
    """Give a running sequence one more block; if it shares its tail, a copy of that. False: no row in this plan."""
    block = take_over_tail(worker, step, sequence)
    if block is None:
        if not _make_room(worker, step, sequence):
            return False
        block = worker.blocks.allocate_block()
        if sequence.fork_tail is not None:
            copy_tail(worker, step, sequence, block)
    sequence.block_table.append(block)
    assert sequence.seat is not None
    if 0 < sequence.first_step_id < step.plan.step_id and not sequence.group.awaits_host:
        step.plan.append_pairs += (sequence.seat, block)
    worker.uncached.append(sequence)
    return True


def _make_room(worker: WorkerState, step: PlannedStep, sequence: Sequence) -> bool:
    """Have a block available: preempt groups, the last in order first. False: no block, or its own group is preempted.

    What was placed for groups that have not started gives way before any that runs.
    If steps in flight will free enough blocks, no group is preempted, and the sequence has no row this time. The same
    holds if the last group has a row already, since that is not taken from the plan again.
    """
    blocks = worker.blocks
    while blocks.num_available_blocks <= step.num_starved:
        if blocks.num_available_blocks + worker.num_coming_blocks() > step.num_starved:
            step.num_starved += 1
            return False
        if worker.free_placed():
            continue
        victim = _last_in_order(worker)
        if any(member.last_step == step.plan.step_id for member in victim.group.live):
            return False
        swap_or_preempt(worker, step, victim.group)
        if victim.group is sequence.group:
            return False
    return True


def _last_in_order(worker: WorkerState) -> Sequence:
    """Return the sequence to preempt first: in a trial the last that has no part in it, else the last of all."""
    if worker.trial is not None:
        outsider = last_outsider(worker)
        if outsider is not None:
            return outsider
    return worker.running[-1]


def last_outsider(worker: WorkerState) -> Sequence | None:
    """Return the last running sequence that may not run in the present trial."""
    return next((s for s in reversed(worker.running) if not may_run(worker, s.group)), None)


def swap_or_preempt(worker: WorkerState, step: PlannedStep, group: SequenceGroup) -> None:
    """Preempt a group by swap or for recomputation, whichever costs less, to make room for the step."""
    if should_swap(worker, group, num_reclaimable_host_blocks(worker)):
        reclaim_host_blocks(worker, num_filled_blocks(worker, group))
        swap_out(worker, group, step.plan.step_id)
    else:
        worker.preempt(group)
    step.preempted.append(group)
