"""A worker's figures: what its blocks are used for, and what was counted since it came.

Reads a worker's state; the arithmetic of shared and half-filled blocks is here.
"""

from scheduler_svc.core.scheduler_stats import WorkerStats
from scheduler_svc.core.worker_state import WorkerState


def worker_stats(worker: WorkerState) -> WorkerStats:
    blocks = worker.blocks
    num_allocated = blocks.num_used_blocks * worker.block_size
    return WorkerStats(
        worker_id=worker.worker_id,
        num_blocks=blocks.num_blocks,
        num_used_blocks=blocks.num_used_blocks,
        num_cached_blocks=blocks.num_cached_blocks,
        num_free_blocks=blocks.num_free_blocks,
        num_running=len(worker.running),
        num_allocated_token_slots=num_allocated,
        num_filled_token_slots=num_allocated - _num_unfilled(worker),
        num_prefix_query_tokens=worker.num_prefix_query_tokens,
        num_prefix_hit_tokens=worker.num_prefix_hit_tokens,
        num_preemptions=worker.num_preemptions,
        num_recomputed_tokens=worker.num_recomputed_tokens,
        num_copied_blocks=worker.num_copied_blocks,
        num_swaps=worker.num_swaps,
        num_swapped_out_blocks=worker.num_swapped_out_blocks,
        num_swapped_in_blocks=worker.num_swapped_in_blocks,
        num_host_blocks=worker.host.num_blocks if worker.host is not None else 0,
        num_used_host_blocks=worker.host.num_used_blocks if worker.host is not None else 0,
        num_in_flight_steps=len(worker.in_flight),
    )


def _num_unfilled(worker: WorkerState) -> int:
    """Token slots without a computed token. Each block that has some is in one table, or in a waiting one's too."""
    num_unfilled = 0
    for sequence in worker.running:
        num_blocks, num_filled = len(sequence.block_table), sequence.num_computed_tokens
        if sequence.source is not None:
            num_filled = min(sequence.num_shared_tokens, num_blocks * worker.block_size)
        elif sequence.fork_tail is not None:
            num_filled = num_blocks * worker.block_size  # what is beyond is in the block yet to be copied
        num_unfilled += num_blocks * worker.block_size - num_filled
    return num_unfilled
