"""Placing of blocks that have come from another worker, in the destination's prefix cache, with its next plans.

A plan that has rows of other groups places a few at a time, since these wait for it. Functions over the destination's
state, which holds a reference to each block until all of the fetch are placed. Knows nothing of queues and calls.
"""

from collections.abc import Sequence as Seq

from scheduler_svc.core.worker_state import PlacedBlock, WorkerState

_MOST_STEPS = 32  # that place a fetch, however large it is


def num_placeable_blocks(worker: WorkerState, num_left: int, num_come: int) -> int:
    """Return how many of the blocks that are left of a fetch, of which so many have come, the next plan may place.

    That are all where no row waits for them, and beside prompts, whose steps take longer anyway.
    """
    most = _most_placed(worker, num_come)
    if most is None or any(each.num_tokens - each.num_computed_tokens > 1 for each in worker.catching_up):
        return num_left
    return max(0, min(num_left, most - len(worker.unsent_placed)))


def num_placing_steps(worker: WorkerState, num_blocks: int) -> int:
    """Return how many steps of the worker would place a fetch of so many blocks, with the rows that it has now.

    The group starts with the last of them.
    """
    most = _most_placed(worker, num_blocks)
    return 1 if most is None else -(-num_blocks // most)


def _most_placed(worker: WorkerState, num_come: int) -> int | None:
    """Return how many blocks of a fetch one plan places beside rows that wait for it; None: there are none."""
    if worker.max_placed_blocks is None or worker.trial is not None or not worker.running:
        return None
    return max(worker.max_placed_blocks, -(-num_come // _MOST_STEPS))


def place_blocks(worker: WorkerState, fetch_id: int, hashes: Seq[bytes], indices: range) -> tuple[int, bool]:
    """Put blocks of a fetch into the prefix cache; the next plan has them placed before it computes.

    Return how many are new there, and whether there was room for all of them. A block that the cache has already is
    not placed.
    """
    held = worker.placed_by_fetches[fetch_id]
    num_new = 0
    for index in indices:
        here = worker.blocks.find(hashes[index])
        if here is not None:  # computed here meanwhile
            worker.blocks.share([here])
            held.append(here)
            continue
        if worker.blocks.num_available_blocks <= worker.num_watermark_blocks:
            return num_new, False
        block = worker.blocks.allocate_block()
        held.append(block)
        worker.blocks.register(block, hashes[index])
        worker.unsent_placed[block] = PlacedBlock(fetch_id, index, hashes[index])
        num_new += 1
        worker.num_fetched_blocks += 1
    return num_new, True


def drop_unsent(worker: WorkerState, fetch_id: int) -> None:
    """Forget the blocks of a fetch that no plan has placed yet: the worker keeps their content no more."""
    for block, placed in list(worker.unsent_placed.items()):
        if placed.fetch_id == fetch_id:
            del worker.unsent_placed[block]
            worker.blocks.forget(placed.block_hash)
