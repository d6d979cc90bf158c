"""The estimate of a newcomer's wait, against seats and a queue that are simulated here, in virtual time."""

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.seat_use import RunningGroup, SeatUse
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live import wait_estimate
from scheduler_svc.requests.live.wait_estimate import WaitEstimate

STEP_S = 0.05
NUM_SEATS = 16
NUM_TOKENS = 400  # of each output: 20 s


class Waiting(deque[float]):
    """Moments at which those that wait have come."""

    num_served = 0


class Service:
    """One worker of which every seat puts out a token in each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.waiting = Waiting()
        self.waits_s: list[float] = []  # of those that have started
        self.num_blocked_seats = 0
        self.is_worker_there = True
        self._groups: list[RunningGroup] = []
        monkeypatch.setattr(wait_estimate, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.estimate = WaitEstimate(cast(Scheduler, self))

    @property
    def workers(self) -> Any:
        return SimpleNamespace(seat_use=self._seat_use)

    def _seat_use(self) -> list[SeatUse]:
        return [SeatUse("w", NUM_SEATS - len(self._groups), self._groups)] if self.is_worker_there else []

    def expected_s(self) -> float:
        return self.estimate.expected_s(len(self.waiting))

    def step(self) -> None:
        goes_on = len(self._groups) > 0
        self._groups = [each._replace(num_output_tokens=each.num_output_tokens + 1) for each in self._groups]
        for each in [each for each in self._groups if each.num_output_tokens == NUM_TOKENS]:
            self._groups.remove(each)
            self.estimate.record_end(NUM_TOKENS, NUM_TOKENS)
        while self.waiting and len(self._groups) < NUM_SEATS - self.num_blocked_seats:
            self.waits_s.append(self.now_s - self.waiting.popleft())
            self._groups.append(RunningGroup(0, NUM_TOKENS))
            self.waiting.num_served += 1
        self.estimate.record_step(cast(StepPlan, SimpleNamespace(worker_id="w", sequences=[0] * goes_on, whole=())))
        self.now_s += STEP_S


def test_who_comes_while_the_first_requests_run_is_not_taken_for_waiting_longer_than_until_those_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: since nobody had left the queue, each that was ahead counted for as long as somebody had waited.

    Sixteen come at once, for 20 s each, and then two a second: the last before the first end waits for 20 s.
    """
    service = Service(monkeypatch)
    service.waiting.extend([0.0] * NUM_SEATS)
    while len(service.waits_s) < NUM_SEATS + 1:
        service.step()
        if round(service.now_s / STEP_S) % 10 == 0:
            assert service.expected_s() <= (NUM_TOKENS + 1) * STEP_S * (1 + len(service.waiting) // NUM_SEATS)
            service.waiting.append(service.now_s)
    assert len(service.waiting) > NUM_SEATS


def test_while_it_is_not_seats_that_groups_wait_for_the_queue_alone_says_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the seats stay free, for want of memory."""
    service = Service(monkeypatch)
    service.num_blocked_seats = NUM_SEATS // 2
    service.waiting.extend([0.0] * NUM_SEATS)
    for _ in range(200):
        service.step()
    assert service.expected_s() == pytest.approx(len(service.waiting) * 199 * STEP_S, rel=0.02)


def test_without_workers_no_wait_is_foreseen_from_the_seats_that_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: who came then was refused, for a forecast from before that nothing made outdated."""
    service = Service(monkeypatch)
    service.waiting.extend([0.0] * 4 * NUM_SEATS)
    for _ in range(NUM_TOKENS + 2):
        service.step()
    assert service.expected_s() > NUM_TOKENS * STEP_S
    service.is_worker_there = False
    service.estimate.record_outage()
    assert service.expected_s() == 0.0
