"""Copying and swapping blocks by kernel, against the torch references, bit by bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.blocks import block_copy, block_swap, kv_blocks
from tests.kernels.on_device.devices import DEVICE, HAS_GPU

NUM_BLOCKS = 9
SHAPES = [(1,), (3, 2, 4, 2, 8), (2, 2, 5, 3, 7), (1, 2, 16, 8, 65)]  # the last is more than one chunk
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def pool_of(shape: tuple[int, ...], dtype: torch.dtype, num_blocks: int = NUM_BLOCKS) -> Tensor:
    """Make a pool of random bytes, so that any bit pattern occurs, NaN among them."""
    block_bytes = torch.Size(shape).numel() * dtype.itemsize
    random = torch.randint(-128, 128, (num_blocks, block_bytes), dtype=torch.int8)
    return random.view(dtype).view(num_blocks, *shape).to(DEVICE)


def host_pool_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    pool = pool_of(shape, dtype).cpu()
    return pool.pin_memory() if HAS_GPU else pool


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.int8), b.cpu().view(torch.int8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copied_blocks_equal_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = pool_of(shape, dtype)
    expected = pool.clone()
    pairs = torch.tensor([(0, 3), (3, 5), (0, 1), (8, 2)])
    kv_blocks.copy_blocks(expected, pairs)
    block_copy.copy_blocks(pool, pairs)
    assert same_bits(pool, expected)


@pytest.mark.parametrize(
    "pairs",
    [
        [(4, 4)],
        [(0, 1), (1, 0)],
        [(0, 1), (1, 2), (2, 0), (1, 5), (5, 6), (7, 8)],
        [(5, 6), (4, 5), (3, 4), (3, 8), (8, 0)],
        [(block, (block + 1) % NUM_BLOCKS) for block in range(NUM_BLOCKS)],
    ],
    ids=["itself", "exchange", "cycle with tails", "tree", "ring"],
)
def test_sources_are_read_before_they_are_overwritten(pairs: list[tuple[int, int]]) -> None:
    pool = pool_of((2, 2, 4, 2, 8), torch.float16)
    expected = pool.clone()
    kv_blocks.copy_blocks(expected, torch.tensor(pairs))
    block_copy.copy_blocks(pool, torch.tensor(pairs))
    assert same_bits(pool, expected)


def test_no_pairs_copy_nothing() -> None:
    pool = pool_of((2, 3), torch.float32)
    before = pool.clone()
    block_copy.copy_blocks(pool, torch.empty((0, 2), dtype=torch.int64))
    block_swap.swap_blocks(pool, host_pool_of((2, 3), torch.float32), torch.empty((0, 2), dtype=torch.int64))
    assert same_bits(pool, before)


def test_blocks_beyond_the_reach_of_32_bits_are_copied() -> None:
    words = 65_537  # of one byte, an odd number: 2^31 of them come before block 32,767
    pool = torch.empty((32_769, words), dtype=torch.int8, device=DEVICE)  # on a CPU most of it is never touched
    pool[5] = torch.arange(words, device=DEVICE) % 127
    block_copy.copy_blocks(pool, torch.tensor([(5, 32_768)]))
    assert same_bits(pool[32_768], pool[5])
    block_copy.copy_blocks(pool, torch.tensor([(32_768, 32_767)]))
    assert same_bits(pool[32_767], pool[5])


@pytest.mark.parametrize("block_bytes", [64, 4 * block_swap.COPY_ENGINE_RUN_BYTES], ids=["kernel", "copy engine"])
def test_swapped_blocks_come_back_bit_by_bit(block_bytes: int) -> None:
    shape = (block_bytes // 2,)
    device, host = pool_of(shape, torch.float16), host_pool_of(shape, torch.float16)
    before, expected = device.clone(), host.clone()
    pairs = torch.tensor([(6, 2), (1, 5), (2, 6), (4, 0)])
    kv_blocks.swap_blocks(before.cpu(), expected, pairs)
    block_swap.swap_blocks(device, host, pairs)
    if HAS_GPU:
        torch.cuda.synchronize()
    assert same_bits(host, expected)
    device[[1, 2, 4, 6]] = 0
    block_swap.swap_blocks(host, device, pairs.flip(1))
    assert same_bits(device, before)


def test_neighbours_in_both_pools_are_one_run() -> None:
    pairs = [(0, 4), (1, 5), (2, 6), (4, 7), (5, 9), (6, 8)]
    runs = block_swap.contiguous_runs(np.array(pairs))
    assert runs.tolist() == [[0, 4, 3], [4, 7, 1], [5, 9, 1], [6, 8, 1]]


def test_runs_and_single_copies_do_the_same() -> None:
    source, destination = pool_of((3, 5), torch.float32), pool_of((3, 5), torch.float32)
    other = destination.clone()
    pairs = np.array([(0, 4), (1, 5), (2, 6), (4, 7), (5, 1)])
    block_swap.copy_runs(source, destination, block_swap.contiguous_runs(pairs))
    block_swap.gather_blocks(source, other, pairs)
    assert same_bits(destination, other)
