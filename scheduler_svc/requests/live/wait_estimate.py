"""Estimate of how long a new request would wait for a worker.

The longer of two: how fast groups left the queue lately (`queue_wait`), and when running groups will leave their seats
(`seat_releases`). Where hardly any has left yet since groups wait, at most until the running ones have all of their
tokens: those that started together end together. The worker loops report each step, the engine each end; admission
asks. Knows no request.
"""

import time

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live.queue_wait import QueueWait
from scheduler_svc.requests.live.seat_releases import SeatReleases


class WaitEstimate:
    """One per engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.queue_wait = QueueWait()
        self._scheduler = scheduler
        self._seat_releases = SeatReleases(scheduler.workers.seat_use)

    def record_step(self, plan: StepPlan) -> None:
        """Record a step that has been planned."""
        now_s = time.monotonic()
        self.queue_wait.record_step(now_s, self._scheduler.waiting.num_served, len(self._scheduler.waiting))
        self._seat_releases.record_step(now_s, plan.worker_id, goes_on=len(plan.sequences) > len(plan.whole))

    def record_end(self, num_output_tokens: int, max_tokens: int) -> None:
        """Record the end of a group: output tokens of its longest member, and their bound."""
        self._seat_releases.record_end(num_output_tokens, max_tokens)

    def record_outage(self) -> None:
        """Record that the last worker has gone."""
        self.queue_wait.record_outage()
        self._seat_releases.forget_forecast()

    def expected_s(self, num_ahead: int) -> float:
        """Seconds until a request with so many ahead of it would get a worker; 0 if no wait is foreseen."""
        now_s = time.monotonic()
        queue_s = self.queue_wait.expected_s(now_s, num_ahead)
        seats_s = self._seat_releases.expected_s(now_s, num_ahead)
        if queue_s > seats_s and not self.queue_wait.is_measured:
            return max(seats_s, min(queue_s, self._seat_releases.latest_s(now_s, num_ahead)))
        return max(queue_s, seats_s)
