"""Rotating heads and writing them into slots by kernel, against the torch reference."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.layers import layer_ops, rotary_write
from kernels.layers.layer_ops import Rotary
from tests.kernels.on_device.devices import DEVICE, DTYPES, needs_e4m3
from tests.kernels.on_device.tolerance import assert_as_exact_as_torch

NUM_BLOCKS, NUM_LAYERS, LAYER = 7, 3, 1
HEADS = [(4, 4, 16), (8, 2, 32), (5, 1, 20), (12, 9, 8)]  # query heads, key-value heads, head dimension


@dataclass(frozen=True)
class Case:
    """Heads of some tokens as views of one product, and a pool of NaN with slots for them."""

    heads: tuple[int, int, int]
    qkv: Tensor  # [T, num_heads + 2 * num_kv_heads, head_dim]
    pool: Tensor
    slots: Tensor
    rotary: Rotary | None

    def run(self, function: object, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The queries and the pool that `function` leaves, on copies in `dtype`."""
        assert callable(function)
        qkv, pool = self.qkv.to(dtype, copy=True), self.pool.to(dtype, copy=True)
        query, key, value = torch.split(qkv, [self.heads[0], self.heads[1], self.heads[1]], dim=1)
        rotary = None if self.rotary is None else Rotary(*(angle.to(dtype) for angle in self.rotary))
        before = key.clone(), value.clone()
        function(query, key, value, rotary, pool[:, LAYER, 0], pool[:, LAYER, 1], self.slots)
        assert torch.equal(key, before[0])
        assert torch.equal(value, before[1])
        return query, pool


def case_of(
    heads: tuple[int, int, int], dtype: torch.dtype, *, rotary_dim: int, block_size: int = 4, num_tokens: int = 11
) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(num_heads + rotary_dim + block_size)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    pool = torch.full((NUM_BLOCKS, NUM_LAYERS, 2, block_size, num_kv_heads, head_dim), torch.nan)
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:num_tokens]
    angles = torch.rand(num_tokens, rotary_dim // 2, generator=generator) * 1000
    rotary = Rotary(angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)) if rotary_dim else None
    return Case(heads, qkv.to(DEVICE, dtype), pool.to(DEVICE, dtype), slots.to(DEVICE), rotary)


def check(case: Case, dtype: torch.dtype) -> None:
    query, pool = case.run(rotary_write.rotate_and_write, dtype)
    same_query, same_pool = case.run(layer_ops.rotate_and_write, dtype)
    exact_query, exact_pool = case.run(layer_ops.rotate_and_write, torch.float64)
    assert_as_exact_as_torch(query, same_query, exact_query)
    written = ~same_pool.isnan()
    assert torch.equal(~pool.isnan(), written)
    assert_as_exact_as_torch(pool[written], same_pool[written], exact_pool[written])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_all_dimensions_rotate(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(case_of(heads, dtype, rotary_dim=heads[2]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [2, 10, 18])
def test_some_dimensions_rotate_and_the_others_stay(rotary_dim: int, dtype: torch.dtype) -> None:
    check(case_of((6, 3, 20), dtype, rotary_dim=rotary_dim), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_rotation_keys_and_values_are_written_and_queries_stay(dtype: torch.dtype) -> None:
    case = case_of((8, 2, 32), dtype, rotary_dim=0)
    query, pool = case.run(rotary_write.rotate_and_write, dtype)
    assert torch.equal(query, case.qkv[:, :8])
    torch.testing.assert_close(pool, case.run(layer_ops.rotate_and_write, dtype)[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_every_block_size_has_its_slots(block_size: int, num_tokens: int) -> None:
    case = case_of((4, 2, 16), torch.float32, rotary_dim=16, block_size=block_size, num_tokens=num_tokens)
    check(case, torch.float32)


def test_padding_is_never_written() -> None:
    case = case_of((4, 2, 16), torch.float32, rotary_dim=16)
    case.slots[[0, 5, 10]] = -1
    check(case, torch.float32)
    assert (~case.run(rotary_write.rotate_and_write, torch.float32)[1].isnan()).sum() == 8 * 2 * 2 * 16


def test_no_tokens_write_nothing() -> None:
    case = case_of((4, 2, 16), torch.float32, rotary_dim=16, num_tokens=0)
    assert case.run(rotary_write.rotate_and_write, torch.float32)[1].isnan().all()


@needs_e4m3
def test_a_cache_of_e4m3_never_overflows() -> None:
    """Uses numbers that e4m3 has: rounding up to the next power of two is wrong in the interpreter."""
    case = case_of((4, 2, 16), torch.float32, rotary_dim=0)
    qkv = case.qkv.to(torch.float8_e4m3fn).float()
    qkv[2], qkv[5] = 460.0, -1e30
    pools = []
    for function in (rotary_write.rotate_and_write, layer_ops.rotate_and_write):
        query, key, value = torch.split(qkv, [4, 2, 2], dim=1)
        pool = torch.zeros(case.pool.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
        function(query, key, value, None, pool[:, LAYER, 0], pool[:, LAYER, 1], case.slots)
        pools.append(pool.float())
    assert pools[0].max() == 448
    assert pools[0].min() == -448
    assert torch.equal(*pools)


def test_every_tensor_has_its_own_strides() -> None:
    case = case_of((4, 2, 16), torch.float32, rotary_dim=16)
    query, key, value = (part.contiguous() for part in torch.split(case.qkv, [4, 2, 2], dim=1))
    value = torch.cat((value, value), dim=1)[:, :2]
    results = []
    for function in (rotary_write.rotate_and_write, layer_ops.rotate_and_write):
        rotated = query.clone()
        key_pool, value_pool = torch.zeros_like(case.pool), torch.zeros_like(case.pool[:, :2])
        function(rotated, key, value, case.rotary, key_pool[:, 0, 0], value_pool[:, 1, 1], case.slots)
        results.append((rotated, key_pool, value_pool))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


def test_slots_beyond_the_reach_of_32_bits_are_written() -> None:
    """32,768 blocks of 16 x 4,128 elements in all layers together: 2^31 of them come before block 32,515."""
    shape = (32_768, 1, 2, 16, 2, 1032)
    pool = torch.empty(shape, dtype=torch.float16, device=DEVICE)  # on a CPU most of it is never touched
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 1032, generator=generator).half().to(DEVICE) for _ in range(3))
    slots = torch.tensor([32_767 * 16 + 15, 3], device=DEVICE)
    rotary_write.rotate_and_write(query, key, value, None, pool[:, 0, 0], pool[:, 0, 1], slots)
    assert torch.equal(pool[32_767, 0, 0, 15], key[0])
    assert torch.equal(pool[32_767, 0, 1, 15], value[0])
    assert torch.equal(pool[0, 0, 0, 3], key[1])
