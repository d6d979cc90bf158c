"""Swapping whole blocks between the device's pool and pinned memory of the host.

Long runs go through the copy engines, which leave the multiprocessors to the model; many short ones would each cost
a launch, and are moved by one kernel that reads or writes the host's memory directly. The torch reference is
`kernels.blocks.kv_blocks.swap_blocks`. It knows no streams: what is queued goes to the current one.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from kernels.blocks.block_copy import copy_by_table, table_on
from kernels.blocks.copy_order import Pair, copy_table

COPY_ENGINE_RUN_BYTES = 512 * 1024  # from here on a copy's own cost is small beside its transfer


class Run(NamedTuple):
    """Neighbouring blocks whose copies are neighbours too."""

    source: int
    destination: int
    num_blocks: int


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one pool to another, which may live on another device. It only queues the copies.

    source:      [num_source_blocks, ...], contiguous
    destination: [num_destination_blocks, ...], the same block shape and dtype; the one on the host pinned
    pairs:       [P, 2] int64, (source block, destination block), on the CPU, no destination twice
    """
    ordered: list[Pair] = sorted((first, second) for first, second in pairs.tolist())
    if not ordered:
        return
    runs = contiguous_runs(ordered)
    block_bytes = source[0].numel() * source.element_size()
    if len(ordered) * block_bytes >= len(runs) * COPY_ENGINE_RUN_BYTES:
        copy_runs(source, destination, runs)
    else:
        table = copy_table([[pair] for pair in ordered])
        device = destination.device if destination.is_cuda else source.device
        copy_by_table(source, destination, table_on(device, table), table.num_groups)


def copy_runs(source: Tensor, destination: Tensor, runs: Sequence[Run]) -> None:
    """One copy for each run."""
    for run in runs:
        blocks = source[run.source : run.source + run.num_blocks]
        destination[run.destination : run.destination + run.num_blocks].copy_(blocks, non_blocking=True)


def contiguous_runs(pairs: Sequence[Pair]) -> list[Run]:
    """Join pairs that follow each other in both pools; `pairs` sorted by source."""
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(pairs), 1) if b != (a[0] + 1, a[1] + 1)), len(pairs)]
    return [Run(*pairs[start], end - start) for start, end in pairwise(starts)]
