"""Pinned prefixes: cached blocks of one worker that are kept out of eviction until they are unpinned.

A pin holds one reference to each of its blocks. It is refused if it would leave too little memory for a group that
was admitted: no admitted group is ever dropped for lack of memory.
"""

from collections.abc import Iterable, Sequence

from scheduler_svc.core.placement import WorkerLimits, can_ever_hold
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.worker_state import WorkerState


class PinRefusedError(ValueError):
    """Refusal of a pin that would take memory promised to a group. Nothing has changed."""


def pinned_blocks(worker: WorkerState, block_hashes: Sequence[bytes]) -> list[int] | None:
    """Return the blocks with these hashes, if all are there and computed."""
    blocks = worker.blocks.lookup(block_hashes)
    if len(blocks) < len(block_hashes) or not worker.blocks_in_doubt().isdisjoint(blocks):
        return None
    return blocks


def check_promises(
    worker: WorkerState,
    blocks: list[int],
    workers: Iterable[WorkerState],
    waiting: Iterable[SequenceGroup],
    limits: WorkerLimits,
) -> None:
    """Raise PinRefusedError if these blocks, once pinned, would leave too few for an admitted group."""
    running = [sequence.group for sequence in worker.running]
    promised = dict.fromkeys([*running, *worker.parked, *worker.swapped, *worker.paused])
    num_left = worker.capacity_blocks - len(set(blocks) - _all_pinned(worker))
    num_needed = max((group.worst_case_blocks(worker.block_size) for group in promised), default=0)
    for group in waiting:
        num_of_group = group.worst_case_blocks(worker.block_size)
        if num_of_group <= num_left or num_of_group <= num_needed:
            continue  # most often: so other workers are hardly ever looked at
        if [other for other in workers if can_ever_hold(other, group, limits)] == [worker]:
            num_needed = num_of_group
    if num_needed > num_left:
        raise PinRefusedError(
            f"the pin would leave {num_left} KV blocks on worker {worker.worker_id}, and an accepted request may need "
            f"{num_needed}: come back when it has finished, or unpin another prefix"
        )


def add_pin(worker: WorkerState, name: str, blocks: list[int]) -> None:
    worker.blocks.share(blocks)
    worker.pins[name] = blocks
    worker.num_pinned_blocks = len(_all_pinned(worker))


def remove_pin(worker: WorkerState, name: str) -> None:
    """Remove a pin; no-op if there is none. Its blocks stay in the cache like others."""
    worker.blocks.free(worker.pins.pop(name, []))
    worker.num_pinned_blocks = len(_all_pinned(worker))


def _all_pinned(worker: WorkerState) -> set[int]:
    return {block for blocks in worker.pins.values() for block in blocks}
