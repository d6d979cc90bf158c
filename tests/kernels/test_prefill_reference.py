"""Prefill attention's reference follows the formula and torch's own attention, and work covers all keys once."""

import math
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.prefill_config import PrefillConfig, prefill_config
from kernels.attention.prefill_plan import COSTS, most_splits, most_work, prefill_work
from kernels.attention.prefill_reference import prefill_attention
from kernels.attention.shape import AttentionShape, ScoreRule
from tests.kernels.prefill_cases import FREE_SPLITS, SMALL, prefill_case, seen_keys

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


HEADS = st.sampled_from([(4, 4), (4, 2), (5, 1), (71, 1), (32, 8)])
ROWS = st.lists(st.tuples(st.one_of(st.just(0), st.integers(1, 300)), st.integers(0, 40_000)), max_size=6)
WINDOWS = st.sampled_from([None, 1, 16, 100, 4096])


@settings(max_examples=60)
@given(heads=HEADS, rows=ROWS, window=WINDOWS, num_programs=st.sampled_from([1, 4, 132, 264]), small=st.booleans())
def test_work_covers_each_querys_keys_once_and_fits_its_memory(
    heads: tuple[int, int], rows: list[tuple[int, int]], window: int | None, num_programs: int, small: bool
) -> None:
    """Rows of queries and keys before them. Splits of a tile are neighbours, and its keys begin where its first query's
    do, or at most a tile before.
    """
    shape = shape_of(*heads)
    config = SMALL if small else prefill_config(shape)
    query_lens = np.array([queries for queries, _ in rows], dtype=np.int64)
    context_lens = query_lens + np.array([before for _, before in rows], dtype=np.int64)
    costs = FREE_SPLITS if small else COSTS
    work = prefill_work(query_lens, context_lens, shape, config, num_programs, window=window, costs=costs)
    assert work.dtype == np.int32
    fields = work.tolist()
    assert len(fields) <= most_work(int(query_lens.sum()), len(rows), shape, config, num_programs)
    seen = []
    for index, own in groupby(range(len(fields)), key=lambda each: fields[each][4]):
        splits = [fields[each] for each in own]
        row, query = splits[0][:2]
        before = int(context_lens[row] - query_lens[row])
        end = before + min(query + config.queries(shape), int(query_lens[row]))
        first = 0 if window is None else max(0, before + query - window + 1) // config.tile
        assert [start for _, _, start, *_ in splits] == [
            first,
            *(stop // config.tile for _, _, _, stop, *_ in splits[:-1]),
        ]
        assert splits[-1][3] == end
        assert all(start * config.tile < stop for _, _, start, stop, *_ in splits)
        assert all(stop % config.tile == 0 for _, _, _, stop, *_ in splits[:-1])
        assert all(split[:2] == [row, query] and split[5] == len(splits) for split in splits)
        assert len(splits) == 1 or index + len(splits) <= most_splits(shape, config, num_programs)
        seen.append((row, query))
    tiles = [(row, first) for row, count in enumerate(query_lens) for first in range(0, count, config.queries(shape))]
    assert sorted(seen) == tiles


def test_tiles_with_most_keys_come_first() -> None:
    shape, config = shape_of(32, 8), prefill_config(shape_of(32, 8))
    work = prefill_work(np.array([700, 3, 90]), np.array([700, 2000, 4000]), shape, config, 8)
    ends = work[:, 3].tolist()
    assert ends == sorted(ends, reverse=True) and len(work) == 22 + 1 + 3


def planned(query_len: int, context: int, num_rows: int = 1, window: int | None = None) -> int:
    """Pieces of work of equal rows, with 32 query heads and 8 others on 132 processors."""
    shape = shape_of(32, 8)
    lens = (np.full(num_rows, query_len), np.full(num_rows, context))
    return len(prefill_work(*lens, shape, prefill_config(shape), 132, window=window))


def test_keys_are_split_only_where_programs_would_idle() -> None:
    # 32 queries a tile, and 8 programs for each: 16 tiles are 128 programs.
    assert planned(50, 30_000) == 16  # two tiles in 8 splits, which are 128 programs
    assert planned(64, 8192) >= 10
    assert planned(512, 32_768) == 16  # as it is
    assert planned(256, 131_072) == 16
    assert planned(64, 64) == 2
    assert planned(8192, 8192) == 256
    assert planned(32, 131_072, num_rows=16) == 16
    assert planned(50, 30_000, window=128) == 2  # a window leaves nothing to split


def test_a_long_context_beside_short_prompts_is_split() -> None:
    shape = shape_of(32, 8)
    work = prefill_work(np.array([64, *[64] * 30]), np.array([100_000, *[64] * 30]), shape, prefill_config(shape), 132)
    counts = {row: count for row, *_, count in work.tolist()}
    assert counts.pop(0) > 4
    assert set(counts.values()) == {1}


def test_no_rows_have_no_work() -> None:
    empty, zeros = np.array([], dtype=np.int64), np.zeros(3, dtype=np.int32)
    assert prefill_work(empty, empty, shape_of(4, 2), SMALL, 4).shape == (0, 6)
    assert prefill_work(zeros, zeros + 5, shape_of(4, 2), SMALL, 4).shape == (0, 6)


def test_more_queries_than_keys_are_refused() -> None:
    with pytest.raises(AssertionError, match="part of its context"):
        prefill_work(np.array([3]), np.array([2]), shape_of(4, 2), SMALL, 4)


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
