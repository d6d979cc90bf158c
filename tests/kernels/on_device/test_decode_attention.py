"""Paged decode attention by kernel: right for every shape and length, whatever lies in unread memory."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.attention import decode_attention, decode_plan, decode_reference
from kernels.attention.decode_config import decode_config, num_processors
from kernels.attention.decode_reference import DecodePlan, DecodeRows, empty_plan
from kernels.attention.shape import AttentionShape, ScoreRule
from tests.kernels.decode_cases import NUM_LAYERS, SMALL, DecodeCase, decode_case
from tests.kernels.on_device.devices import DEVICE, DTYPES, E4M3, FAMILY, HAS_E4M3, HAS_GPU, IN_E4M3, needs_e4m3
from tests.kernels.on_device.tolerance import assert_attends_as_exactly_as_torch

RULE = ScoreRule(0.2)
AWKWARD_LENGTHS = (1, 15, 16, 17, 63, 0, 47, 48, 49, 130)
FEWER_LENGTHS = (1, 17, 0, 49, 130)


def check(case: DecodeCase, plan: DecodePlan, rule: ScoreRule = RULE) -> None:
    """Results, log-sum-exps and what is left behind, against the formula in float64."""
    result = decode_attention.decode_attention(case.query, case.key_cache, case.value_cache, plan, rule, with_lse=True)
    dtype = case.query.dtype
    exact, exact_lse = case.by_formula(rule, plan.sliding_window, torch.float64)
    plain, _ = case.by_formula(rule, plan.sliding_window, dtype)
    filled = plan.rows.context_lens > 0
    assert (result.out[~filled] == 0).all()
    assert_attends_as_exactly_as_torch(result.out[filled], plain[filled], exact[filled], case.values)
    assert result.lse is not None
    torch.testing.assert_close(
        result.lse.double(), exact_lse, rtol=1e-4, atol=1e-4 if dtype != torch.bfloat16 else 1e-2
    )
    assert not plan.num_arrived.any()


def filled_plan(case: DecodeCase, num_programs: int, window: int | None = None) -> DecodePlan:
    """Plan filled by the reference, which the kernel equals: in the interpreter it is slow."""
    plan = case.empty_plan(num_programs, window)
    decode_reference.fill_plan(plan)
    return plan


def num_splits(plan: DecodePlan) -> dict[int, int]:
    work = plan.work[: int(plan.num_work.item())].tolist()
    return {row: count for row, *_, count in work}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (5, 1), (20, 1)])
def test_rows_of_awkward_lengths_whole_and_split(heads: tuple[int, int], dtype: torch.dtype) -> None:
    lengths = AWKWARD_LENGTHS if HAS_GPU or (heads, dtype) == ((4, 2), torch.float32) else FEWER_LENGTHS
    case = decode_case(lengths, heads=heads, dtype=dtype).to(DEVICE)
    whole, split = filled_plan(case, 1), filled_plan(case, 60)
    assert max(num_splits(whole).values()) == 1
    assert max(num_splits(split).values()) > 1
    check(case, whole)
    check(case, split)


@pytest.mark.parametrize("block_size", [1, 8, 12, 256])
def test_blocks_smaller_and_larger_than_a_tile(block_size: int) -> None:
    lengths = [*{1, block_size - 1, block_size, block_size + 1, 3 * block_size} - {0}]
    case = decode_case([length for length in lengths if length < 300], block_size=block_size).to(DEVICE)
    check(case, filled_plan(case, 12))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_head_dimensions(head_dim: int, dtype: torch.dtype) -> None:
    case = decode_case((1, 33, 80), heads=(6, 2), head_dim=head_dim, dtype=dtype).to(DEVICE)
    plan = filled_plan(case, 12)
    assert max(num_splits(plan).values()) > 1
    check(case, plan, ScoreRule(1 / math.sqrt(head_dim)))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 1000])
def test_a_window_hides_all_keys_before_it(window: int) -> None:
    case = decode_case((1, 16, 17, 41, 100)).to(DEVICE)
    check(case, filled_plan(case, 8, window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_are_capped(dtype: torch.dtype) -> None:
    case = decode_case((1, 16, 17, 63, 90), dtype=dtype).to(DEVICE)
    plan = filled_plan(case, 12, window=70)
    check(case, plan, ScoreRule(0.5, soft_cap=1.5))
    check(case, plan, ScoreRule(40.0, soft_cap=3.0))  # nearly all are at the cap


def test_only_the_long_row_among_short_ones_is_split() -> None:
    case = decode_case((5, 700, 12, 16, 1, 9)).to(DEVICE)
    plan = filled_plan(case, 24)
    splits = num_splits(plan)
    assert splits.pop(1) > 3
    assert set(splits.values()) == {1}
    check(case, plan)


def test_more_splits_than_are_merged_at_once() -> None:
    case = decode_case((700,), heads=(1, 1)).to(DEVICE)
    plan = case.empty_plan(60)
    starts = [*range(0, 700, 16), 700]
    assert len(starts) - 1 == 44 > decode_attention.MERGE_SPLITS
    for i, (start, end) in enumerate(pairwise(starts)):
        plan.work[i] = torch.tensor([0, start, end, 0, 44])
    plan.num_work.fill_(44)
    check(case, plan)


def test_a_group_of_many_columns_is_merged_in_several_tiles() -> None:
    case = decode_case((100,), heads=(9, 1), head_dim=80).to(DEVICE)
    assert decode_attention.MERGE_COLUMNS < 9 * 80
    plan = filled_plan(case, 8)
    assert num_splits(plan)[0] > 1
    check(case, plan)


@needs_e4m3
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_keys_of_eight_bits_are_widened(dtype: torch.dtype) -> None:
    """The formula is given the widened keys, so that only the arithmetic is judged."""
    case = decode_case((1, 17, 90), head_dim=64, dtype=dtype, kv_dtype=E4M3).to(DEVICE)
    check(case, filled_plan(case, 8))


@needs_e4m3
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_of_eight_bits_is_widened_exactly(dtype: torch.dtype) -> None:
    """With one key its weight is 1, and the result is its value: each number of e4m3, of both signs, denormals too."""
    case = decode_case((1,), heads=(2, 1), head_dim=256, dtype=dtype, kv_dtype=E4M3).to(DEVICE)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(E4M3)
    numbers = torch.where(codes.float().isnan(), 0.0, codes.float())
    block = int(case.rows.block_tables[0, 0])
    case.value_cache[block, 0, 0] = numbers.to(E4M3)
    plan = filled_plan(case, 1)
    result = decode_attention.decode_attention(case.query, case.key_cache, case.value_cache, plan, RULE)
    assert (result.out.float() == numbers).all()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, IN_E4M3], ids=str)
def test_the_configurations_that_are_launched(kv_dtype: torch.dtype) -> None:
    dtype = torch.float16 if kv_dtype == E4M3 else kv_dtype
    case = decode_case((1, 300, 65), heads=(8, 2), head_dim=128, dtype=dtype, kv_dtype=kv_dtype).to(DEVICE)
    plan = empty_plan(case.rows, case.shape, decode_config(case.shape, FAMILY), case.block_size, 12)
    decode_reference.fill_plan(plan)
    assert max(num_splits(plan).values()) > 1
    check(case, plan, ScoreRule(128**-0.5))


def test_log_sum_exps_are_left_out_unless_asked_for() -> None:
    case = decode_case((3, 100)).to(DEVICE)
    plan = filled_plan(case, 8)
    arguments = (case.query, case.key_cache, case.value_cache, plan, RULE)
    plain, with_lse = (decode_attention.decode_attention(*arguments, with_lse=wanted) for wanted in (False, True))
    assert plain.lse is None
    assert torch.equal(plain.out, with_lse.out)


def test_wrapper_and_reference_agree_and_leave_the_cache_alone() -> None:
    case = decode_case((3, 100, 64)).to(DEVICE)
    plan = filled_plan(case, 8)
    before = case.key_cache.clone()
    arguments = (case.query, case.key_cache, case.value_cache, plan, RULE, True)
    torch.testing.assert_close(
        decode_attention.decode_attention(*arguments),
        decode_reference.decode_attention(*arguments),
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.equal(before.nan_to_num(), case.key_cache.nan_to_num())


def test_a_plan_is_refilled_in_place_for_new_lengths() -> None:
    case = decode_case((100, 3, 64)).to(DEVICE)
    plan = filled_plan(case, 12)
    check(case, plan)
    shorter = [40, 1, 33]
    case.rows.context_lens.copy_(torch.tensor(shorter))
    case.keys[:] = [keys[:n] for keys, n in zip(case.keys, shorter, strict=True)]
    case.values[:] = [values[:n] for values, n in zip(case.values, shorter, strict=True)]
    decode_plan.fill_plan(plan)
    check(case, plan)


def test_blocks_whose_offsets_pass_32_bits_are_reached() -> None:
    """32,768 blocks of 4 GiB, of which only those that are used take memory on a CPU."""
    num_blocks, stride, block_shape = 32_768, 65_600, (16, 2, 64)
    assert (num_blocks - 1) * stride > 2**31
    case = decode_case((40,), head_dim=64, dtype=torch.float16).to(DEVICE)
    pool = torch.empty(num_blocks * stride, dtype=torch.float16, device=DEVICE)
    far = DecodeRows(case.rows.context_lens, torch.tensor([[num_blocks - 1, 1, num_blocks - 2]], dtype=torch.int32))
    caches: list[Tensor] = []
    for near, offset in ((case.key_cache, 0), (case.value_cache, 16 * 2 * 64)):
        caches.append(pool.as_strided((num_blocks, *block_shape), (stride, 128, 64, 1), offset))
        for old, new in zip(case.rows.block_tables[0].tolist(), far.block_tables[0].tolist(), strict=True):
            caches[-1][new] = near[old]
    rows = DecodeRows(far.context_lens, far.block_tables.to(DEVICE))
    plan = empty_plan(rows, case.shape, SMALL, 16, 8)
    decode_plan.fill_plan(plan)
    near_plan = filled_plan(case, 8)
    near_out = decode_attention.decode_attention(case.query, case.key_cache, case.value_cache, near_plan, RULE).out
    far_out = decode_attention.decode_attention(case.query, caches[0], caches[1], plan, RULE).out
    assert torch.equal(far_out, near_out)
    assert near_out.isfinite().all()


@pytest.mark.parametrize(
    ("lengths", "num_kv_heads", "num_programs", "window"),
    [
        ((1,), 8, 396, None),
        ((0, 0), 1, 396, None),
        ((4096, 0, 100_000), 8, 396, None),
        ((4096, 0, 100_000), 8, 396, 1025),
        ((1, 15, 16, 17, 63, 700, 31), 2, 20, None),
        ((1, 15, 16, 17, 63, 700, 31), 2, 20, 33),
        ((500,) * 5, 4, 132, None),
        ((2_000_000, 2_000_001), 8, 528, None),
    ],
)
def test_plans_equal_the_references(
    lengths: Sequence[int], num_kv_heads: int, num_programs: int, window: int | None
) -> None:
    shape = AttentionShape(
        num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=32, dtype=torch.float16, kv_dtype=torch.float16
    )
    tables = torch.zeros((len(lengths), -(-max(lengths) // 16)), dtype=torch.int32, device=DEVICE)
    rows = DecodeRows(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), tables)
    ours, reference = (empty_plan(rows, shape, SMALL, 16, num_programs, window) for _ in range(2))
    decode_plan.fill_plan(ours)
    decode_reference.fill_plan(reference)
    assert torch.equal(ours.num_work, reference.num_work)
    assert torch.equal(ours.work, reference.work)


if HAS_GPU:

    def test_a_captured_plan_and_launch_follow_new_lengths_when_replayed() -> None:
        case = decode_case((100, 3, 64), dtype=torch.float16).to(DEVICE)
        plan = filled_plan(case, 132)
        arguments = (case.query, case.key_cache, case.value_cache, plan, RULE)
        decode_attention.decode_attention(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode_plan.fill_plan(plan)
            captured = decode_attention.decode_attention(*arguments).out
        case.rows.context_lens.copy_(torch.tensor((40, 2, 33)))
        captured.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        decode_plan.fill_plan(plan)
        assert torch.equal(captured, decode_attention.decode_attention(*arguments).out)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_the_tuned_configuration_of_a_large_model_is_right(dtype: torch.dtype) -> None:
        lengths = (1, 1000, 4096, 63, 2049)
        for kv_dtype in (dtype, E4M3) if HAS_E4M3 else (dtype,):
            case = decode_case(lengths, heads=(32, 8), head_dim=128, dtype=dtype, kv_dtype=kv_dtype).to(DEVICE)
            config = decode_config(case.shape, FAMILY)
            num_programs = num_processors(DEVICE) * config.programs_per_sm
            plan = empty_plan(case.rows, case.shape, config, case.block_size, num_programs)
            decode_plan.fill_plan(plan)
            check(case, plan, ScoreRule(128**-0.5))


def test_pieces_in_two_dimensions_of_a_grid_are_all_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a dimension hold two programs: the last round has one piece too few for its width."""
    monkeypatch.setattr(decode_attention, "MOST_PROGRAMS", 2)
    case = decode_case(FEWER_LENGTHS).to(DEVICE)
    plan = filled_plan(case, num_programs=4)
    assert decode_attention.launch_grid(plan)[2] > 1
    check(case, plan)


def test_more_pieces_than_one_dimension_of_a_grid_holds_take_two() -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16, kv_dtype=torch.float16)
    table = torch.zeros((1, 1), dtype=torch.int32, device="meta").expand(70_000, 4)
    rows = DecodeRows(torch.zeros(70_000, dtype=torch.int32, device="meta"), table)
    plan = empty_plan(rows, shape, decode_config(shape), 16, 132)
    heads, width, rounds = decode_attention.launch_grid(plan)
    assert heads == 2 and rounds == 2 and width <= 65_535
    assert len(plan.work) > 65_535 and len(plan.work) <= width * rounds < len(plan.work) + rounds


def test_layers_around_the_one_attended_are_poisoned() -> None:
    case = decode_case((20,))
    assert NUM_LAYERS > 1
    assert case.key_cache.stride(0) == NUM_LAYERS * 2 * case.key_cache[0].numel()
    assert case.key_cache.isnan().any()
