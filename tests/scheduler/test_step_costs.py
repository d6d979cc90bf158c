"""Estimates of a worker's speed from its steps, and the changes worth reporting."""

from itertools import pairwise
from typing import Any

import pytest

from common.step import StepResult
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.workers.step_costs import NOTICEABLE_CHANGE, PREFILL_WINDOW_TOKENS, Speed, StepCosts

MS = 1_000_000  # ns


def learn(costs: StepCosts, num_tokens: list[int], *, num_moved: int = 0, **times: Any) -> PreemptionCosts | None:
    """Learn from a step with these rows and this many moved blocks, half of them each way."""
    plan = StepPlan("w", 1, False, num_tokens=num_tokens)
    num_out = num_moved // 2
    plan.swap_out = [0, 0] * num_out
    plan.swap_in = [0, 0] * (num_moved - num_out)
    return costs.learn(plan, StepResult(epoch=1, step_id=1, **times))


def test_prefill_is_measured_in_steps_without_swaps_and_told_when_it_is_known() -> None:
    costs = StepCosts()
    assert learn(costs, [100], exec_ns=900 * MS) is None  # the first is slow: it says nothing of the others
    assert learn(costs, [100], num_moved=2, exec_ns=60 * MS, swap_ns=55 * MS) is None  # at the same time, perhaps
    told = learn(costs, [100], exec_ns=50 * MS)
    assert told == PreemptionCosts(prefill_tokens_per_s=2000.0, prefill_step_tokens=100)
    assert costs.prefill.per_s == 2000.0 and costs.swap.per_s is None


def test_steps_that_decode_say_nothing_of_prefill() -> None:
    costs = StepCosts()
    for num_tokens in ([1] * 50, [1, 1, 2], [1] * 60 + [40], [1]):
        for _ in range(3):
            assert learn(costs, num_tokens, exec_ns=MS) is None
    assert costs.prefill.per_s is None


def test_the_time_of_a_step_that_decodes_is_told_with_the_next_news() -> None:
    costs = StepCosts()
    for exec_ns in (0, 4 * MS, 4 * MS, 0):  # a worker may leave a time out
        assert learn(costs, [1, 1], exec_ns=exec_ns) is None
    learn(costs, [100], exec_ns=50 * MS)
    told = learn(costs, [100], exec_ns=50 * MS)
    assert told is not None and told.decode_step_s == pytest.approx(0.004)
    for _ in range(100):
        learn(costs, [1] * 9, exec_ns=12 * MS)
    told = learn(costs, [100], exec_ns=50 * MS)
    assert told is not None and told.decode_step_s == pytest.approx(0.012, rel=0.02)


def test_decoding_beside_a_prompt_counts_as_tokens_computed() -> None:
    costs = StepCosts()
    for _ in range(2):
        learn(costs, [1] * 20 + [80], exec_ns=100 * MS)
    assert costs.prefill.per_s == 1000.0


def test_the_speed_of_swaps_is_blocks_over_time_whichever_way_they_go() -> None:
    costs = StepCosts()
    for _ in range(2):
        assert learn(costs, [1], num_moved=6, exec_ns=20 * MS, swap_ns=3 * MS) is None
    assert costs.swap.per_s == 2000.0
    learn(costs, [9], exec_ns=MS)
    told = learn(costs, [9], exec_ns=MS)
    assert told == PreemptionCosts(prefill_tokens_per_s=9000.0, prefill_step_tokens=9, swap_blocks_per_s=2000.0)


def test_a_worker_that_does_not_time_its_swaps_leaves_their_speed_unknown() -> None:
    costs = StepCosts()
    for _ in range(5):
        learn(costs, [50], num_moved=6, exec_ns=10 * MS)
    assert costs.swap.per_s is None and costs.prefill.per_s == 5000.0


def test_a_result_whose_times_make_no_sense_is_left_out() -> None:
    costs = StepCosts()
    for _ in range(3):
        learn(costs, [50], num_moved=6, exec_ns=MS, swap_ns=2 * MS)
        learn(costs, [50])
    assert costs.prefill.per_s is None


def test_only_what_has_changed_noticeably_is_told_again() -> None:
    costs = StepCosts()
    learn(costs, [100], exec_ns=100 * MS)
    assert learn(costs, [100], exec_ns=100 * MS) is not None
    assert all(learn(costs, [100], exec_ns=100 * MS) is None for _ in range(20))
    told = [learn(costs, [100], exec_ns=50 * MS) for _ in range(400)]
    rates = [1000.0, *(each.prefill_tokens_per_s for each in told if each is not None)]
    assert 2 <= len(rates) <= 9  # from 1000 to 2000 in steps of a tenth: 1.1 ** 8 > 2
    assert all(b > a * (1 + NOTICEABLE_CHANGE) for a, b in pairwise(rates))
    first_swap = [learn(costs, [1], num_moved=2, exec_ns=MS, swap_ns=MS) for _ in range(2)]
    assert first_swap[0] is None
    assert first_swap[1] is not None and first_swap[1].swap_blocks_per_s == 2000.0


def test_an_average_follows_a_change_within_its_window() -> None:
    speed = Speed(PREFILL_WINDOW_TOKENS)
    for _ in range(200):
        speed.add(256, 256 * MS)
    assert speed.per_s == pytest.approx(1000.0)
    for _ in range(3 * PREFILL_WINDOW_TOKENS // 256):
        speed.add(256, 64 * MS)
    assert speed.per_s == pytest.approx(4000.0, rel=0.06)


def test_large_steps_outweigh_small_ones() -> None:
    speed = Speed(PREFILL_WINDOW_TOKENS)
    for _ in range(20):
        speed.add(2, 10 * MS)  # 200 a second: what a step costs at least
        speed.add(500, 50 * MS)  # 10,000 a second
    assert speed.per_s is not None and speed.per_s > 9500
    assert speed.amount is not None and speed.amount > 450
