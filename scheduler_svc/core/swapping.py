"""Swap: the blocks of a preempted group move to the worker's host pool, and back before it continues.

A block that members share is copied once, and shared again on the other side. Steps execute in order, and each takes
its swap-outs first, then its swap-ins, then its copies, then computes. So a device block may be used again in the
very plan that swaps it out, and a host block in the plan after the one that swaps it in.
"""

from bisect import insort
from collections.abc import Iterable

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.preemption import prefers_swap
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.starting import seat_members
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


def can_swap(worker: WorkerState, group: SequenceGroup) -> bool:
    """True if the worker swaps at all, and no member still waits for its source.

    Suspects are never swapped, since they may be tried on any worker.
    """
    return (
        worker.host is not None
        and worker.preemption != "recompute"
        and group.cohort is None
        and not any(sequence.source is not None for sequence in group.live)
    )


def should_swap(worker: WorkerState, group: SequenceGroup, num_host_blocks: int) -> bool:
    """True if swapping the group out is possible and cheaper than recomputing it, with `num_host_blocks` to have."""
    if not can_swap(worker, group):
        return False
    num_blocks = num_filled_blocks(worker, group)
    if num_blocks > num_host_blocks:
        return False
    num_shared = sum(len(_filled_blocks(worker, sequence)) for sequence in group.live) - num_blocks
    num_tokens = sum(s.num_computed_tokens for s in group.live) - num_shared * worker.block_size
    return prefers_swap(worker.preemption, worker.costs, worker.num_swaps, num_blocks, num_tokens)


def num_filled_blocks(worker: WorkerState, group: SequenceGroup) -> int:
    """Count the blocks that a swap copies; a block that members share counts once."""
    return len({block for sequence in group.live for block in _filled_blocks(worker, sequence)})


def swap_out(worker: WorkerState, group: SequenceGroup, step_id: int) -> None:
    """Preempt a group, which has no row in the step being planned, and keep what it has computed."""
    copy_to_host(worker, group, step_id)
    worker.num_swaps += 1
    worker.preempt(group, keeps_computed=True)


def copy_to_host(worker: WorkerState, group: SequenceGroup, step_id: int) -> None:
    """Have the step copy all that the group has computed. The caller has checked the room, and stops the group."""
    assert worker.host is not None
    host_of: dict[int, int] = {}
    for sequence in group.live:
        if group.awaits_host and sequence.num_computed_tokens == len(sequence.token_ids):
            sequence.num_computed_tokens -= 1  # its candidates are void: computing the last token gives them again
        filled = _filled_blocks(worker, sequence)
        sequence.host_blocks = [_counterpart(worker.host, host_of, block) for block in filled]
        sequence.has_host_tail = sequence.fork_tail is not None
    for block, host_block in host_of.items():
        worker.unsent_swap_out += (block, host_block)
    worker.num_swapped_out_blocks += len(host_of)
    group.num_swapped_out_blocks += len(host_of)
    group.swap_step = step_id


def has_room_to_swap_in(worker: WorkerState, group: SequenceGroup, num_starved: int) -> bool:
    """True if its blocks, and those that its members write next, fit above the watermark.

    A tail that is in no table takes no block beside those of the members that go on from it: the last takes it over.
    """
    tables = [s.host_blocks[: len(s.host_blocks) - s.has_host_tail] for s in group.live]
    num_needed = len({block for table in tables for block in table})
    for sequence, table in zip(group.live, tables, strict=True):
        num_needed += worker.num_blocks_for(sequence.num_tokens) - len(table)
    return num_needed + worker.num_watermark_blocks + num_starved <= worker.blocks.num_available_blocks


def swap_in(worker: WorkerState, group: SequenceGroup, step: PlannedStep) -> None:
    """Give a swapped group blocks and seats again. The caller has seen that there is room."""
    block_of: dict[int, int] = {}
    for sequence in group.live:
        table = [_counterpart(worker.blocks, block_of, host_block) for host_block in sequence.host_blocks]
        if sequence.has_host_tail:
            sequence.fork_tail = table.pop()
        else:
            table += worker.blocks.allocate(worker.num_blocks_for(sequence.num_tokens) - len(table))
        sequence.block_table = table
    for host_block, block in block_of.items():
        step.plan.swap_in += (host_block, block)
    worker.num_swapped_in_blocks += len(block_of)
    group.num_swapped_in_blocks += len(block_of)
    worker.take_out(group)
    _free_blocks_of(worker, group.live)
    group.swap_step = None
    step.reshaped.append(group)
    seat_members(worker, group)


def free_host_blocks(worker: WorkerState, sequences: Iterable[Sequence]) -> None:
    """Free the host blocks of sequences that are finished or recomputed, and cancel unsent copies for them alone."""
    _free_blocks_of(worker, sequences)
    if worker.unsent_swap_out and worker.host is not None:
        pairs = zip(worker.unsent_swap_out[::2], worker.unsent_swap_out[1::2], strict=True)
        kept = [pair for pair in pairs if worker.host.ref_count(pair[1])]
        worker.unsent_swap_out = [block for pair in kept for block in pair]


def drop_host_copy(worker: WorkerState, group: SequenceGroup) -> None:
    """Free a group's host blocks, so that it is recomputed on whichever worker starts it."""
    free_host_blocks(worker, group.live)
    for sequence in group.live:
        sequence.lose_computed_tokens()
    group.swap_step = None


def insert_swapped(worker: WorkerState, group: SequenceGroup) -> None:
    """List a swapped group, by its order, so that it waits for its place on this worker."""
    insort(worker.swapped, group, key=lambda one: one.order)


def _free_blocks_of(worker: WorkerState, sequences: Iterable[Sequence]) -> None:
    for sequence in sequences:
        if sequence.host_blocks:
            assert worker.host is not None
            worker.host.free(sequence.host_blocks)
        sequence.host_blocks = ()
        sequence.has_host_tail = False


def _filled_blocks(worker: WorkerState, sequence: Sequence) -> list[int]:
    """Return the blocks with something computed, the tail that is yet to be copied included."""
    table = sequence.block_table[: worker.num_blocks_for(sequence.num_computed_tokens)]
    return table if sequence.fork_tail is None else [*table, sequence.fork_tail]


def _counterpart(pool: BlockManager, known: dict[int, int], block: int) -> int:
    """Return the block of the other pool that corresponds to it, with one more reference."""
    if block in known:
        pool.share([known[block]])
    else:
        known[block] = pool.allocate_block()
    return known[block]
