"""Prefill attention's reference follows the formula and torch's own attention, and tiles cover all queries once."""

import math
import random

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.prefill_config import PrefillConfig, prefill_config
from kernels.attention.prefill_plan import prefill_tiles
from kernels.attention.prefill_reference import prefill_attention
from kernels.attention.shape import AttentionShape, ScoreRule
from tests.kernels.prefill_cases import SMALL, prefill_case, seen_keys

LENGTHS = ((1, 1), (1, 83), (5, 18), (17, 17), (0, 9), (63, 64), (64, 64), (65, 130))


def shape_of(num_heads: int, num_kv_heads: int, dtype: torch.dtype = torch.bfloat16) -> AttentionShape:
    return AttentionShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128, dtype=dtype, kv_dtype=dtype)


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (5, 1)])
def test_the_reference_follows_the_formula(heads: tuple[int, int], soft_cap: float | None, window: int | None) -> None:
    case = prefill_case(LENGTHS, heads=heads)
    rule = ScoreRule(0.2, soft_cap)
    plan = case.plan(window)
    result = prefill_attention(case.query, case.key_cache, case.value_cache, plan, rule, with_lse=True)
    out, lse = case.by_formula(rule, window, torch.float64)
    torch.testing.assert_close(result.out.double(), out, rtol=1e-5, atol=1e-5)
    assert result.lse is not None
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-5, atol=1e-5)
    assert prefill_attention(case.query, case.key_cache, case.value_cache, plan, rule).lse is None


@pytest.mark.parametrize("window", [None, 20])
def test_the_reference_equals_torchs_attention(window: int | None) -> None:
    case = prefill_case(LENGTHS, heads=(6, 2), head_dim=64, block_size=12)
    out = prefill_attention(case.query, case.key_cache, case.value_cache, case.plan(window), ScoreRule(0.125)).out
    start = 0
    for (query_len, context), keys, values in zip(LENGTHS, case.keys, case.values, strict=True):
        end = start + query_len
        expected = scaled_dot_product_attention(
            case.query[start:end].transpose(0, 1),
            keys.transpose(0, 1).repeat_interleave(3, 0),
            values.transpose(0, 1).repeat_interleave(3, 0),
            attn_mask=seen_keys(query_len, context, window),
            scale=0.125,
        )
        torch.testing.assert_close(out[start:end], expected.transpose(0, 1), rtol=1e-5, atol=1e-5)
        start = end


def test_results_go_where_the_caller_says() -> None:
    case = prefill_case(((3, 5), (20, 20)))
    rule = ScoreRule(0.2)
    whole = torch.full((30, 4, 32), math.nan)
    arguments = (case.query, case.key_cache, case.value_cache, case.plan(), rule)
    result = prefill_attention(*arguments, out=whole[7:])
    assert result.out.data_ptr() == whole[7:].data_ptr()
    assert torch.equal(whole[7:], prefill_attention(*arguments).out)
    assert whole[:7].isnan().all()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (5, 1), (71, 1)])
def test_tiles_cover_each_query_once_and_those_with_most_keys_come_first(heads: tuple[int, int]) -> None:
    generator = random.Random(str(heads))
    shape = shape_of(*heads)
    for _ in range(50):
        config = generator.choice((SMALL, prefill_config(shape)))
        query_lens = np.array([generator.choice((0, 1, generator.randint(1, 700))) for _ in range(9)])
        context_lens = query_lens + np.array([generator.choice((0, generator.randint(0, 3000))) for _ in range(9)])
        tiles = prefill_tiles(query_lens, context_lens, shape, config)
        assert tiles.dtype == np.int32
        queries = config.queries(shape)
        ends = [min(first + queries, int(query_lens[row])) for row, first in tiles.tolist()]
        covered = sorted(
            (row, query) for (row, first), end in zip(tiles.tolist(), ends, strict=True) for query in range(first, end)
        )
        assert covered == [(row, query) for row in range(9) for query in range(query_lens[row])]
        num_keys = [
            int(context_lens[row] - query_lens[row]) + end for (row, _), end in zip(tiles.tolist(), ends, strict=True)
        ]
        assert num_keys == sorted(num_keys, reverse=True)


def test_no_rows_have_no_tiles() -> None:
    empty, zeros = np.array([], dtype=np.int64), np.zeros(3, dtype=np.int32)
    assert prefill_tiles(empty, empty, shape_of(4, 2), SMALL).shape == (0, 2)
    assert prefill_tiles(zeros, zeros + 5, shape_of(4, 2), SMALL).shape == (0, 2)


def test_more_queries_than_keys_are_refused() -> None:
    with pytest.raises(AssertionError, match="part of its context"):
        prefill_tiles(np.array([3]), np.array([2]), shape_of(4, 2), SMALL)


def test_little_of_a_tile_is_padding_whatever_the_group() -> None:
    config = PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=5)
    assert (config.heads(shape_of(32, 8)), config.queries(shape_of(32, 8))) == (4, 32)
    assert (config.heads(shape_of(71, 1)), config.queries(shape_of(71, 1))) == (24, 5)
    for group in range(1, 129):
        shape = shape_of(group, 1)
        parts = -(-group // config.heads(shape))
        assert 0 <= parts * config.heads(shape) - group < parts  # the last part may lack a few heads
        assert config.heads(shape) * config.queries(shape) > 0.8 * config.rows


def test_tiles_of_short_types_are_high_enough_for_hoppers_matrix_units() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for head_dim in (64, 80, 128, 256):
            shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=dtype, kv_dtype=dtype)
            assert prefill_config(shape).rows >= 64
