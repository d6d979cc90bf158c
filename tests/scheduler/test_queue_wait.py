"""The expected wait of a newcomer, against queues whose service is computed here, in virtual time."""

import random
from collections import deque

import pytest

from scheduler_svc.requests.live.queue_wait import QueueWait


def test_nothing_is_expected_of_a_queue_that_everybody_leaves_at_once() -> None:
    wait = QueueWait()
    for step in range(100):
        wait.record_step(step * 0.01, num_served=5 * step, num_waiting=0)
    assert wait.expected_s(1.0, 1000) == 0.0


def test_before_anything_was_measured_nobody_is_kept_out() -> None:
    wait = QueueWait()
    assert wait.expected_s(5.0, 1000) == 0.0
    wait.record_step(5.0, num_served=0, num_waiting=3)
    assert wait.expected_s(5.0, 1000) == 0.0


def test_those_ahead_leave_as_fast_as_others_did() -> None:
    """Two leave in each step of 0.1 s: 20 a second, one more counted than seen in a window of 101."""
    wait = QueueWait()
    for step in range(51):
        wait.record_step(step * 0.1, num_served=2 * step, num_waiting=9)
    assert wait.expected_s(5.0, 0) == 0.0
    assert wait.expected_s(5.0, 40) == pytest.approx(40 * 5.0 / 101)


def test_while_nobody_leaves_the_wait_grows() -> None:
    wait = QueueWait()
    wait.record_step(0.0, num_served=8, num_waiting=1)
    assert wait.expected_s(2.0, 1) == pytest.approx(2.0)
    assert wait.expected_s(20.0, 1) == pytest.approx(20.0)


def test_who_is_first_never_has_a_wait_however_slow_it_was() -> None:
    wait = QueueWait()
    wait.record_step(0.0, num_served=0, num_waiting=1)
    assert wait.expected_s(1e6, 0) == 0.0


def test_idle_time_between_bursts_does_not_count_and_what_was_before_it_counts_little() -> None:
    """A second of 10 departures, which stay as 2 in 0.2 s; an hour in which nobody waits; and the next burst."""
    wait = QueueWait()
    for step in range(11):
        wait.record_step(step * 0.1, num_served=step, num_waiting=1 if step < 10 else 0)
    wait.record_step(3600.0, num_served=15, num_waiting=20)
    assert wait.expected_s(3600.0, 30) == pytest.approx(30 * 0.2 / 3)
    wait.record_step(3602.0, num_served=16, num_waiting=19)
    assert wait.expected_s(3602.0, 30) == pytest.approx(30 * 2.2 / 4)


def test_a_stall_is_forgotten_when_others_leave_again() -> None:
    """A minute in which nobody leaves, then 20 a second for ten seconds."""
    wait = QueueWait()
    wait.record_step(0.0, num_served=0, num_waiting=9)
    for step in range(201):
        wait.record_step(60.0 + step * 0.05, num_served=step, num_waiting=9)
    assert wait.expected_s(70.0, 20) == pytest.approx(1.0, rel=0.05)


def test_time_without_workers_says_nothing_of_the_wait_for_those_that_come_back() -> None:
    """Twenty a second leave for ten seconds; then no worker is there for an hour, and nine still wait for the next."""
    wait = QueueWait()
    for step in range(201):
        wait.record_step(step * 0.05, num_served=step, num_waiting=9)
    wait.record_outage()
    assert wait.expected_s(1800.0, 1000) == 0.0, "nobody knows"
    wait.record_step(3610.0, num_served=201, num_waiting=8)
    assert wait.expected_s(3610.0, 40) == pytest.approx(40 * 0.1 / 3), "two in a tenth of a second, as before"


def test_a_stall_counts_as_long_as_the_departure_before_it_does() -> None:
    """One leaves after a second, nobody for a minute, then one each half second: 33 in all, so the first is dropped."""
    wait = QueueWait()
    for second in range(61):
        wait.record_step(float(second), num_served=min(second, 1), num_waiting=9)
    for number in range(1, 33):
        wait.record_step(60.0 + number / 2, num_served=1 + number, num_waiting=9)
    assert wait.expected_s(76.0, 33) == pytest.approx(33 * 75.0 / 33), "32 in the 75 seconds since the first left"
    wait.record_step(76.5, num_served=34, num_waiting=9)
    assert wait.expected_s(76.5, 33) == pytest.approx(33 * 16.0 / 33), "32 in the 16 seconds since the stall"


def test_where_many_leave_the_rate_is_that_of_the_last_five_seconds() -> None:
    """One leaves in each quarter of a second for ten seconds, then two."""
    wait = QueueWait()
    for step in range(41):
        wait.record_step(step / 4, num_served=step, num_waiting=9)
    for step in range(1, 41):
        wait.record_step(10.0 + step / 4, num_served=40 + 2 * step, num_waiting=9)
    assert wait.expected_s(20.0, 41) == pytest.approx(41 * 5.0 / 41), "40 in 5 seconds"


def test_all_busy_times_before_count_together_as_two_departures() -> None:
    """Ten in a second; an hour later four in four seconds; and the next burst."""
    wait = QueueWait()
    for step in range(11):
        wait.record_step(step * 0.1, num_served=step, num_waiting=1 if step < 10 else 0)
    for second in range(5):
        wait.record_step(3600.0 + second, num_served=10 + second, num_waiting=1 if second < 4 else 0)
    wait.record_step(7200.0, num_served=20, num_waiting=20)
    assert wait.expected_s(7200.0, 30) == pytest.approx(30 * (0.2 + 4.0) * 2 / 6 / 3)


def test_a_long_burst_is_measured_by_its_own_departures_alone() -> None:
    """Forty in four seconds; an hour later forty in forty, of which the last 32 count."""
    wait = QueueWait()
    for step in range(41):
        wait.record_step(step * 0.1, num_served=step, num_waiting=1 if step < 40 else 0)
    for second in range(41):
        wait.record_step(3600.0 + second, num_served=40 + second, num_waiting=9)
    assert wait.expected_s(3640.0, 33) == pytest.approx(33 * 32.0 / 33)


@pytest.mark.parametrize("num_seats", [1, 4, 64])
@pytest.mark.parametrize("service_s", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("bound", [1, 10])
def test_under_overload_nobody_who_is_let_in_waits_much_longer_than_the_bound(
    num_seats: int, service_s: float, bound: int
) -> None:
    """Half of what can be served comes, then ten times of it. The bound is the time in which `bound` per seat leave."""
    rng = random.Random(num_seats)
    wait, bound_s = QueueWait(), bound * service_s
    ends = [0.0] * num_seats
    queue: deque[float] = deque()  # when they came
    waits: list[float] = []
    num_served, now_s = 0, 0.0
    phases = [0.5] * (20 * num_seats) + [10.0] * (40 * num_seats * (bound + 5))
    for load in phases:
        now_s += rng.expovariate(load * num_seats / service_s)
        while queue and min(ends) <= now_s:  # a step is planned whenever somebody has ended
            seat = ends.index(min(ends))
            start_s = max(ends[seat], queue[0])
            waits.append(start_s - queue.popleft())
            ends[seat] = start_s + service_s * rng.uniform(0.5, 1.5)
            num_served += 1
            wait.record_step(start_s, num_served, len(queue))
        wait.record_step(now_s, num_served, len(queue))
        if wait.expected_s(now_s, len(queue)) <= bound_s:
            queue.append(now_s)
    overloaded = sorted(waits[len(waits) // 4 :])
    assert overloaded[int(0.99 * len(overloaded))] < 2 * bound_s + 2 * service_s  # who comes waits for whole services
    busy_part = num_served * service_s / (now_s * num_seats)
    assert busy_part > 0.5  # nobody is sent away for nothing
