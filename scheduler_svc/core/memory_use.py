"""Figures of a worker: the use of its blocks, and its counters since it came.

Reads a worker's state; the arithmetic of shared and half-filled blocks is here. Its cost grows with the running
sequences, not with their blocks.
"""

from dataclasses import dataclass, fields

from scheduler_svc.core.scheduler_stats import TotalCounters, WorkerCounters
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.worker_state import WorkerState, blocks_held


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one group at a moment; the group itself has its counters."""

    num_blocks: int  # that it holds on the device
    num_shared: int  # of those, held by more than one of its members
    num_saved: int  # that it would hold in addition if its members shared none
    num_host_blocks: int  # that it holds in the swap pool


def group_blocks(group: SequenceGroup) -> GroupBlocks:
    """Count the blocks that one request holds at the moment."""
    num_holders: dict[int, int] = {}
    for sequence in group.live:
        for block in blocks_held(sequence):
            num_holders[block] = num_holders.get(block, 0) + 1
    num_shared = sum(1 for count in num_holders.values() if count > 1)
    num_saved = sum(num_holders.values()) - len(num_holders)
    host_blocks = {block for sequence in group.live for block in sequence.host_blocks}
    return GroupBlocks(len(num_holders), num_shared, num_saved, len(host_blocks))


def worker_stats(worker: WorkerState) -> WorkerCounters:
    blocks = worker.blocks
    num_allocated = blocks.num_used_blocks * worker.block_size
    num_unfilled = sum(_num_unfilled(worker, sequence) for sequence in worker.running)
    num_references, num_sequence_blocks = _sequence_blocks(worker)
    return WorkerCounters(
        worker_id=worker.worker_id,
        num_blocks=blocks.num_blocks,
        num_used_blocks=blocks.num_used_blocks,
        num_cached_blocks=blocks.num_cached_blocks,
        num_free_blocks=blocks.num_free_blocks,
        num_running=len(worker.running),
        num_running_groups=len({sequence.group for sequence in worker.running}),
        num_pinned_blocks=worker.num_pinned_blocks,
        num_shared_blocks=blocks.num_shared_blocks,
        num_saved_blocks=num_references - num_sequence_blocks,
        num_sequence_blocks=num_sequence_blocks,
        num_allocated_token_slots=num_allocated,
        num_filled_token_slots=num_allocated - num_unfilled,
        num_reserved_token_slots=sum(_num_reserved(worker, sequence) for sequence in worker.running),
        num_prefix_query_tokens=worker.num_prefix_query_tokens,
        num_prefix_hit_tokens=worker.num_prefix_hit_tokens,
        num_preemptions=worker.num_preemptions,
        num_recomputed_tokens=worker.num_recomputed_tokens,
        num_copied_blocks=worker.num_copied_blocks,
        num_swaps=worker.num_swaps,
        num_swapped_out_blocks=worker.num_swapped_out_blocks,
        num_swapped_in_blocks=worker.num_swapped_in_blocks,
        num_fetches=worker.num_fetches,
        num_fetched_blocks=worker.num_fetched_blocks,
        num_host_blocks=worker.host.num_blocks if worker.host is not None else 0,
        num_used_host_blocks=worker.host.num_used_blocks if worker.host is not None else 0,
        num_in_flight_steps=len(worker.in_flight),
        is_draining=worker.is_draining,
    )


def work_of(worker: WorkerState) -> TotalCounters:
    """Return the counters of one worker since it came."""
    return TotalCounters(**{each.name: getattr(worker, each.name) for each in fields(TotalCounters)})


def _sequence_blocks(worker: WorkerState) -> tuple[int, int]:
    """Count the references of running sequences, and their blocks: all but those that only others hold."""
    held = [*worker.pins.values(), *worker.read_by_fetches.values(), *worker.placed_by_fetches.values()]
    for step in worker.in_flight:
        held += [*(release.blocks for release in step.releases), step.copy_sources]
    num_references = worker.blocks.num_references - sum(len(blocks) for blocks in held)
    return num_references, worker.blocks.num_used_blocks - worker.blocks.num_freed_by(held)


def _num_unfilled(worker: WorkerState, sequence: Sequence) -> int:
    """Count the token slots without a computed token in its own blocks."""
    num_slots = len(sequence.block_table) * worker.block_size
    if sequence.source is not None:
        return num_slots - min(sequence.num_shared_tokens, num_slots)
    if sequence.fork_tail is None:
        return num_slots - sequence.num_computed_tokens
    others = [other for other in sequence.group.live if other is not sequence]
    if any(sequence.fork_tail in other.block_table for other in others):
        return 0
    # No table has the block that is yet to be copied: its empty slots count for the first that holds it.
    first = next(other for other in sequence.group.live if other.fork_tail == sequence.fork_tail)
    return num_slots + worker.block_size - sequence.num_computed_tokens if first is sequence else 0


def _num_reserved(worker: WorkerState, sequence: Sequence) -> int:
    num_slots = len(sequence.block_table) * worker.block_size
    num_filled = sequence.num_computed_tokens if sequence.source is None else sequence.num_shared_tokens
    return max(0, min(sequence.num_tokens, num_slots) - num_filled)
