"""Sharing of load: a worker with little to do goes on with a running group of the busiest one.

That happens when workers come, or when the requests of one have ended first. Only while nothing waits: what waits is
the better thing to start. One group moves at a time to each worker, and only if its blocks can be fetched more quickly
than computed. Pure functions over worker states.
"""

from collections.abc import Iterable

from scheduler_svc.core.fetching import BlockFetches
from scheduler_svc.core.placement import WorkerLimits, can_ever_hold, num_free_seats
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.worker_state import WorkerState

# A move ends a group's decoding for some milliseconds, so it takes a lasting difference: the busiest worker has so many
# times the sequences, and so many more.
TIMES_BUSIER = 2
MIN_DIFFERENCE = 3
MIN_TOKENS_TO_GO = 32  # of each sequence, at most; with fewer left the group ends where it is


def group_to_share(
    worker: WorkerState, workers: Iterable[WorkerState], fetches: BlockFetches, limits: WorkerLimits
) -> tuple[WorkerState, SequenceGroup] | None:
    """Return the busiest worker and a running group of it that should go on at `worker`; None if none should."""
    num_there = TIMES_BUSIER * len(worker.running) + MIN_DIFFERENCE
    busier = [other for other in workers if len(other.running) >= num_there]
    if not busier or not _takes_more(worker, fetches):
        return None
    source = max(busier, key=lambda other: len(other.running))
    if source.trial is not None or not worker.can_fetch_from(source) or _is_on_its_way(source, worker):
        return None
    groups = dict.fromkeys(sequence.group for sequence in source.running)
    for group in sorted(groups, key=_num_tokens_to_go, reverse=True):
        if _may_move(source, worker, group, fetches, limits):
            return source, group
    return None


def _takes_more(worker: WorkerState, fetches: BlockFetches) -> bool:
    """True if a worker that has so little to do may take a running group, and no blocks are on their way to it."""
    is_open = worker.role != "prefill" and not worker.is_draining and worker.trial is None
    is_free = not worker.parked and not worker.swapped and not fetches.has_part_to_come(worker)
    has_memory = worker.num_fetchable_blocks == worker.max_fetched_blocks
    return is_open and is_free and has_memory and worker.enable_prefix_cache


def _is_on_its_way(source: WorkerState, worker: WorkerState) -> bool:
    return any(group.destination == worker.worker_id for group in source.parked)


def _may_move(
    source: WorkerState, worker: WorkerState, group: SequenceGroup, fetches: BlockFetches, limits: WorkerLimits
) -> bool:
    live = group.live
    if group.cohort is not None or not group.has_caught_up or not all(s.use_prefix_cache for s in live):
        return False
    if _num_tokens_to_go(group) < MIN_TOKENS_TO_GO or 2 * len(live) > len(source.running) - len(worker.running):
        return False  # it ends soon, or the two would only change places
    if not can_ever_hold(worker, group, limits) or len(group.unfinished) > num_free_seats(worker, limits):
        return False
    num_tokens = sum(sequence.num_computed_tokens for sequence in live)
    num_blocks = _num_blocks(live)
    if num_blocks + worker.num_watermark_blocks > worker.blocks.num_available_blocks:
        return False
    return num_tokens >= source.block_size and fetches.pays(worker, source, num_blocks)


def _num_blocks(live: list[Sequence]) -> int:
    """Count the blocks of a group. Those of most, which have one member, are not read: each plan may ask for all."""
    if len(live) == 1:
        return len(live[0].block_table)
    return len({block for sequence in live for block in sequence.block_table})


def _num_tokens_to_go(group: SequenceGroup) -> int:
    return max(sequence.worst_case_tokens - sequence.num_tokens for sequence in group.live)
