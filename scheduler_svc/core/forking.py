"""Fork and copy-on-write: sequences that continue from the same blocks.

A forked sequence has the full blocks of its parent in its table. The parent's partial block stays in the parent's
table alone, where the parent continues to fill it; the child holds a reference to it, `fork_tail`, and never writes to
it while it has another holder. At the child's first write the block is copied into one of its own, or taken over
if the child is its last holder. So no block is ever in two tables of which one is written.
"""

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


def sample_for_forks(step: PlannedStep, parent: Sequence, row: int) -> None:
    """Sample from the parent's row, which computes its last token, for the children that waited for all its tokens."""
    plan = step.plan
    for child in parent.group.sequences:
        if child.source is not parent or child.num_shared_tokens != child.num_tokens:
            continue
        child.source = None
        child.num_computed_tokens = child.num_shared_tokens
        child.num_pending_tokens += 1
        child.block_hashes = list(parent.block_hashes)
        child.num_registered_blocks = parent.num_registered_blocks
        child.first_step_id = child.last_step = plan.step_id
        plan.sampled_rows.append(row)
        plan.sampled_sequences.append(child)
        plan.whole.append(child)


def take_over_tail(worker: WorkerState, step: PlannedStep, sequence: Sequence) -> int | None:
    """Return the shared tail if the sequence is its last holder and it cannot be found: it is written in place."""
    tail = sequence.fork_tail
    if tail is None or worker.num_holders(tail) > 1 or worker.blocks.is_findable(tail):
        return None
    sequence.fork_tail = None
    step.reshaped.append(sequence.group)
    return tail


def copy_tail(worker: WorkerState, step: PlannedStep, sequence: Sequence, block: int) -> None:
    """Copy the shared tail into `block`, before the step computes."""
    tail = sequence.fork_tail
    assert tail is not None
    step.plan.copies += (tail, block)
    worker.hold_copy_source(tail, step)
    worker.blocks.free([tail])
    worker.num_copied_blocks += 1
    sequence.group.num_copied_blocks += 1
    sequence.fork_tail = None
    step.reshaped.append(sequence.group)
