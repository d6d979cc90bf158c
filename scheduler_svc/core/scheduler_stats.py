"""Statistics of the scheduler: a frozen snapshot, for metrics and people."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounters:
    """Statistics of one worker. Blocks: used + cached + free = num_blocks. Counters run from the worker's arrival."""

    worker_id: str
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int  # unreferenced, reusable by hash
    num_free_blocks: int
    num_running: int  # sequences
    num_running_groups: int
    num_pinned_blocks: int  # of the used ones, kept as cache
    num_shared_blocks: int  # with more than one holder
    num_saved_blocks: int  # blocks that the sequences would hold in addition if none were shared
    num_sequence_blocks: int  # blocks that the sequences hold
    num_allocated_token_slots: int  # in used blocks
    num_filled_token_slots: int  # of those, with a computed token
    num_reserved_token_slots: int  # of those, for a token that exists and is yet to be computed
    num_prefix_query_tokens: int  # of sequences scheduled for the first time
    num_prefix_hit_tokens: int  # of those, found in the cache
    num_preemptions: int
    num_recomputed_tokens: int  # lost by preemption and not found in the cache
    num_copied_blocks: int  # copy-on-write
    num_swaps: int  # preemptions to the host pool
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_fetches: int  # of blocks from other workers, those that brought none included
    num_fetched_blocks: int
    num_host_blocks: int  # in the swap pool
    num_used_host_blocks: int
    num_in_flight_steps: int
    is_draining: bool

    @property
    def num_fragmented_token_slots(self) -> int:
        """Token slots that are allocated and have no token: the rest of last blocks."""
        return self.num_allocated_token_slots - self.num_filled_token_slots - self.num_reserved_token_slots

    @property
    def block_saving(self) -> float:
        """Share of blocks that sharing saves now, as in the paper's Fig. 15: saved / blocks without sharing."""
        num_without_sharing = self.num_sequence_blocks + self.num_saved_blocks
        return self.num_saved_blocks / num_without_sharing if num_without_sharing else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalCounters:
    """Counters over all workers since the start, those that have left included; named as in `WorkerCounters`."""

    num_preemptions: int = 0
    num_swaps: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_fetches: int = 0
    num_fetched_blocks: int = 0
    num_copied_blocks: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0

    def __add__(self, other: "TotalCounters") -> "TotalCounters":
        return TotalCounters(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Statistics of all workers, and of the queue they share."""

    num_waiting: int  # sequences, preempted ones included
    num_waiting_groups: int
    num_swapped_groups: int  # of the waiting ones
    num_paused_groups: int  # not among those that wait
    work: TotalCounters
    workers: tuple[WorkerCounters, ...]
