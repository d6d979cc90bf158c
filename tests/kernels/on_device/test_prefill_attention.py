"""Paged prefill attention by kernel: right for every shape, chunk and length, whatever lies in unread memory."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention import prefill_attention, prefill_reference
from kernels.attention.prefill_config import prefill_config
from kernels.attention.prefill_plan import NO_ROW, num_heads
from kernels.attention.prefill_reference import PrefillPlan, PrefillRows
from kernels.attention.shape import ScoreRule
from tests.kernels.on_device.devices import DEVICE, DTYPES, E4M3, FAMILY, HAS_E4M3, HAS_GPU, IN_E4M3, needs_e4m3
from tests.kernels.on_device.tolerance import assert_attends_as_exactly_as_torch
from tests.kernels.prefill_cases import FREE_SPLITS, SMALL, PrefillCase, prefill_case

RULE = ScoreRule(0.2)
# Queries and keys: a whole prompt and chunks, at a tile's and a block's end (16) and beside it, and no query at all.
AWKWARD = ((1, 1), (1, 83), (0, 20), (5, 18), (17, 17), (33, 49), (16, 32), (15, 31), (8, 18), (3, 33))


def check(case: PrefillCase, plan: PrefillPlan, rule: ScoreRule = RULE) -> Tensor:
    """Results, against the formula in float64."""
    out = torch.full(case.query.shape, math.nan, dtype=case.query.dtype, device=DEVICE)
    result = prefill_attention.prefill_attention(
        case.query, case.key_cache, case.value_cache, plan, rule, with_lse=True, out=out
    )
    dtype = case.query.dtype
    exact, exact_lse = case.by_formula(rule, plan.sliding_window, torch.float64)
    plain, _ = case.by_formula(rule, plan.sliding_window, dtype)
    assert_attends_as_exactly_as_torch(result.out, plain, exact, case.values)
    assert result.lse is not None
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(result.lse.double(), exact_lse, rtol=1e-4, atol=tolerance)
    return result.out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (5, 1), (8, 2)])
def test_rows_of_awkward_lengths(heads: tuple[int, int], dtype: torch.dtype) -> None:
    lengths = AWKWARD if HAS_GPU or (heads, dtype) == ((4, 2), torch.float32) else AWKWARD[-2:]
    case = prefill_case(lengths, heads=heads, dtype=dtype).to(DEVICE)
    check(case, case.plan())


@pytest.mark.parametrize(("query_len", "context"), [(63, 64), (64, 64), (65, 130), (1, 130)])
def test_prompts_of_several_tiles(query_len: int, context: int) -> None:
    case = prefill_case([(query_len, context)], heads=(2, 1)).to(DEVICE)
    check(case, case.plan())


@pytest.mark.parametrize("block_size", [1, 8, 12, 256])
def test_blocks_smaller_and_larger_than_a_tile(block_size: int) -> None:
    lengths = [(1, 11), (12, 13), (9, 25), (3, 3)] if block_size < 256 else [(2, 255), (1, 256), (5, 257)]
    case = prefill_case(lengths, heads=(2, 1), block_size=block_size).to(DEVICE)
    check(case, case.plan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_head_dimensions(head_dim: int, dtype: torch.dtype) -> None:
    case = prefill_case(((5, 5), (7, 40)), heads=(3, 1), head_dim=head_dim, dtype=dtype).to(DEVICE)
    check(case, case.plan(), ScoreRule(head_dim**-0.5))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 1000])
def test_a_window_hides_all_keys_before_it(window: int) -> None:
    case = prefill_case(((1, 70), (19, 19), (11, 60)), heads=(2, 1)).to(DEVICE)
    check(case, case.plan(window))


def test_keys_before_the_window_of_a_rows_first_query_may_be_gone() -> None:
    case = prefill_case(((5, 70),), heads=(2, 1)).to(DEVICE)
    plan = case.plan(window=20)
    last_gone = 70 - 5 - 20  # of keys 0 to this none is seen, the last of them in a block that is
    table = case.rows.block_tables[0]
    table[: last_gone // 16] = 2**31 - 1
    for cache in (case.key_cache, case.value_cache):
        cache[int(table[last_gone // 16]), : last_gone % 16 + 1] = math.nan
    check(case, plan)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_are_capped(dtype: torch.dtype) -> None:
    case = prefill_case(((9, 40), (17, 17)), dtype=dtype).to(DEVICE)
    check(case, case.plan(window=30), ScoreRule(0.5, soft_cap=1.5))
    check(case, case.plan(), ScoreRule(40.0, soft_cap=3.0))  # nearly all are at the cap


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_keys_split_between_programs_give_the_same(window: int | None, dtype: torch.dtype) -> None:
    """The second launch finds the memory of partial results as a launch must leave it."""
    case = prefill_case(((1, 83), (9, 150), (20, 20)), heads=(3, 1), dtype=dtype).to(DEVICE)
    whole = case.plan(window)
    plan = case.plan(window, num_programs=12, costs=FREE_SPLITS)
    assert (whole.work[:, 5] == 1).all()
    assert plan.work[:, 5].max() > 1
    plan.partials.out.fill_(math.nan)
    plan.partials.lse.fill_(math.nan)
    results = [check(case, each) for each in (whole, plan, plan)]
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(results[2], results[1], rtol=0, atol=0)
    assert not plan.partials.num_arrived.any()


@pytest.mark.parametrize("heads", [(4, 2), (11, 1)])
def test_split_keys_with_a_cap_and_groups_in_parts(heads: tuple[int, int]) -> None:
    case = prefill_case(((5, 100), (18, 40)), heads=heads, head_dim=80).to(DEVICE)
    plan = case.plan(num_programs=32, costs=FREE_SPLITS)
    assert plan.work[:, 5].max() > 1
    check(case, plan, ScoreRule(0.5, soft_cap=1.5))


@needs_e4m3
def test_split_keys_of_eight_bits() -> None:
    case = prefill_case(((12, 90),), head_dim=64, dtype=torch.float16, kv_dtype=E4M3).to(DEVICE)
    plan = case.plan(num_programs=16, costs=FREE_SPLITS)
    assert plan.work[:, 5].max() > 1
    check(case, plan)


def test_padding_of_work_is_skipped() -> None:
    case = prefill_case(((9, 70),), heads=(2, 1)).to(DEVICE)
    plan = case.plan(num_programs=8, costs=FREE_SPLITS)
    padding = torch.full((3, 6), NO_ROW, dtype=torch.int32, device=DEVICE)
    check(case, replace(plan, work=torch.cat((plan.work, padding))))


@pytest.mark.parametrize("cuts", [(16,), (1, 17, 18), (30,)])
def test_a_prompt_in_chunks_equals_the_whole(cuts: Sequence[int]) -> None:
    whole = prefill_case(((45, 45),), heads=(2, 1)).to(DEVICE)
    expected = check(whole, whole.plan())
    for start, end in zip((0, *cuts), (*cuts, 45), strict=True):
        chunk = replace(
            whole,
            query=whole.query[start:end],
            query_lens=(end - start,),
            keys=[whole.keys[0][:end]],
            values=[whole.values[0][:end]],
            rows=PrefillRows(
                torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
                torch.tensor([end], dtype=torch.int32, device=DEVICE),
                whole.rows.block_tables,
            ),
        )
        torch.testing.assert_close(check(chunk, chunk.plan()), expected[start:end], rtol=1e-5, atol=1e-5)


def test_a_group_too_large_for_one_tile_is_parted() -> None:
    case = prefill_case(((3, 20), (9, 9)), heads=(11, 1)).to(DEVICE)
    assert SMALL.heads(case.shape) == 4
    assert num_heads(case.shape, SMALL) == 3
    check(case, case.plan())


@needs_e4m3
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_keys_of_eight_bits_are_widened(dtype: torch.dtype) -> None:
    """The formula is given the widened keys, so that only the arithmetic is judged."""
    case = prefill_case(((1, 17), (12, 40)), head_dim=64, dtype=dtype, kv_dtype=E4M3).to(DEVICE)
    check(case, case.plan())


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, IN_E4M3], ids=str)
def test_the_configurations_that_are_launched(kv_dtype: torch.dtype) -> None:
    dtype = torch.float16 if kv_dtype == E4M3 else kv_dtype
    lengths = ((33, 130), (1, 65), (34, 34))
    case = prefill_case(lengths, heads=(3, 1), head_dim=128, dtype=dtype, kv_dtype=kv_dtype).to(DEVICE)
    check(case, case.plan(config=prefill_config(case.shape, FAMILY)), ScoreRule(128**-0.5))


def test_results_go_where_the_caller_says() -> None:
    case = prefill_case(((3, 5), (20, 20))).to(DEVICE)
    whole = torch.full((30, 4, 32), math.nan, device=DEVICE)
    arguments = (case.query, case.key_cache, case.value_cache, case.plan(), RULE)
    result = prefill_attention.prefill_attention(*arguments, out=whole[5:28])
    plain = prefill_attention.prefill_attention(*arguments)
    assert result.out.data_ptr() == whole[5:].data_ptr()
    assert torch.equal(whole[5:28], plain.out)
    assert whole[:5].isnan().all()
    assert whole[28:].isnan().all()
    assert result.lse is plain.lse is None


def test_wrapper_and_reference_agree_and_leave_the_cache_alone() -> None:
    case = prefill_case(((3, 40), (0, 1), (20, 20))).to(DEVICE)
    before = case.key_cache.clone()
    arguments = (case.query, case.key_cache, case.value_cache, case.plan(window=13), RULE, True)
    torch.testing.assert_close(
        prefill_attention.prefill_attention(*arguments),
        prefill_reference.prefill_attention(*arguments),
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.equal(before.nan_to_num(), case.key_cache.nan_to_num())


def test_rows_without_queries_launch_nothing() -> None:
    case = prefill_case(((0, 5), (0, 0), (0, 1))).to(DEVICE)
    result = prefill_attention.prefill_attention(case.query, case.key_cache, case.value_cache, case.plan(), RULE, True)
    assert result.out.shape == (0, 4, 32)
    assert result.lse is not None
    assert result.lse.shape == (0, 4)


def test_blocks_whose_offsets_pass_32_bits_are_reached() -> None:
    """32,768 blocks of 4 GiB, of which only those that are used take memory on a CPU."""
    num_blocks, stride, block_shape = 32_768, 65_600, (16, 2, 64)
    assert (num_blocks - 1) * stride > 2**31
    near = prefill_case(((7, 40),), head_dim=64, dtype=torch.float16).to(DEVICE)
    pool = torch.empty(num_blocks * stride, dtype=torch.float16, device=DEVICE)
    far_blocks = [num_blocks - 1, 1, num_blocks - 2]
    caches: list[Tensor] = []
    for cache, offset in ((near.key_cache, 0), (near.value_cache, 16 * 2 * 64)):
        caches.append(pool.as_strided((num_blocks, *block_shape), (stride, 128, 64, 1), offset))
        for old, new in zip(near.rows.block_tables[0].tolist(), far_blocks, strict=True):
            caches[-1][new] = cache[old]
    tables = torch.tensor([far_blocks], dtype=torch.int32, device=DEVICE)
    far = replace(near, key_cache=caches[0], value_cache=caches[1], rows=replace(near.rows, block_tables=tables))
    assert torch.equal(check(far, far.plan()), check(near, near.plan()))


if HAS_GPU:

    @pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_the_configuration_of_a_large_model_is_right(dtype: torch.dtype, head_dim: int) -> None:
        lengths = ((1, 1328), (5, 18), (129, 463), (700, 700), (0, 7), (64, 2049), (1, 1))
        for kv_dtype in (dtype, E4M3) if HAS_E4M3 else (dtype,):
            case = prefill_case(lengths, heads=(8, 2), head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype).to(DEVICE)
            for window in (None, 1, 100):
                plan = case.plan(window, config=prefill_config(case.shape, FAMILY))
                check(case, plan, ScoreRule(head_dim**-0.5))
                check(case, plan, ScoreRule(head_dim**-0.5, soft_cap=2.0))
