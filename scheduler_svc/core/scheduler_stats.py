"""What the scheduler counts: a frozen picture of now, for metrics and people."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker. Blocks: used + cached + free = num_blocks. Counters run from the worker's arrival."""

    worker_id: str
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int  # unreferenced, reusable by hash
    num_free_blocks: int
    num_running: int
    num_allocated_token_slots: int  # in used blocks
    num_filled_token_slots: int  # of those, with a computed token
    num_prefix_query_tokens: int  # of sequences scheduled for the first time
    num_prefix_hit_tokens: int  # of those, found in the cache
    num_preemptions: int
    num_recomputed_tokens: int  # lost by preemption and not found in the cache
    num_copied_blocks: int  # copy-on-write
    num_swaps: int  # preemptions to the host pool
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_host_blocks: int  # in the swap pool
    num_used_host_blocks: int
    num_in_flight_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """All workers, and the queue they share."""

    num_waiting: int  # preempted ones included
    workers: tuple[WorkerStats, ...]
