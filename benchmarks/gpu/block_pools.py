"""Pools in blocks, and the operations that move blocks between them: ours, and the paper's layer by layer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.blocks import block_copy, block_swap, kv_blocks
from kernels.blocks.copy_order import apart

SEED = 1


class Pools:
    """Bytes that are taken for blocks of one size after the other: twice what is moved on the device, once on the host.

    Where a block goes is drawn at random, the same for all operations of a block size.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self._num_bytes = num_bytes
        self._device_bytes = torch.randint(-128, 128, (2 * num_bytes,), dtype=torch.int8, device=device)
        self._host_bytes = torch.zeros(num_bytes, dtype=torch.int8, pin_memory=device.type == "cuda")

    def moves(self, block_bytes: int, num_bytes: int) -> "Moves":
        num_blocks = num_bytes // block_bytes
        device_blocks = self._device_bytes[: 2 * num_bytes].view(2 * num_blocks, block_bytes)
        host_blocks = self._host_bytes[:num_bytes].view(num_blocks, block_bytes)
        random = np.random.default_rng(SEED)
        on_device, on_host = random.permutation(2 * num_blocks), random.permutation(num_blocks)
        copies = np.stack([on_device[:num_blocks], on_device[num_blocks:]], axis=1)
        return Moves(device_blocks, host_blocks, copies, np.stack([on_device[:num_blocks], on_host], axis=1))

    def contiguous(self) -> dict[str, Callable[[], object]]:
        """Copy all bytes at once, by direction."""
        first, second, host = (
            self._device_bytes[: self._num_bytes],
            self._device_bytes[self._num_bytes :],
            self._host_bytes,
        )
        return {
            "copy on write": lambda: second.copy_(first),
            "swap out": lambda: host.copy_(first, non_blocking=True),
            "swap in": lambda: first.copy_(host, non_blocking=True),
        }


@dataclass(frozen=True, slots=True)
class Moves:
    """Pools in blocks, and the moves between them."""

    device_blocks: Tensor  # [num_device_blocks, block_bytes] int8
    host_blocks: Tensor  # [num_host_blocks, block_bytes] int8
    copies: block_swap.IntArray  # [P, 2] inside the device
    swaps: block_swap.IntArray  # [P, 2] (device block, host block)

    def operations(self, by_kernels: bool) -> dict[str, Callable[[], object]]:
        """Operations of a worker, by name. The table of copies is on the device already, from a step's upload."""
        device, host = self.device_blocks, self.host_blocks
        copy_by_table = block_copy.copy_by_table if by_kernels else kv_blocks.copy_by_table
        swap_blocks = block_swap.swap_blocks if by_kernels else kv_blocks.swap_blocks
        copy_table = apart(self.copies)
        on_device = block_copy.table_on(device.device, copy_table)
        swap_out, swap_in = torch.from_numpy(self.swaps), torch.from_numpy(self.swaps[:, ::-1].copy())
        return {
            "copy on write": lambda: copy_by_table(device, device, on_device, copy_table.num_groups),
            "swap out": lambda: swap_blocks(device, host, swap_out),
            "swap in": lambda: swap_blocks(host, device, swap_in),
        }

    def by_either_way(self) -> dict[str, Callable[[], object]]:
        """Swaps with the two methods of `swap_blocks`: its threshold belongs where their lines cross."""
        device, host = self.device_blocks, self.host_blocks
        swap_out = self.swaps[np.argsort(self.swaps[:, 0])]
        swap_in = self.swaps[np.argsort(self.swaps[:, 1])][:, ::-1].copy()
        return {
            "swap out, kernel": lambda: block_swap.gather_blocks(device, host, swap_out),
            "swap in, kernel": lambda: block_swap.gather_blocks(host, device, swap_in),
            "swap out, copy engines": lambda: block_swap.copy_runs(device, host, block_swap.contiguous_runs(swap_out)),
            "swap in, copy engines": lambda: block_swap.copy_runs(host, device, block_swap.contiguous_runs(swap_in)),
        }

    def layer_by_layer(self, num_pieces: int) -> dict[str, Callable[[], object]]:
        """Copy each block in pieces that lie far apart, as if every layer had pools of its own."""
        device = _pieces(self.device_blocks, num_pieces)
        host = _pieces(self.host_blocks, num_pieces)
        pairs = self.swaps.tolist()

        def swap_out() -> None:
            for device_block, host_block in pairs:
                for source, destination in zip(device, host, strict=True):
                    destination[host_block].copy_(source[device_block], non_blocking=True)

        return {"swap out, layer by layer": swap_out}

    def check(self) -> None:
        """Assert, after each operation ran once, that every block reached its destination and came back."""
        device, host = self.device_blocks, self.host_blocks.to(self.device_blocks.device)
        sources, destinations = torch.from_numpy(self.copies).to(device.device).unbind(1)
        swapped, saved = torch.from_numpy(self.swaps).to(device.device).unbind(1)
        assert torch.equal(device[destinations], device[sources]), "copied blocks differ"
        assert torch.equal(device[swapped], host[saved]), "swapped blocks differ"


def _pieces(blocks: Tensor, num_pieces: int) -> list[Tensor]:
    """View the same bytes as this many pools of smaller blocks, one after the other."""
    num_blocks, block_bytes = blocks.shape
    return list(blocks.view(num_pieces, num_blocks, block_bytes // num_pieces).unbind(0))
