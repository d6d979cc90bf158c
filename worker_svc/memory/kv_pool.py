"""The worker's KV memory: the device pool, and the host pool for swapping.

`KVPool` owns both tensors and moves blocks as told. It knows nothing of sequences or reference counts: only the
scheduler knows which block is free, shared or swapped. `pool_plan` chooses the sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.blocks.kv_blocks import copy_blocks, swap_blocks
from kernels.native.cpu_kernels import stored_row
from kernels.native.host_memory import zeros_as_used
from quire import machine


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Shape of one block: keys and values of `block_size` tokens in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    # As stored: the model's dtype; float8_e4m3fn, for the device runner alone; or int8 with the scales among the bytes,
    # for native kernels alone.
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """`[num_layers, 2, block_size, num_kv_heads, head_dim]`; in int8 each head has room for its scale as well."""
        row = stored_row(self.head_dim, self.dtype)
        return self.num_layers, 2, self.block_size, self.num_kv_heads, row

    @property
    def bytes_per_block(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class KVPool:
    """Blocks `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]` on the device, and on the host.

    The block is the first dimension, so that copying or swapping a block is one contiguous copy for all layers (design,
    Memory). On a CPU the native kernels may order a layer's part of a block their own way, and in int8 it includes the
    scales.
    """

    def __init__(
        self,
        shape: BlockShape,
        num_blocks: int,
        device: torch.device,
        num_host_blocks: int = 0,
        num_fetched_blocks: int = 0,
    ) -> None:
        """`num_fetched_blocks`: main memory for blocks of other workers, until they are placed."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        block = shape.sizes
        if device.type == "cpu":
            self.blocks = zeros_as_used((num_blocks, *block), shape.dtype)
        else:
            self.blocks = torch.zeros((num_blocks, *block), dtype=shape.dtype, device=device)
        self.host_blocks = torch.zeros(
            (num_host_blocks, *block),
            dtype=shape.dtype,
            pin_memory=device.type == "cuda" and num_host_blocks > 0,
        )
        self.fetched_blocks = _main_memory((num_fetched_blocks, *block), shape.dtype, device)
        self._key_caches = tuple(self.blocks[:, layer, 0] for layer in range(shape.num_layers))
        self._value_caches = tuple(self.blocks[:, layer, 1] for layer in range(shape.num_layers))

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def key_cache(self, layer: int) -> Tensor:
        """One layer's keys, a strided view [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._key_caches[layer]

    def value_cache(self, layer: int) -> Tensor:
        """One layer's values, a strided view [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._value_caches[layer]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy-on-write: (source, destination) pairs; all sources are read before any destination is written."""
        if pairs:
            copy_blocks(self.blocks, _as_tensor(pairs))

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Save blocks to the host: (device block, host block) pairs."""
        if pairs:
            swap_blocks(self.blocks, self.host_blocks, _as_tensor(pairs))

    def place(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Take blocks of other workers into the pool: (fetched block, device block) pairs."""
        if pairs:
            swap_blocks(self.fetched_blocks, self.blocks, _as_tensor(pairs))

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Bring blocks back: (host block, device block) pairs."""
        if pairs:
            swap_blocks(self.host_blocks, self.blocks, _as_tensor(pairs))


def as_bytes(blocks: Tensor) -> npt.NDArray[np.uint8]:
    """Blocks in main memory, [num_blocks, bytes_per_block]; the same memory."""
    return blocks.view(len(blocks), math.prod(blocks.shape[1:])).view(torch.uint8).numpy()


def _main_memory(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for blocks: pinned for a CUDA device, else taken as it is used."""
    if device.type == "cuda" and sizes[0] > 0:
        return torch.zeros(sizes, dtype=dtype, pin_memory=True)
    return zeros_as_used(sizes, dtype)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that a pool on this device could take now; on a CPU, within the container's limit if there is one."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else machine.free_memory_bytes()


def _as_tensor(pairs: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64)
