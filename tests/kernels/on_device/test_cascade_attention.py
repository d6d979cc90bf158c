"""Shared-prefix attention by kernels equals decode attention of the same rows, for any groups."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.attention import cascade_attention, cascade_plan, cascade_reference
from kernels.attention.cascade_groups import SharedPrefix
from kernels.attention.cascade_reference import CascadePlan
from kernels.attention.decode_reference import DecodeRows
from kernels.attention.shape import ScoreRule
from tests.kernels.cascade_cases import empty_plan, refill, shared_case
from tests.kernels.decode_cases import DecodeCase, decode_case
from tests.kernels.on_device.devices import DEVICE, DTYPES, E4M3, HAS_E4M3, HAS_GPU, needs_e4m3
from tests.kernels.on_device.tolerance import assert_attends_as_exactly_as_torch

RULE = ScoreRule(0.2)
# Padding, a row alone, and suffixes of one key, of part of a block, of whole blocks and of several tiles.
LENGTHS = (17, 0, 100, 81, 49, 65, 34, 0)
PREFIXES = (SharedPrefix((2, 5, 3), 4), SharedPrefix((0, 6), 1))


def check(case: DecodeCase, plan: CascadePlan, rule: ScoreRule = RULE) -> None:
    """Results, against the formula in float64."""
    plan.suffixes.partial_out.fill_(math.nan)
    out = torch.full_like(case.query, math.nan).contiguous()
    cascade_attention.cascade_attention(case.query, case.key_cache, case.value_cache, plan, rule, out)
    exact, _ = case.by_formula(rule, None, torch.float64)
    plain, _ = case.by_formula(rule, None, case.query.dtype)
    filled = plan.suffixes.rows.context_lens > 0
    assert (out[~filled] == 0).all()
    assert_attends_as_exactly_as_torch(out[filled], plain[filled], exact[filled], case.values)
    assert not plan.suffixes.num_arrived.any()


def filled_plan(case: DecodeCase, prefixes: Sequence[SharedPrefix], num_processors: int) -> CascadePlan:
    """Plan filled by the reference, which the kernels equal: in the interpreter they are slow."""
    plan = empty_plan(case, prefixes, num_processors)
    cascade_reference.fill_cascade_plan(plan)
    return plan


def num_partials(plan: CascadePlan) -> list[int]:
    assert plan.suffixes.prefixes is not None
    counts: list[int] = plan.suffixes.prefixes.num_partials.tolist()
    return counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (5, 1), (20, 1)])
def test_several_groups_in_splits(heads: tuple[int, int], dtype: torch.dtype) -> None:
    case = shared_case(LENGTHS, PREFIXES, heads=heads, dtype=dtype).to(DEVICE)
    plan = filled_plan(case, PREFIXES, 40)
    assert max(num_partials(plan)) > 1
    assert [count > 0 for count in num_partials(plan)] == [row in (0, 2, 3, 5, 6) for row in range(len(LENGTHS))]
    check(case, plan)


def test_prefixes_that_are_not_split() -> None:
    case = shared_case(LENGTHS, PREFIXES, heads=(5, 1)).to(DEVICE)
    plan = filled_plan(case, PREFIXES, 1)
    assert max(num_partials(plan)) == 1
    check(case, plan)


@pytest.mark.parametrize("count", [2, 17, 70])
def test_groups_of_more_queries_than_a_tile_holds(count: int) -> None:
    rows = tuple(range(1, count + 1))
    case = shared_case([20, *[17 + row % 3 for row in rows]], [SharedPrefix(rows, 1)], heads=(3, 1)).to(DEVICE)
    check(case, filled_plan(case, [SharedPrefix(rows, 1)], 2))


@pytest.mark.parametrize(("block_size", "counts"), [(1, (1, 15, 31, 33)), (8, (1, 2, 3)), (12, (4, 5)), (64, (1,))])
def test_prefixes_of_awkward_lengths(block_size: int, counts: Sequence[int]) -> None:
    """One block, whole tiles of 16 keys, and one block more and less than those."""
    prefixes = [SharedPrefix((2 * i, 2 * i + 1), count) for i, count in enumerate(counts)]
    lengths = [count * block_size + more for count in counts for more in (1, 18)]
    case = shared_case(lengths, prefixes, heads=(2, 1), block_size=block_size).to(DEVICE)
    check(case, filled_plan(case, prefixes, 6))


def test_a_prefix_that_is_all_a_row_has() -> None:
    """The host never asks for it, since the last token is a row's own to write; nothing depends on that here."""
    case = shared_case([32, 64, 40], [SharedPrefix((0, 1, 2), 2)]).to(DEVICE)
    check(case, filled_plan(case, [SharedPrefix((0, 1, 2), 2)], 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_are_capped(dtype: torch.dtype) -> None:
    case = shared_case(LENGTHS, PREFIXES, heads=(2, 1), dtype=dtype).to(DEVICE)
    check(case, filled_plan(case, PREFIXES, 8), ScoreRule(0.5, soft_cap=1.5))


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [
        *((128, torch.float32), (128, torch.float16), (80, torch.float16)),
        *(pytest.param(head_dim, E4M3, marks=needs_e4m3) for head_dim in (128, 64, 32)),
    ],
    ids=str,
)
def test_the_configurations_that_are_launched(head_dim: int, kv_dtype: torch.dtype) -> None:
    dtype = torch.float16 if kv_dtype == E4M3 else kv_dtype
    prefix = SharedPrefix((0, 3, 1), 9)
    case = shared_case((150, 200, 5, 147), [prefix], heads=(8, 2), head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    case = case.to(DEVICE)
    plan = empty_plan(case, [prefix], 12, config=None)
    cascade_reference.fill_cascade_plan(plan)
    assert max(num_partials(plan)) > 1
    check(case, plan, ScoreRule(head_dim**-0.5))


def test_without_groups_it_is_plain_decode_attention() -> None:
    case = decode_case((1, 0, 49)).to(DEVICE)
    plan = filled_plan(case, (), 8)
    assert plan.num_work == 0
    check(case, plan)


def test_a_plan_is_refilled_in_place_for_other_groups() -> None:
    first, second = (SharedPrefix((2, 0), 2),), (SharedPrefix((0, 2), 1), SharedPrefix((1, 3), 2))
    case = shared_case((33, 34, 40, 50), (*first, second[1]), heads=(2, 1)).to(DEVICE)
    plan = empty_plan(case, first, 8)
    for prefixes in (first, second, ()):
        refill(plan, prefixes)
        cascade_plan.fill_cascade_plan(plan)
        check(case, plan)


def test_wrapper_and_reference_agree_launch_by_launch() -> None:
    case = shared_case(LENGTHS, PREFIXES, heads=(4, 1)).to(DEVICE)
    plan = filled_plan(case, PREFIXES, 40)
    results = []
    for module in (cascade_attention, cascade_reference):
        plan.suffixes.partial_out.fill_(7.0)
        plan.suffixes.partial_lse.fill_(7.0)
        module.attend_prefixes(case.query, case.key_cache, case.value_cache, plan, RULE)
        results.append((plan.suffixes.partial_out.clone(), plan.suffixes.partial_lse.clone()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    arguments = (case.query, case.key_cache, case.value_cache, plan, RULE)
    ours, reference = (module.cascade_attention(*arguments) for module in (cascade_attention, cascade_reference))
    torch.testing.assert_close(ours.out, reference.out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "prefixes", "num_processors"),
    [
        ((1,), (), 132),
        ((0, 0, 0), (), 132),
        ((100, 100, 7), (SharedPrefix((1, 0), 6),), 132),
        ((20_000,) * 8, (SharedPrefix(tuple(range(1, 8)), 1200),), 132),
        ((5000,) * 6, tuple(SharedPrefix((2 * i + 1, 2 * i), 90 * i + 1) for i in range(3)), 66),
    ],
)
def test_plans_equal_the_references(
    lengths: Sequence[int], prefixes: Sequence[SharedPrefix], num_processors: int
) -> None:
    case = decode_case((1,)).to(DEVICE)
    tables = torch.zeros((len(lengths), max(1, -(-max(lengths) // 16))), dtype=torch.int32, device=DEVICE)
    rows = DecodeRows(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), tables)
    query = torch.empty((len(lengths), 4, 32), device=DEVICE)
    many = DecodeCase(query, [], [], case.key_cache, case.value_cache, rows, case.shape, 16)
    ours, reference = (empty_plan(many, prefixes, num_processors) for _ in range(2))
    cascade_plan.fill_cascade_plan(ours)
    cascade_reference.fill_cascade_plan(reference)
    assert torch.equal(ours.num_work, reference.num_work)
    assert torch.equal(ours.work, reference.work)
    assert torch.equal(ours.suffixes.work, reference.suffixes.work)
    assert ours.suffixes.prefixes is not None and reference.suffixes.prefixes is not None
    for field in ("lens", "num_partials", "first_partials"):
        assert torch.equal(getattr(ours.suffixes.prefixes, field), getattr(reference.suffixes.prefixes, field)), field


def test_blocks_whose_offsets_pass_32_bits_are_reached() -> None:
    """32,768 blocks of 4 GiB, of which only those that are used take memory on a CPU."""
    num_blocks, stride, block_shape = 32_768, 65_600, (16, 2, 64)
    assert (num_blocks - 1) * stride > 2**31
    prefix = SharedPrefix((0, 1), 2)
    case = shared_case((40, 35), [prefix], head_dim=64, dtype=torch.float16).to(DEVICE)
    pool = torch.empty(num_blocks * stride, dtype=torch.float16, device=DEVICE)
    tables = torch.tensor([[num_blocks - 1, 1, num_blocks - 2], [num_blocks - 1, 1, num_blocks - 3]])
    caches: list[Tensor] = []
    for near, offset in ((case.key_cache, 0), (case.value_cache, 16 * 2 * 64)):
        caches.append(pool.as_strided((num_blocks, *block_shape), (stride, 128, 64, 1), offset))
        caches[-1][tables.to(DEVICE)] = near[case.rows.block_tables.long()]
    near_plan = filled_plan(case, [prefix], 4)
    far = DecodeRows(case.rows.context_lens, tables.to(DEVICE, torch.int32))
    far_plan = cascade_reference.part_of_plan(near_plan, far, near_plan.groups)
    near_out = cascade_attention.cascade_attention(case.query, case.key_cache, case.value_cache, near_plan, RULE).out
    far_out = cascade_attention.cascade_attention(case.query, caches[0], caches[1], far_plan, RULE).out
    assert torch.equal(far_out, near_out)
    assert near_out.isfinite().all()


if HAS_GPU:

    def test_a_captured_plan_and_launch_follow_new_groups_when_replayed() -> None:
        case = shared_case(LENGTHS, PREFIXES, dtype=torch.float16).to(DEVICE)
        plan = filled_plan(case, PREFIXES, 132)
        out = torch.empty_like(case.query).contiguous()
        arguments = (case.query, case.key_cache, case.value_cache, plan, RULE, out)
        cascade_plan.fill_cascade_plan(plan)  # compiles, which a capture must not
        cascade_attention.cascade_attention(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cascade_plan.fill_cascade_plan(plan)
            cascade_attention.cascade_attention(*arguments)
        for prefixes in (PREFIXES[1:], (), (SharedPrefix((3, 2), 3), SharedPrefix((6, 0), 1))):
            refill(plan, prefixes)
            out.fill_(math.nan)
            plan.suffixes.partial_out.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            replayed = out.clone()
            check(case, plan)
            assert torch.equal(replayed, cascade_attention.cascade_attention(*arguments).out)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_a_large_batch_of_a_large_model_is_right(dtype: torch.dtype) -> None:
        prefixes = (SharedPrefix(tuple(range(64)), 128), SharedPrefix(tuple(range(65, 69)), 33))
        lengths = [*(2049 + 7 * row for row in range(64)), 1000, *(529 + row for row in range(4))]
        for kv_dtype in (dtype, E4M3) if HAS_E4M3 else (dtype,):
            case = shared_case(lengths, prefixes, heads=(32, 8), head_dim=128, dtype=dtype, kv_dtype=kv_dtype)
            case = case.to(DEVICE)
            plan = empty_plan(case, prefixes, 132, config=None)
            cascade_plan.fill_cascade_plan(plan)
            check(case, plan, ScoreRule(128**-0.5))
