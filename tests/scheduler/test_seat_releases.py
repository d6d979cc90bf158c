"""Estimates of seat releases, against workers whose steps are made here, in virtual time."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from scheduler_svc.core.seat_use import RunningGroup, SeatUse
from scheduler_svc.requests.live.seat_releases import SeatReleases

STEP_S = 0.01


@dataclass
class Workers:
    """Steps of equal length; a group puts out a token in each."""

    num_seats: int
    groups: list[list[RunningGroup]]  # by worker
    now_s: float = 0.0
    releases: SeatReleases = field(init=False)

    def __post_init__(self) -> None:
        self.releases = SeatReleases(self.seat_use)

    def seat_use(self) -> list[SeatUse]:
        return [
            SeatUse(str(number), self.num_seats - len(groups), groups.copy())
            for number, groups in enumerate(self.groups)
        ]

    def step(self, used_part: float = 1.0) -> None:
        for number, groups in enumerate(self.groups):
            goes_on = bool(groups)
            for place, group in enumerate(groups):
                groups[place] = group._replace(num_output_tokens=group.num_output_tokens + 1)
            for group in [g for g in groups if g.num_output_tokens >= used_part * g.max_tokens]:
                groups.remove(group)
                self.releases.record_end(group.num_output_tokens, group.max_tokens)
            self.releases.record_step(self.now_s, str(number), goes_on=goes_on)
        self.now_s += STEP_S

    def expected_s(self, num_ahead: int) -> float:
        return self.releases.expected_s(self.now_s, num_ahead)


def begun(*max_tokens: int) -> list[RunningGroup]:
    return [RunningGroup(0, each) for each in max_tokens]


def test_a_worker_that_was_gone_is_measured_anew() -> None:
    workers = Workers(1, [begun(1000)])
    for _ in range(20):
        workers.step()
    workers.releases.record_end(10, 10)
    assert workers.expected_s(0) > 5.0
    groups, workers.groups = workers.groups, []
    workers.releases.record_end(10, 10)
    assert workers.expected_s(0) == 0.0
    workers.groups = groups
    workers.step()
    assert workers.expected_s(0) == 0.0, "one step says nothing of the time between two"
    workers.step()
    assert workers.expected_s(0) > 5.0


def test_while_seats_are_free_nobody_waits_but_those_for_whom_there_are_too_few() -> None:
    workers = Workers(4, [begun(10, 100)])
    for _ in range(20):
        workers.step()
    assert [workers.expected_s(num_ahead) for num_ahead in range(3)] == [0.0, 0.0, 0.0]
    assert workers.expected_s(3) == pytest.approx(10 * STEP_S, abs=2 * STEP_S), "as long as those that end so far"
    assert workers.expected_s(6) == pytest.approx(80 * STEP_S, abs=2 * STEP_S)


def test_of_a_worker_that_has_taken_no_step_nothing_is_known() -> None:
    workers = Workers(2, [[]])
    workers.releases.record_end(10, 10)
    assert [workers.expected_s(num_ahead) for num_ahead in range(5)] == [0.0] * 5


def test_before_an_end_was_seen_nobody_is_kept_out() -> None:
    workers = Workers(2, [begun(100, 100)])
    for _ in range(20):
        workers.step()
    assert workers.expected_s(5) == 0.0


def test_who_comes_waits_for_the_group_that_ends_at_its_place_of_all_workers() -> None:
    workers = Workers(2, [begun(10, 60), begun(40, 200)])
    for _ in range(11):
        workers.step()
    workers.groups[0] += begun(100)
    expected = [workers.expected_s(num_ahead) / STEP_S for num_ahead in range(4)]
    assert expected == pytest.approx([29, 49, 100, 189], abs=2)


def test_who_has_more_ahead_than_run_waits_for_newcomers_too() -> None:
    """Each of 20 tokens: the tenth at one seat waits for what is left of the one that runs, and nine more."""
    workers = Workers(1, [[]])
    for _ in range(3):
        workers.groups[0] += begun(20)
        while workers.groups[0]:
            workers.step()
    workers.groups[0] += begun(20)
    for _ in range(5):
        workers.step()
    assert workers.expected_s(9) == pytest.approx((15 + 9 * 20) * STEP_S, abs=2 * STEP_S)


def test_one_long_output_lengthens_the_expected_service_a_little() -> None:
    """Each of 20 tokens, but the last of 40: the next are expected to have 21, by the weight of the newest end."""
    workers = Workers(1, [[]])
    for length in (20, 20, 40):
        workers.groups[0] += begun(length)
        while workers.groups[0]:
            workers.step()
    workers.groups[0] += begun(20)
    workers.step()
    assert workers.expected_s(10) == pytest.approx((19 + 10 * 21) * STEP_S, abs=2 * STEP_S)


def test_groups_that_use_a_part_of_what_they_may_are_expected_to_end_so() -> None:
    """Each group uses a quarter of its max_tokens."""
    workers = Workers(1, [[]])
    for _ in range(80):
        workers.groups[0] += begun(40)
        while workers.groups[0]:
            workers.step(used_part=0.25)
    workers.groups[0] += begun(400)
    workers.step(used_part=0.25)
    assert workers.expected_s(0) == pytest.approx(99 * STEP_S, abs=3 * STEP_S)


def test_one_that_has_used_more_than_others_may_end_at_any_moment() -> None:
    workers = Workers(1, [begun(40)])
    while workers.groups[0]:
        workers.step(used_part=0.25)
    workers.groups[0] += [RunningGroup(20, 40)]
    workers.step()
    just_now_s = workers.now_s - STEP_S
    assert workers.releases.expected_s(just_now_s, 0) == pytest.approx(0.0, abs=1e-6)


def test_idle_time_is_no_time_between_steps() -> None:
    workers = Workers(1, [begun(10)])
    while workers.groups[0]:
        workers.step()
    workers.now_s += 3600.0
    workers.step()
    workers.groups[0] += begun(50)
    workers.step()
    assert workers.expected_s(0) == pytest.approx(50 * STEP_S, abs=2 * STEP_S)


def test_a_forecast_of_many_groups_counts_for_a_while_since_making_one_takes_milliseconds() -> None:
    """Regression: one was made at each step in which a request came, for more time than the step's own decision."""
    num_groups = 4096
    workers = Workers(num_groups, [begun(*[1000] * num_groups)])
    num_made = 0

    def seat_use() -> list[SeatUse]:
        nonlocal num_made
        num_made += 1
        return workers.seat_use()

    workers.releases = SeatReleases(seat_use)
    workers.releases.record_end(10, 10)
    for _ in range(200):
        workers.step()
        expected_s = workers.expected_s(0)
    assert num_made <= 200 * STEP_S / 0.4 + 1
    assert expected_s == pytest.approx(800 * STEP_S, abs=2 * STEP_S)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("lengths", [(64, 64), (16, 256)])
@pytest.mark.parametrize("bound_steps", [5, 40])
def test_under_overload_whoever_is_let_in_waits_no_longer_than_the_bound(
    num_workers: int, lengths: tuple[int, int], bound_steps: int
) -> None:
    """Ten times what can be served comes: nobody who is let in waits much longer, and no seat stays free for it."""
    rng = random.Random(f"{num_workers} {lengths} {bound_steps}")
    num_seats = 8
    workers = Workers(num_seats, [[] for _ in range(num_workers)])
    queue: deque[float] = deque()
    waits: list[float] = []
    num_busy, num_steps = 0, 4000
    per_step = 10 * num_seats * num_workers / (sum(lengths) / 2)
    for _ in range(num_steps):
        for groups in workers.groups:
            while queue and len(groups) < num_seats:
                came_s = queue.popleft()
                if came_s > 2 * lengths[1] * STEP_S:  # before, nobody had ended
                    waits.append(workers.now_s - came_s)
                groups += begun(rng.randint(*lengths))
            num_busy += len(groups)
        workers.step()
        for _ in range(int(per_step) + (rng.random() < per_step % 1)):
            if workers.expected_s(len(queue)) <= bound_steps * STEP_S:
                queue.append(workers.now_s)
    assert len(waits) > 100
    assert max(waits) <= (bound_steps + 2) * STEP_S
    assert num_busy / (num_steps * num_seats * num_workers) > 0.9
