"""A KV pool that compares every block it moves, bit by bit, and can tell whether one was written since.

It knows blocks by their bytes alone.
"""

import hashlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from worker_svc.memory.kv_pool import BlockShape, KVPool


class AuditedPool(KVPool):
    """NaN wherever nothing was written, so that no answer survives a read of what is not there."""

    def __init__(self, shape: BlockShape, num_blocks: int, num_host_blocks: int) -> None:
        super().__init__(shape, num_blocks, torch.device("cpu"), num_host_blocks)
        self.num_swapped_in = 0
        self.num_copied = 0
        self._swapped: dict[int, bytes] = {}  # host block -> what was swapped out to it
        self.poison(range(num_blocks), range(num_host_blocks))

    def poison(self, blocks: Collection[int], host_blocks: Collection[int] = ()) -> None:
        """Poison blocks that must be written before they are read again."""
        if blocks:
            self.blocks[list(blocks)] = torch.nan
        if host_blocks:
            self.host_blocks[list(host_blocks)] = torch.nan
            for host_block in host_blocks:
                self._swapped.pop(host_block, None)

    def digest(self, block: int) -> bytes:
        return _digest(self.blocks[block])

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._swapped.update((host_block, self.digest(block)) for block, host_block in pairs)
        super().swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().swap_in(pairs)
        for host_block, block in pairs:
            assert self.digest(block) == self._swapped[host_block], f"host block {host_block} came back changed"
        self.num_swapped_in += len(pairs)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources = [self.digest(source) for source, _ in pairs]
        super().copy_blocks(pairs)
        for (source, destination), before in zip(pairs, sources, strict=True):
            assert self.digest(source) == before, f"block {source} was changed by its own copy"
            assert self.digest(destination) == before, f"block {destination} is no copy of block {source}"
        self.num_copied += len(pairs)


def _digest(block: Tensor) -> bytes:
    return hashlib.blake2b(block.contiguous().numpy().tobytes(), digest_size=16).digest()
