"""Decode attention's reference follows the formula, and every plan covers all keys once, in the memory it has."""

import math
import random

import numpy as np
import pytest
import torch

from kernels.attention.decode_reference import (
    COSTS,
    SHARES,
    DecodePlan,
    DecodeRows,
    decode_attention,
    empty_plan,
    fill_plan,
)
from kernels.attention.shape import ScoreRule
from kernels.attention.split_sizes import best_size, even_splits
from tests.kernels.decode_cases import SMALL, TILE, decode_case

LENGTHS = (1, 15, 16, 17, 63, 31, 32, 33, 128, 0)
RULE = ScoreRule(0.2)
CASE = decode_case([1])


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (5, 1)])
def test_the_reference_follows_the_formula(heads: tuple[int, int], soft_cap: float | None, window: int | None) -> None:
    case = decode_case(LENGTHS, heads=heads)
    rule = ScoreRule(0.2, soft_cap)
    plan = case.empty_plan(8, window)
    result = decode_attention(case.query, case.key_cache, case.value_cache, plan, rule, with_lse=True)
    out, lse = case.by_formula(rule, window, torch.float64)
    torch.testing.assert_close(result.out.double(), out, rtol=1e-5, atol=1e-5)
    assert result.lse is not None
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-5, atol=1e-5)
    assert decode_attention(case.query, case.key_cache, case.value_cache, plan, rule).lse is None


def _plan(lengths: list[int], num_programs: int, window: int | None) -> DecodePlan:
    tables = torch.zeros((len(lengths), -(-max(lengths) // 16)), dtype=torch.int32)
    rows = DecodeRows(torch.tensor(lengths, dtype=torch.int32), tables)
    plan = empty_plan(rows, CASE.shape, SMALL, 16, num_programs, window)
    fill_plan(plan)
    return plan


@pytest.mark.parametrize("window", [None, 1, 16, 17, 100])
def test_every_plan_covers_each_rows_keys_once_and_fits_its_memory(window: int | None) -> None:
    generator = random.Random(f"plans {window}")
    for _ in range(150):
        longest = generator.choice((20, 300, 20_000))
        lengths = [
            generator.choice((0, 1, longest, generator.randint(0, longest))) for _ in range(generator.randint(1, 40))
        ]
        plan = _plan(lengths, generator.choice((1, 7, 132, 396)), window)
        work = plan.work[: plan.num_work.item()].tolist()  # filling fails if the memory is too small
        assert plan.num_work.item() <= len(plan.work)
        for row, length in enumerate(lengths):
            own = [(i, *fields[1:]) for i, fields in enumerate(work) if fields[0] == row]
            first = 0 if window is None else max(0, length - window)
            assert [start for _, start, *_ in own] == [first, *[end for _, _, end, *_ in own[:-1]]]
            assert own[-1][2] == length
            assert {(first_work, count) for *_, first_work, count in own} == {(own[0][0], len(own))}
            assert all(end > start for _, start, end, *_ in own) or length == 0
            assert all(start % TILE == 0 for _, start, *_ in own[1:])


def test_plans_split_only_where_programs_would_idle() -> None:
    # 2 key-value heads, 132 programs.
    assert _plan([1600] * 66, 132, None).num_work.item() == 66  # one wave as it is
    assert _plan([1600] * 660, 132, None).num_work.item() == 660
    alone = _plan([16_000], 132, None)
    assert 16 <= alone.num_work.item() <= 66
    mixed = _plan([16_000, *[160] * 66], 132, None)
    counts = {row: count for row, *_, count in mixed.work[: mixed.num_work.item()].tolist()}
    assert counts.pop(0) > 8
    assert set(counts.values()) == {1}
    # A window leaves little of a long context, and nothing to split.
    assert _plan([16_000], 132, 16).num_work.item() <= 2


def test_a_split_that_saves_less_than_its_merge_costs_is_not_made() -> None:
    one, two = np.array([1]), np.array([2])
    assert best_size(one, 8, 396, SHARES, COSTS) == 1
    assert [int(each[0]) for each in even_splits(two, best_size(two, 1, 396, SHARES, COSTS))] == [2, 1]
    even, counts = even_splits(np.array([5, 9, 0]), np.array([4, 2, 3]))
    assert (even.tolist(), counts.tolist()) == ([3, 2, 1], [2, 5, 1])


def test_a_row_of_no_context_gives_zeros() -> None:
    case = decode_case([0, 3])
    result = decode_attention(case.query, case.key_cache, case.value_cache, case.empty_plan(1), RULE, with_lse=True)
    assert (result.out[0] == 0).all()
    assert result.lse is not None
    assert (result.lse[0] == -math.inf).all()
    assert result.lse[1].isfinite().all()
