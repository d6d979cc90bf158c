"""Swaps whole blocks between the device's pool and pinned memory of the host.

Long runs go through the copy engines, which leave the multiprocessors to the model. Short ones would each cost a
launch, so one kernel moves them and reads or writes the host's memory directly. The torch reference is
`kernels.blocks.kv_blocks.swap_blocks`. Queues on the current stream.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.blocks.block_copy import launch_copies, table_on
from kernels.blocks.copy_order import apart

IntArray = npt.NDArray[np.int64]

COPY_ENGINE_RUN_BYTES = 512 * 1024  # from this size on a copy's launch costs little beside its transfer
# 8 KiB in flight each: several times the bus's bandwidth times latency, but few enough programs to leave the
# multiprocessors to the model, whose kernels run meanwhile.
GATHER_PROGRAMS = 64


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one pool to another, which may be on another device. Only queues the copies.

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
    """Copy all pairs [P, 2] in one launch; also works if both pools are on the device."""
    table = apart(pairs)
    device = destination.device if destination.is_cuda else source.device
    launch_copies(source, destination, table_on(device, table), table.num_groups, GATHER_PROGRAMS)


def copy_runs(source: Tensor, destination: Tensor, runs: IntArray) -> None:
    """Copy each run by one call."""
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
