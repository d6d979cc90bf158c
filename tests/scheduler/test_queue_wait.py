"""The expected wait of a newcomer, against queues whose service is computed here, in virtual time."""

import random
from collections import deque

import pytest

from scheduler_svc.requests.queue_wait import QueueWait


def test_nothing_is_expected_of_a_queue_that_everybody_leaves_at_once() -> None:
    wait = QueueWait()
    for step in range(100):
        wait.note_step(step * 0.01, num_served=5 * step, num_waiting=0)
    assert wait.expected_s(1.0, 1000) == 0.0


def test_before_anything_was_measured_nobody_is_kept_out() -> None:
    wait = QueueWait()
    assert wait.expected_s(5.0, 1000) == 0.0
    wait.note_step(5.0, num_served=0, num_waiting=3)
    assert wait.expected_s(5.0, 1000) == 0.0


def test_those_ahead_leave_as_fast_as_others_did() -> None:
    """Two leave in each step of 0.1 s: 20 a second, one more counted than seen in a window of 101."""
    wait = QueueWait()
    for step in range(51):
        wait.note_step(step * 0.1, num_served=2 * step, num_waiting=9)
    assert wait.expected_s(5.0, 0) == 0.0
    assert wait.expected_s(5.0, 40) == pytest.approx(40 * 5.0 / 101)


def test_while_nobody_leaves_the_wait_grows() -> None:
    wait = QueueWait()
    wait.note_step(0.0, num_served=8, num_waiting=1)
    assert wait.expected_s(2.0, 1) == pytest.approx(2.0)
    assert wait.expected_s(20.0, 1) == pytest.approx(20.0)


def test_who_is_first_never_has_a_wait_however_slow_it_was() -> None:
    wait = QueueWait()
    wait.note_step(0.0, num_served=0, num_waiting=1)
    assert wait.expected_s(1e6, 0) == 0.0


def test_idle_time_between_bursts_does_not_count() -> None:
    """A second of 10 departures, an hour in which nobody waits, and the next burst."""
    wait = QueueWait()
    for step in range(11):
        wait.note_step(step * 0.1, num_served=step, num_waiting=1 if step < 10 else 0)
    wait.note_step(3600.0, num_served=15, num_waiting=20)
    assert wait.expected_s(3600.0, 11) == pytest.approx(11 * 1.0 / 11)


@pytest.mark.parametrize("num_slots", [1, 4, 64])
@pytest.mark.parametrize("service_s", [0.05, 1.0, 30.0])
def test_under_overload_the_expected_wait_is_the_real_one(num_slots: int, service_s: float) -> None:
    """Ten times as many come as can be served; who would wait longer than ten services is sent away.

    Of those let in, once as many have been served as the rate is taken over, none waits twice as long as that.
    """
    rng = random.Random(num_slots)
    wait, bound_s = QueueWait(), 10 * service_s
    ends = [0.0] * num_slots
    queue: deque[tuple[float, float]] = deque()  # came at, was told
    num_served, num_refused = 0, 0
    errors = []
    now_s = 0.0
    for _ in range(4000 + 600 * num_slots):
        now_s += rng.expovariate(10 * num_slots / service_s)
        while queue and min(ends) <= now_s:  # a step is planned whenever somebody has ended
            slot = ends.index(min(ends))
            came_s, told_s = queue.popleft()
            start_s = max(ends[slot], came_s)
            ends[slot] = start_s + service_s * rng.uniform(0.5, 1.5)
            num_served += 1
            wait.note_step(start_s, num_served, len(queue))
            if num_served > 20 * num_slots + 64:
                assert start_s - came_s < 2 * bound_s
                errors.append((start_s - came_s) / max(told_s, service_s))
        wait.note_step(now_s, num_served, len(queue))
        told_s = wait.expected_s(now_s, len(queue))
        if told_s > bound_s:
            num_refused += 1
        else:
            queue.append((now_s, told_s))
    assert num_refused > num_served
    assert 0.6 < sum(errors) / len(errors) < 1.5
