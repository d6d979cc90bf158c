"""Keys and values in int8: what is stored is near what was given, and attention follows its formula over what is there.

The layout inside a block is read here as `src/cache.h` says it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.native.cpu_kernels import CacheShape, LayerCache, layer_caches
from kernels.native.native_kernels import NativeKernels
from tests.kernels.native.attention_cases import DECODE, DTYPES, PREFILL, SLACK, Case, attention_case

BLOCK_SIZES = pytest.mark.parametrize("block_size", [1, 5, 16, 48, 256])


def stored(side: Tensor, shape: CacheShape, slots: Tensor, *, keys: bool) -> tuple[Tensor, Tensor]:
    """Numbers [slots, num_kv_heads, head_dim] and their steps [slots, num_kv_heads, 1], of keys or of values."""
    size, dim = shape.block_size, shape.head_dim
    heads = side.view(len(side), shape.num_kv_heads, size * (dim + 4))
    whole, scales = heads[:, :, : size * dim].float(), heads[:, :, size * dim :].contiguous().view(torch.float32)
    is_packed = size % 16 == dim % 16 == 0
    whole = whole.unflatten(2, (dim, size)).transpose(2, 3) if keys and is_packed else whole.unflatten(2, (size, dim))
    blocks, offsets = slots // size, slots % size
    steps = scales[blocks, :, offsets].unsqueeze(2)
    return whole[blocks, :, offsets] * steps, steps


def sides(cache: LayerCache, slots: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split the cache into the parts of the keys and of the values."""
    return stored(cache.keys, cache.shape, slots, keys=True), stored(cache.values, cache.shape, slots, keys=False)


def int8_case(
    kernels: NativeKernels,
    spans: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A case whose keys and values are those that are stored."""
    case = attention_case(kernels, spans, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, int8=True)
    keys, values = [], []
    for row, (_, context) in enumerate(spans):
        (key, _), (value, _) = sides(case.cache, slots_of(case, row, context))
        keys.append(key)
        values.append(value)
    return replace(case, keys=keys, values=values)


def slots_of(case: Case, row: int, context: int) -> Tensor:
    size, position = case.cache.shape.block_size, torch.arange(context)
    return case.rows.block_tables[row].long()[position // size] * size + position % size


@DTYPES
@BLOCK_SIZES
@pytest.mark.parametrize("head_dim", [16, 20, 64])
def test_each_number_is_stored_within_half_a_step_of_its_tokens_and_heads_own_scale(
    native: NativeKernels, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    case = attention_case(
        native, [(1, 70), (1, 3)], heads=(4, 2), head_dim=head_dim, block_size=block_size, dtype=dtype, int8=True
    )
    for row, (_, context) in enumerate(case.spans):
        both = sides(case.cache, slots_of(case, row, context))
        for (numbers, steps), given in zip(both, (case.keys[row].float(), case.values[row].float()), strict=True):
            torch.testing.assert_close(steps, given.abs().amax(2, keepdim=True) / 127, rtol=1e-6, atol=0.0)
            assert ((numbers - given).abs() <= 0.5001 * steps).all()


@DTYPES
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1), (48, 1)])
@pytest.mark.parametrize("spans", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_attention_is_as_good_as_the_formula_over_what_is_stored(
    native: NativeKernels, heads: tuple[int, int], spans: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    case = int8_case(native, spans, heads=heads, dtype=dtype)
    error, own = case.error(native)
    assert error <= 2 * own + SLACK[dtype]


@DTYPES
@BLOCK_SIZES
def test_blocks_of_any_size_are_read_in_place(native: NativeKernels, block_size: int, dtype: torch.dtype) -> None:
    case = int8_case(native, [*DECODE, *PREFILL], block_size=block_size, dtype=dtype)
    error, own = case.error(native)
    assert error <= 2 * own + SLACK[dtype]


@DTYPES
@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 256])
def test_heads_of_any_size_are_attended(native: NativeKernels, head_dim: int, dtype: torch.dtype) -> None:
    case = int8_case(native, [(1, 65), (19, 19), (1, 7), (5, 40)], heads=(3, 1), head_dim=head_dim, dtype=dtype)
    error, own = case.error(native)
    assert error <= 2 * own + SLACK[dtype]


@pytest.mark.parametrize("block_size", [16, 12])
@pytest.mark.parametrize("window", [1, 7, 17, 40])
def test_a_window_hides_what_is_before_it(native: NativeKernels, window: int, block_size: int) -> None:
    case = int8_case(native, [*DECODE, *PREFILL], block_size=block_size)
    error, own = case.error(native, window)
    assert error <= 2 * own + SLACK[torch.float32]


@pytest.mark.parametrize("window", [None, 900])
@pytest.mark.parametrize("block_size", [16, 12])
def test_a_long_context_alone_is_split(
    native_on_two_threads: NativeKernels, block_size: int, window: int | None
) -> None:
    native = native_on_two_threads
    case = int8_case(native, [(1, 2500)], heads=(2, 1), block_size=block_size)
    plan = native.plan(case.rows, case.cache, window)
    assert native.num_units(plan) > 1  # of one row with one key-value head
    error, own = case.error(native, window)
    assert error <= 2 * own + SLACK[torch.float32]


@DTYPES
@pytest.mark.parametrize("block_size", [16, 12])
def test_a_query_gets_the_same_bits_whoever_is_beside_it_and_however_its_prompt_is_cut(
    native: NativeKernels, block_size: int, dtype: torch.dtype
) -> None:
    length = 1100
    case = int8_case(native, [(length, length)], heads=(3, 1), block_size=block_size, dtype=dtype)
    whole = case.attend(native)
    for begin, end in pairwise([0, 1, 2, 37, 600, 601, length - 1, length]):
        piece = replace(
            case,
            qkv=case.qkv[begin:end],
            rows=replace(
                case.rows,
                query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                context_lens=torch.tensor([end], dtype=torch.int32),
            ),
        )
        assert torch.equal(piece.attend(native), whole[begin:end]), (begin, end)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("part", [1, 2], ids=["key", "value"])
def test_a_number_that_is_not_finite_spoils_its_own_row_alone(
    native: NativeKernels, part: int, block_size: int, bad: float
) -> None:
    """Without a finite step, none of the numbers of its head can be restored."""
    case = int8_case(native, [(1, 40), (1, 30)], heads=(1, 1), block_size=block_size)
    token = torch.ones(1, 3, 32)
    token[0, part, 7] = bad
    last = slots_of(case, 0, 40)[-1:]
    native.rotate_and_write(token.flatten(1), None, torch.tensor([39]), last, case.cache)
    out = case.attend(native)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e38])
def test_the_smallest_and_greatest_numbers_have_steps_too(native: NativeKernels, size: float) -> None:
    shape = CacheShape(num_heads=1, num_kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, int8=True)
    cache = layer_caches(torch.zeros(1, 1, 2, shape.side_numel, dtype=torch.int8), shape)[0]
    given = torch.linspace(-1, 1, 48).view(1, 48) * size
    native.rotate_and_write(given.clone(), None, torch.tensor([0]), torch.tensor([3]), cache)
    both = sides(cache, torch.tensor([3]))
    for (numbers, _), expected in zip(both, given.view(3, 16)[1:], strict=True):
        error = (numbers.flatten().double() - expected.double()).abs().max()
        assert error <= expected.double().abs().max() / 253 + 2e-36  # what is far below any key is zero


@pytest.mark.parametrize("block_size", [16, 5])
def test_padding_is_not_written_and_a_token_touches_its_own_slot_and_scale_alone(
    native: NativeKernels, block_size: int
) -> None:
    shape = CacheShape(num_heads=2, num_kv_heads=2, head_dim=16, block_size=block_size, dtype=torch.float32, int8=True)
    pool = torch.zeros((4, 2, 2, shape.side_numel), dtype=torch.int8)
    qkv = torch.full((3, 6 * 16), 3.0)
    cache = layer_caches(pool, shape)[1]
    native.rotate_and_write(qkv, None, torch.arange(3), torch.tensor([block_size + 3, -1, 2 * block_size]), cache)
    scale = torch.tensor([3.0]).div(127).view(torch.int8).count_nonzero()
    written = 2 * 2 * (16 + int(scale))  # keys and values, heads, bytes
    assert pool.count_nonzero(dim=(2, 3)).tolist() == [[0, 0], [0, written], [0, written], [0, 0]]
