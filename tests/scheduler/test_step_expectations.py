"""Expected time of a step, from the steps before it, and the steps without one."""

import pytest

from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.workers.step_expectations import MAX_TIMES_LARGER, MIN_STEPS, StepExpectations


def plan(
    num_tokens: list[int], position: int = 0, num_copies: int = 0, candidate_rows: tuple[int, ...] = ()
) -> StepPlan:
    return StepPlan(
        "w",
        1,
        False,
        num_tokens=num_tokens,
        positions=[position] * len(num_tokens),
        copies=[0, 1] * num_copies,
        candidate_rows=list(candidate_rows),
    )


def having_seen(seen: StepPlan, duration_s: float, times: int = MIN_STEPS) -> StepExpectations:
    expectations = StepExpectations()
    for _ in range(times):
        expectations.learn(seen, duration_s)
    return expectations


def test_a_step_like_those_before_takes_as_long_and_a_smaller_one_no_longer() -> None:
    expectations = having_seen(plan([1] * 8, 100), 0.02)
    assert expectations.expected_s(plan([1] * 8, 100)) == pytest.approx(0.02)
    assert expectations.expected_s(plan([1], 10)) == pytest.approx(0.02)


def test_the_first_steps_of_a_kind_are_not_judged() -> None:
    assert having_seen(plan([1]), 0.02, MIN_STEPS - 1).expected_s(plan([1])) is None
    expectations = having_seen(plan([1] * 8, 100), 0.02)
    for other in (plan([8], 100), plan([1] * 8, 100, num_copies=1), plan([1] * 8, 100, candidate_rows=(0,))):
        assert expectations.expected_s(other) is None


@pytest.mark.parametrize(
    ("larger", "times"),
    [
        (plan([64], 100), 4.0),  # 4 times the tokens, and less than 4 times the attention
        (plan([16], 1000), 1016 / 116),  # far into a long prompt
        (plan([16, 16, 16], 100), 3.0),
    ],
)
def test_more_work_may_take_as_much_longer(larger: StepPlan, times: float) -> None:
    expected_s = having_seen(plan([16], 100), 0.5).expected_s(larger)
    assert expected_s is not None and expected_s >= 0.5 * times - 1e-9


def test_a_step_far_larger_than_any_before_is_not_judged() -> None:
    expectations = having_seen(plan([16]), 0.01)
    assert expectations.expected_s(plan([16] * MAX_TIMES_LARGER)) is not None
    assert expectations.expected_s(plan([16] * (MAX_TIMES_LARGER + 1))) is None
    assert expectations.expected_s(plan([512], 4096)) is None


def test_what_is_expected_follows_the_worker() -> None:
    expectations = having_seen(plan([1] * 8), 0.02)
    for _ in range(200):
        expectations.learn(plan([1] * 8), 0.2)
    assert expectations.expected_s(plan([1] * 8)) == pytest.approx(0.2, rel=0.01)
