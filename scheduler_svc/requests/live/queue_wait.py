"""How long a newcomer would wait for a worker, from how fast groups left the queue lately. Pure: it is told the time.

Only time in which somebody was left behind counts: a queue that everybody leaves at once says nothing of what could
leave it. When somebody is left behind again, what was seen before counts little: it may have been another load. It
knows no request, and not what makes the others wait: slots, memory, or the length of prompts.
"""

from collections import deque
from typing import NamedTuple

MIN_SERVED = 32  # the rate is taken over so many at least, in a slow service
MIN_BUSY_S = 5.0  # and over so much time at least, in a fast one
PRIOR_SERVED = 2.0  # what earlier busy times count for


class _Departure(NamedTuple):
    busy_s: float  # on the clock of busy time
    num_served: int


class QueueWait:
    """Told of each step that is planned; asked at the door."""

    def __init__(self) -> None:
        self._recent: deque[_Departure] = deque()  # since the queue was last empty
        self._num_recent = 0  # served, of those in `_recent`
        self._start_s = 0.0  # busy time at which they begin
        self._prior_served, self._prior_s = 0.0, 0.0  # of earlier busy times
        self._busy_s = 0.0  # up to `_seen_s`
        self._seen_s = 0.0
        self._num_served = 0
        self._is_busy = False  # somebody was left behind by the last step

    def record_step(self, now_s: float, num_served: int, num_waiting: int) -> None:
        """A step has been planned: so many have left the queue by now, in all, and so many still wait."""
        if self._is_busy:
            self._busy_s += now_s - self._seen_s
            if num_served > self._num_served:
                self._recent.append(_Departure(self._busy_s, num_served - self._num_served))
                self._num_recent += num_served - self._num_served
                self._forget()
        elif num_waiting:
            self._begin()
        self._is_busy = num_waiting > 0
        self._num_served = num_served
        self._seen_s = now_s

    def expected_s(self, now_s: float, num_ahead: int) -> float:
        """Seconds until a group with so many ahead of it would be taken; 0 if nothing says that it has to wait."""
        if not self._is_busy:
            return 0.0
        busy_s = self._prior_s + self._busy_s - self._start_s + now_s - self._seen_s
        # One more than was seen: with the first steps nobody may have left yet.
        return num_ahead * busy_s / (self._prior_served + self._num_recent + 1)

    def _begin(self) -> None:
        """Somebody is left behind, for the first time since the queue was empty."""
        served = self._prior_served + self._num_recent
        weight = PRIOR_SERVED / max(PRIOR_SERVED, served)
        self._prior_served = served * weight
        self._prior_s = (self._prior_s + self._busy_s - self._start_s) * weight
        self._recent.clear()
        self._num_recent = 0
        self._start_s = self._busy_s

    def _forget(self) -> None:
        """Drops the oldest while what is left says enough."""
        while (
            self._num_recent - self._recent[0].num_served >= MIN_SERVED
            and self._busy_s - self._recent[0].busy_s >= MIN_BUSY_S
        ):
            oldest = self._recent.popleft()
            self._num_recent -= oldest.num_served
            self._start_s = oldest.busy_s
            self._prior_served, self._prior_s = 0.0, 0.0
