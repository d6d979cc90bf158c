"""Undoing of steps that a worker did not execute: counters, blocks and hashes become what they were before them.

Groups that were started, forked, swapped or given a copied block in such a step are computed again from the
beginning: that is rare, and cheaper to get right than to reverse.
"""

from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.swapping import drop_host_copy
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


def undo_steps(worker: WorkerState) -> list[SequenceGroup]:
    """Undo every step in flight. Return the groups that must be queued again; they hold nothing on the device."""
    undone = list(worker.in_flight)
    worker.in_flight.clear()
    for step in reversed(undone):
        _undo_rows(worker, step)
    for step in undone:
        worker.free_held_by(step)
    first_id = undone[0].plan.step_id if undone else worker.next_step_id
    lost = _lost_groups(worker, undone, first_id)
    for group in lost:
        for sequence in group.live:
            if sequence.first_step_id >= first_id:
                sequence.num_computed_tokens = 0  # not even its cached prefix: that may be undone as well
            sequence.lose_computed_tokens()
        worker.stop_group(group)
    for group in [*worker.swapped, *worker.parked, *worker.paused]:
        if group.swap_step is not None and group.swap_step >= first_id:
            drop_host_copy(worker, group)
            if not group.is_paused:
                lost.append(group)
    for sequence in worker.running:
        sequence.is_decoding = False
        worker.catching_up[sequence] = None
        num_needed = worker.num_blocks_for(sequence.num_tokens)
        worker.blocks.free(sequence.block_table[num_needed:])
        del sequence.block_table[num_needed:]
    worker.needs_snapshot = True
    return lost


def _undo_rows(worker: WorkerState, step: PlannedStep) -> None:
    plan = step.plan
    for block in step.registered:
        worker.blocks.unregister(block)
    for placed in step.placed.values():
        worker.blocks.forget(placed.block_hash)
    for sequence in plan.sampled_sequences:
        sequence.num_pending_tokens -= 1
    for row in plan.candidate_rows:
        plan.sequences[row].num_pending_tokens -= 1
    for sequence, position in zip(plan.sequences, plan.positions, strict=True):
        # If it was started here again, that step is undone too; if it runs on another worker, it is left alone.
        if sequence.status is SequenceStatus.RUNNING and sequence.worker_id == worker.worker_id:
            sequence.num_computed_tokens = position
            sequence.num_registered_blocks = 0  # registering a block again does no harm


def _lost_groups(worker: WorkerState, undone: list[PlannedStep], first_id: int) -> list[SequenceGroup]:
    """Return running groups whose blocks an undone step changed, in the order in which they run, each once."""
    reshaped = {group for step in undone for group in step.reshaped}
    lost = {
        sequence.group: None
        for sequence in worker.running
        if sequence.group in reshaped or sequence.first_step_id >= first_id
    }
    return list(lost)
