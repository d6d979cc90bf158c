"""The pool's layout, its block moves, and how its size is chosen."""

from dataclasses import replace
from pathlib import Path

import torch

from quire import machine
from worker_svc.memory.kv_pool import BlockShape, KVPool, free_memory_bytes

CPU = torch.device("cpu")
SHAPE = BlockShape(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16)


def _pool(num_host_blocks: int = 0) -> KVPool:
    pool = KVPool(SHAPE, num_blocks=5, device=CPU, num_host_blocks=num_host_blocks)
    pool.blocks.copy_(torch.arange(pool.blocks.numel()).view(pool.blocks.shape))
    return pool


def test_a_block_holds_keys_and_values_of_all_layers_contiguously() -> None:
    pool = _pool()
    assert pool.blocks.shape == (5, 3, 2, 4, 2, 8)
    assert SHAPE.bytes_per_block == 3 * 2 * 4 * 2 * 8 * 2  # layers, K and V, tokens, heads, head_dim, bytes
    assert pool.blocks[0].is_contiguous()
    assert pool.blocks[0].nbytes == SHAPE.bytes_per_block


def test_layer_caches_are_views_of_the_pool() -> None:
    pool = _pool()
    pool.key_cache(1)[2, 3] = -1.0
    pool.value_cache(2)[4, 0] = -2.0
    assert (pool.blocks[2, 1, 0, 3] == -1.0).all()
    assert (pool.blocks[4, 2, 1, 0] == -2.0).all()


def test_blocks_are_copied_swapped_out_and_swapped_in_by_pairs() -> None:
    pool = _pool(num_host_blocks=2)
    before = pool.blocks.clone()
    pool.copy_blocks([(0, 4)])
    pool.swap_out([(4, 1), (2, 0)])
    pool.blocks[2] = 0.0
    pool.swap_in([(0, 3), (1, 2)])
    assert torch.equal(pool.blocks[4], before[0])
    assert torch.equal(pool.blocks[3], before[2])
    assert torch.equal(pool.blocks[2], before[0])


def test_blocks_of_e4m3_take_half_the_memory_and_move_as_others_do() -> None:
    shape = replace(SHAPE, dtype=torch.float8_e4m3fn)
    assert 2 * shape.bytes_per_block == SHAPE.bytes_per_block
    pool = KVPool(shape, num_blocks=5, device=CPU, num_host_blocks=2)
    assert (pool.blocks.float() == 0.0).all()
    as_bytes = pool.blocks.view(torch.uint8)
    as_bytes.random_(generator=torch.Generator().manual_seed(0))  # NaN among them
    before = as_bytes.clone()
    pool.copy_blocks([(0, 4), (4, 1)])  # a source that is also a destination
    pool.copy_blocks([(2, 3)])
    assert torch.equal(as_bytes, before[[0, 4, 2, 2, 0]])
    pool.swap_out([(1, 1), (0, 0)])
    pool.swap_in([(1, 0), (0, 2)])
    assert torch.equal(as_bytes, before[[4, 4, 0, 2, 0]])


def test_no_pairs_are_nothing_to_do() -> None:
    pool = _pool()
    before = pool.blocks.clone()
    pool.copy_blocks([])
    pool.swap_out([])
    pool.swap_in([])
    assert torch.equal(pool.blocks, before)


def test_a_pool_far_larger_than_what_is_used_of_it_takes_no_memory_at_its_start() -> None:
    before = machine.own_memory_bytes()
    pool = KVPool(SHAPE, num_blocks=(4 << 30) // SHAPE.bytes_per_block, device=CPU)
    pool.blocks[-1] = 1.0
    assert machine.own_memory_bytes() - before < 256 << 20


def test_free_memory_of_the_cpu_is_positive_and_no_more_than_the_machine_has() -> None:
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < free_memory_bytes(CPU) <= total_kib * 1024
