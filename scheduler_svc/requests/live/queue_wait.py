"""Expected wait for a worker, from the rate at which groups left the queue lately. Pure: the caller gives the time.

Only time in which groups were left waiting counts: a queue that is emptied at once does not show its possible rate.
When groups wait again after an empty queue, or a time without workers, the earlier rate counts little: the load may
have been another. Knows no request, and not the reason of the wait: seats, memory, or the length of prompts.
"""

from collections import deque
from typing import NamedTuple

MIN_SERVED = 32  # groups over which the rate is taken at least, in a slow service
MIN_BUSY_S = 5.0  # and over so much time at least, in a fast one
PRIOR_SERVED = 2.0  # weight of earlier busy times, in groups


class _Departure(NamedTuple):
    busy_s: float  # on the clock of busy time
    num_served: int


class QueueWait:
    """One per engine. Steps are recorded as they are planned; admission asks."""

    def __init__(self) -> None:
        self._recent: deque[_Departure] = deque()  # since the queue was last empty
        self._num_recent = 0  # served, of those in `_recent`
        self._start_s = 0.0  # busy time at which they begin
        self._prior_served, self._prior_s = 0.0, 0.0  # of earlier busy times
        self._busy_s = 0.0  # up to `_seen_s`
        self._seen_s = 0.0
        self._num_served = 0
        self._is_busy = False  # the last step left groups waiting

    def record_step(self, now_s: float, num_served: int, num_waiting: int) -> None:
        """Record a planned step. `num_served`: groups that have left the queue, in all; `num_waiting`: still there."""
        if self._is_busy:
            self._busy_s += now_s - self._seen_s
            if num_served > self._num_served:
                self._recent.append(_Departure(self._busy_s, num_served - self._num_served))
                self._num_recent += num_served - self._num_served
                self._drop_oldest()
        elif num_waiting:
            self._begin()
        self._is_busy = num_waiting > 0
        self._num_served = num_served
        self._seen_s = now_s

    def record_outage(self) -> None:
        """Record that nobody is there to serve: the queue counts as empty until the next step."""
        self._is_busy = False

    @property
    def is_measured(self) -> bool:
        """True if enough groups have left since the queue was last empty; else the rate is little more than a guess."""
        return self._num_recent >= MIN_SERVED

    def expected_s(self, now_s: float, num_ahead: int) -> float:
        """Seconds until a group with so many ahead of it would be started; 0 if no wait is foreseen."""
        if not self._is_busy:
            return 0.0
        busy_s = self._prior_s + self._busy_s - self._start_s + now_s - self._seen_s
        # One more than was seen: no group may have left with the first steps.
        return num_ahead * busy_s / (self._prior_served + self._num_recent + 1)

    def _begin(self) -> None:
        """Begin a busy time: groups wait for the first time since the queue was empty."""
        served = self._prior_served + self._num_recent
        weight = PRIOR_SERVED / max(PRIOR_SERVED, served)
        self._prior_served = served * weight
        self._prior_s = (self._prior_s + self._busy_s - self._start_s) * weight
        self._recent.clear()
        self._num_recent = 0
        self._start_s = self._busy_s

    def _drop_oldest(self) -> None:
        """Drop the oldest departures while the rest is enough for a rate."""
        while (
            self._num_recent - self._recent[0].num_served >= MIN_SERVED
            and self._busy_s - self._recent[0].busy_s >= MIN_BUSY_S
        ):
            oldest = self._recent.popleft()
            self._num_recent -= oldest.num_served
            self._start_s = oldest.busy_s
            self._prior_served, self._prior_s = 0.0, 0.0
