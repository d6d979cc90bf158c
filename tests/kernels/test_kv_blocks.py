"""Copying and swapping blocks."""

import torch

from kernels.blocks.kv_blocks import block_row_stride, copy_blocks, flat_token_rows, swap_blocks

BLOCKS, LAYERS, BLOCK_SIZE, HEADS, HEAD_DIM = 6, 3, 4, 2, 8


def _pool(seed: int = 0) -> torch.Tensor:
    shape = (BLOCKS, LAYERS, 2, BLOCK_SIZE, HEADS, HEAD_DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_flat_rows_name_every_token_of_a_layer() -> None:
    pool = _pool()
    cache = pool[:, 2, 1]
    rows = flat_token_rows(cache)
    for block in range(BLOCKS):
        for offset in range(BLOCK_SIZE):
            row = rows[block * block_row_stride(cache) + offset]
            assert torch.equal(row.view(HEADS, HEAD_DIM), cache[block, offset])


def test_copied_blocks_hold_all_layers_and_sources_are_read_first() -> None:
    pool = _pool()
    before = pool.clone()
    copy_blocks(pool, torch.tensor([(0, 3), (3, 5), (0, 1)]))
    assert torch.equal(pool[3], before[0])
    assert torch.equal(pool[5], before[3])
    assert torch.equal(pool[1], before[0])
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


def test_one_block_is_copied_to_several_that_are_no_sources() -> None:
    pool = _pool()
    before = pool.clone()
    copy_blocks(pool, torch.tensor([(2, 5), (2, 0), (4, 1)]))
    assert torch.equal(pool[[5, 0, 1]], before[[2, 2, 4]])
    assert torch.equal(pool[[2, 3, 4]], before[[2, 3, 4]])


def test_swapped_blocks_come_back_as_they_were() -> None:
    device, host = _pool(), _pool(seed=1)[:3].clone()
    before, host_before = device.clone(), host.clone()
    swap_blocks(device, host, torch.tensor([(4, 0), (1, 2)]))
    assert torch.equal(host[0], before[4])
    assert torch.equal(host[2], before[1])
    assert torch.equal(host[1], host_before[1])
    device[[4, 1]] = float("nan")
    swap_blocks(host, device, torch.tensor([(0, 1), (2, 4)]))
    assert torch.equal(device[1], before[4])
    assert torch.equal(device[4], before[1])
