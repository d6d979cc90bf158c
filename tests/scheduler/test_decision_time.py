"""Time of the next decision: late if the worker's speed is known, early enough to arrive; at once if it is unknown."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.workers.decision_time import (
    FIRST_LEAD_NS,
    MAX_LEAD_NS,
    MIN_DELAY_NS,
    MIN_LEAD_NS,
    MIN_REMEMBERED,
    NUM_REMEMBERED,
    DecisionTime,
)

MS = 1_000_000


def plan(num_tokens: list[int], step_id: int = 1) -> StepPlan:
    return StepPlan("w", step_id, False, num_tokens=num_tokens, positions=[0] * len(num_tokens))


def having_seen(num_tokens: list[int], *exec_ms: float) -> DecisionTime:
    times = DecisionTime()
    for each in exec_ms:
        times.learn(plan(num_tokens), round(each * MS), 10 * MS)
    return times


def test_a_step_of_an_unknown_kind_delays_nothing() -> None:
    times = having_seen([1] * 4, *[50.0] * (MIN_REMEMBERED - 1))
    assert times.delay_ns(plan([1] * 4), 0) == 0
    times.learn(plan([1] * 4), 50 * MS, 10 * MS)
    assert times.delay_ns(plan([1] * 4), 0) > 0
    assert times.delay_ns(plan([1, 1, 1, 16]), 0) == 0  # a prompt


def test_the_next_step_leaves_a_lead_before_the_shortest_end_of_late() -> None:
    times = having_seen([1] * 4, 60, 50, 55, 70)
    assert times.delay_ns(plan([1] * 4), 0) == 50 * MS - times.lead_ns
    assert times.delay_ns(plan([1] * 4), 20 * MS) == 30 * MS - times.lead_ns
    assert times.delay_ns(plan([1] * 4), 49 * MS) == 0
    assert times.delay_ns(plan([1] * 2), 0) == 25 * MS - times.lead_ns  # half the rows: half as long at least
    assert times.delay_ns(plan([1] * 8), 0) == 50 * MS - times.lead_ns


def test_a_step_is_foreseen_to_take_as_long_as_a_smaller_one_did() -> None:
    times = having_seen([1], 48, 47, 49)
    for _ in range(MIN_REMEMBERED):
        times.learn(plan([1] * 4), 50 * MS, 10 * MS)
    assert times.delay_ns(plan([1] * 2), 0) == 47 * MS - times.lead_ns  # and not half of 50
    assert times.delay_ns(plan([1] * 8), 0) == 50 * MS - times.lead_ns  # larger than all that were seen


def test_smaller_steps_that_were_slow_once_do_not_make_a_decision_late() -> None:
    times = having_seen([1], *[500.0] * MIN_REMEMBERED)
    for _ in range(MIN_REMEMBERED):
        times.learn(plan([1] * 4), 50 * MS, 10 * MS)
    assert times.delay_ns(plan([1] * 2), 0) == 50 * MS - times.lead_ns


def test_what_is_remembered_is_bounded_by_kinds_and_sizes() -> None:
    times = DecisionTime()
    for tokens in range(1, 3000):
        times.learn(plan([tokens]), 10 * MS, 10 * MS)
    kinds = times._seen.values()
    assert sum(len(steps) for sizes in kinds for steps in sizes.values()) <= 2 * 12 * NUM_REMEMBERED


def test_quick_steps_are_not_delayed() -> None:
    assert having_seen([1], *[FIRST_LEAD_NS / MS + 1] * 8).delay_ns(plan([1]), 0) == 0


def test_a_step_that_came_late_lengthens_the_lead_and_one_decided_at_once_does_not() -> None:
    times = having_seen([1] * 4, *[50.0] * 8)
    before = times.lead_ns
    times.learn(plan([1] * 4, step_id=9), 50 * MS, 0)
    assert times.lead_ns <= before
    times.record_delayed(10)
    times.learn(plan([1] * 4, step_id=10), 50 * MS, 0)
    assert times.lead_ns > before


def test_a_late_step_counts_though_the_one_behind_it_was_decided_late_too() -> None:
    times = having_seen([1] * 4, *[50.0] * 8)
    before = times.lead_ns
    times.record_delayed(9)
    times.record_delayed(10)  # while step 9 runs
    times.learn(plan([1] * 4, step_id=9), 50 * MS, 0)
    assert times.lead_ns > before
    times.learn(plan([1] * 4, step_id=10), 50 * MS, 0)
    assert times.lead_ns > before + MS


@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 400 * MS), st.integers(0, 50 * MS), st.booleans())),
    st.integers(1, 600),
    st.integers(0, 500 * MS),
)
def test_no_delay_outlasts_any_step_like_it_and_the_lead_stays_within_bounds(
    seen: list[tuple[int, int, int, bool]], num_tokens: int, has_run_ns: int
) -> None:
    times = DecisionTime()
    for step_id, (tokens, exec_ns, queue_ns, delayed) in enumerate(seen):
        if delayed:
            times.record_delayed(step_id)
        times.learn(plan([tokens], step_id), exec_ns, queue_ns)
    delay_ns = times.delay_ns(plan([num_tokens]), has_run_ns)
    assert MIN_LEAD_NS <= times.lead_ns <= MAX_LEAD_NS
    assert delay_ns == 0 or delay_ns >= MIN_DELAY_NS
    like = [exec_ns for tokens, exec_ns, _, _ in seen if (tokens > 1) == (num_tokens > 1)]
    assert delay_ns == 0 or delay_ns + has_run_ns < max(like)


def test_one_step_in_eight_comes_late_whatever_the_way_costs() -> None:
    """Steps of 20 to 24 ms, and a way to the worker of 1 to 9 ms: the lead settles where few come late."""
    random = Random(5)
    times = having_seen([1] * 4, *[20.0] * 8)
    late = 0
    for step_id in range(2, 4002):
        exec_ns = random.randrange(20 * MS, 24 * MS)
        delay_ns = times.delay_ns(plan([1] * 4, step_id - 1), 0)
        arrival_ns = delay_ns + random.randrange(1 * MS, 9 * MS)
        if delay_ns:
            times.record_delayed(step_id)
        late += step_id > 1000 and arrival_ns > exec_ns
        times.learn(plan([1] * 4, step_id), exec_ns, max(0, exec_ns - arrival_ns))
    assert 0.08 < late / 3000 < 0.17
    assert times.delay_ns(plan([1] * 4), 0) > 8 * MS  # and is not longer than it must be
