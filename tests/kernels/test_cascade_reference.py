"""Shared-prefix attention's reference equals plain decode attention, and its plans cover each prefix once."""

import random
from itertools import pairwise

import pytest
import torch

from kernels.attention import decode_reference
from kernels.attention.cascade_groups import SharedPrefix
from kernels.attention.cascade_reference import (
    CascadePlan,
    cascade_attention,
    fill_cascade_plan,
    part_of_plan,
    prefix_groups,
)
from kernels.attention.decode_reference import DecodeRows
from kernels.attention.shape import ScoreRule
from tests.kernels.cascade_cases import SMALL_CASCADE, empty_plan, refill, shared_case
from tests.kernels.decode_cases import DecodeCase, decode_case

RULE = ScoreRule(0.2)
LENGTHS = (33, 0, 100, 130, 49, 97, 34, 80, 81, 0)
PREFIXES = (SharedPrefix((2, 5, 3), 6), SharedPrefix((0, 6), 2), SharedPrefix((8, 7), 4))


def check(case: DecodeCase, plan: CascadePlan, rule: ScoreRule = RULE) -> None:
    out, _ = case.by_formula(rule, None, torch.float64)
    result = cascade_attention(case.query, case.key_cache, case.value_cache, plan, rule)
    torch.testing.assert_close(result.out.double(), out.nan_to_num(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_processors", [1, 20])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (5, 1), (20, 1)])
def test_the_reference_equals_attention_without_sharing(
    heads: tuple[int, int], soft_cap: float | None, num_processors: int
) -> None:
    case = shared_case(LENGTHS, PREFIXES, heads=heads)
    plan = empty_plan(case, PREFIXES, num_processors)
    fill_cascade_plan(plan)
    check(case, plan, ScoreRule(0.2, soft_cap))
    plain = case.empty_plan(8)
    decode_reference.fill_plan(plain)
    arguments = (case.query, case.key_cache, case.value_cache)
    out = torch.empty_like(case.query).contiguous()
    assert cascade_attention(*arguments, plan, RULE, out).out is out
    torch.testing.assert_close(out, decode_reference.decode_attention(*arguments, plain, RULE).out)


def test_without_groups_it_is_plain_decode_attention() -> None:
    case = decode_case(LENGTHS)
    plan = empty_plan(case, (), 8)
    fill_cascade_plan(plan)
    assert plan.num_work == 0
    check(case, plan)


def test_a_plan_is_refilled_in_place_for_other_groups() -> None:
    case = shared_case(LENGTHS, PREFIXES)
    plan = empty_plan(case, PREFIXES, 8)
    for prefixes in (PREFIXES, PREFIXES[1:], (), (SharedPrefix((3, 2), 5), SharedPrefix((7, 8), 1)), PREFIXES):
        refill(plan, prefixes)
        fill_cascade_plan(plan)
        plan.suffixes.partial_out.fill_(float("nan"))
        check(case, plan)


def test_plans_of_fewer_rows_work_in_the_memory_of_one_of_more() -> None:
    whole = empty_plan(decode_case((1, 1)), (), 8)
    prefixes = (SharedPrefix((2, 0), 2),)
    case = shared_case((40, 7, 33), prefixes)
    arrays = empty_plan(case, prefixes, 8).groups
    narrow = DecodeRows(case.rows.context_lens, case.rows.block_tables)
    with pytest.raises(AssertionError, match="more rows"):
        part_of_plan(whole, narrow, arrays)
    whole = empty_plan(decode_case((100,) * 16), (), 8)
    plan = part_of_plan(whole, narrow, arrays)
    assert plan.suffixes.partial_out.data_ptr() == whole.suffixes.partial_out.data_ptr()
    fill_cascade_plan(plan)
    check(case, plan)


def test_groups_are_views_of_the_uploads_arrays() -> None:
    arrays = {"cascade_groups": torch.arange(12), "cascade_members": torch.arange(9)}
    arrays["cascade_group_of_row"] = torch.arange(9)
    groups = prefix_groups(arrays, 5)
    assert groups.groups.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(groups.members) == len(groups.group_of_row) == 5
    arrays["cascade_groups"][4] = 7
    assert groups.groups[1, 1] == 7


def test_every_plan_covers_each_groups_keys_once_for_each_query_and_fits_its_memory() -> None:
    generator = random.Random("cascade plans")
    for _ in range(100):
        longest = generator.choice((3, 40, 1000))
        prefixes: list[SharedPrefix] = []
        lengths: list[int] = []
        for _ in range(generator.randint(0, 6)):
            first, count = len(lengths), generator.choice((2, 3, 9, 70))
            prefix = SharedPrefix(tuple(range(first, first + count)), generator.randint(1, longest))
            lengths += [prefix.num_blocks * 16 + generator.randint(1, 50) for _ in range(count)]
            prefixes.append(prefix)
        lengths += [generator.randint(0, 100) for _ in range(generator.randint(1, 5))]
        plan = _planned(lengths, prefixes, generator.choice((1, 7, 132)))
        assert plan.suffixes.prefixes is not None
        work = plan.work[: int(plan.num_work)].tolist()  # filling fails if the memory is too small
        for prefix in prefixes:
            own = [fields for fields in work if fields[0] == prefix.rows[0]]
            queries = range(0, len(prefix.rows) * 2, SMALL_CASCADE.rows)
            assert sorted({fields[2] for fields in own}) == list(queries)
            for first_query in queries:
                keys = sorted(fields[3:] for fields in own if fields[2] == first_query)
                assert keys[0][0] == 0 and keys[-1][1] == prefix.num_blocks * 16
                assert all(a[1] == b[0] for a, b in pairwise(keys))
                assert [split for *_, split in keys] == list(range(len(keys)))
                assert {int(plan.suffixes.prefixes.num_partials[row]) for row in prefix.rows} == {len(keys)}
        _check_partials(plan)


def _planned(lengths: list[int], prefixes: list[SharedPrefix], num_processors: int) -> CascadePlan:
    case = decode_case((1,), heads=(4, 2))
    tables = torch.zeros((len(lengths), max(1, -(-max(lengths) // 16))), dtype=torch.int32)
    rows = DecodeRows(torch.tensor(lengths, dtype=torch.int32), tables)
    many = DecodeCase(torch.empty(len(lengths), 4, 32), [], [], case.key_cache, case.value_cache, rows, case.shape, 16)
    plan = empty_plan(many, prefixes, num_processors)
    fill_cascade_plan(plan)
    return plan


def _check_partials(plan: CascadePlan) -> None:
    """Each row's own splits and its prefix's have places of their own, next to each other, within the memory."""
    prefixes = plan.suffixes.prefixes
    assert prefixes is not None
    splits = {row: count for row, *_, count in plan.suffixes.work[: int(plan.suffixes.num_work)].tolist()}
    end = 0
    for row, (first, count) in enumerate(
        zip(prefixes.first_partials.tolist(), prefixes.num_partials.tolist(), strict=True)
    ):
        assert first == end + splits[row]
        end = first + count
    assert end <= len(plan.suffixes.partial_out)
    assert len(plan.suffixes.partial_out) == len(plan.suffixes.partial_lse)
