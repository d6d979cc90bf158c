"""Swapping whole blocks between the device's pool and pinned memory of the host.

Long runs go through the copy engines, which leave the multiprocessors to the model; many short ones would each cost
a launch, and are moved by one kernel that reads or writes the host's memory directly. The torch reference is
`kernels.blocks.kv_blocks.swap_blocks`. It knows no streams: what is queued goes to the current one.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.blocks.block_copy import launch_copies, table_on
from kernels.blocks.copy_order import apart

IntArray = npt.NDArray[np.int64]

COPY_ENGINE_RUN_BYTES = 512 * 1024  # from here on a copy's own cost is small beside its transfer
# 8 KiB each on the way: several times what the bus transfers while one access of it takes, and few enough to leave
# the multiprocessors to the model, whose kernels run meanwhile.
GATHER_PROGRAMS = 64


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one pool to another, which may live on another device. It only queues the copies.

    source:      [num_source_blocks, ...], contiguous
    destination: [num_destination_blocks, ...], the same block shape and dtype; the one on the host pinned
    pairs:       [P, 2] int64, (source block, destination block), on the CPU, no destination twice
    """
    ordered = pairs.numpy()
    ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
    if not len(ordered):
        return
    runs = contiguous_runs(ordered)
    block_bytes = source[0].numel() * source.element_size()
    if len(ordered) * block_bytes >= len(runs) * COPY_ENGINE_RUN_BYTES:
        copy_runs(source, destination, runs)
    else:
        gather_blocks(source, destination, ordered)


def gather_blocks(source: Tensor, destination: Tensor, pairs: IntArray) -> None:
    """One launch for all pairs [P, 2], which also works where neither pool is the host's."""
    table = apart(pairs)
    device = destination.device if destination.is_cuda else source.device
    launch_copies(source, destination, table_on(device, table), table.num_groups, GATHER_PROGRAMS)


def copy_runs(source: Tensor, destination: Tensor, runs: IntArray) -> None:
    """One copy for each run."""
    for first_source, first_destination, num_blocks in runs.tolist():
        blocks = source[first_source : first_source + num_blocks]
        destination[first_destination : first_destination + num_blocks].copy_(blocks, non_blocking=True)


def contiguous_runs(pairs: IntArray) -> IntArray:
    """Join pairs [P, 2], sorted by source, that follow each other in both pools.

    Returns [num_runs, 3]: first source, first destination, number of blocks.
    """
    is_start = np.ones(len(pairs), dtype=np.bool_)
    is_start[1:] = (np.diff(pairs, axis=0) != 1).any(axis=1)
    starts = np.flatnonzero(is_start)
    return np.column_stack([pairs[starts], np.diff(np.append(starts, len(pairs)))])
