"""How long a newcomer would wait for a worker, from how fast groups left the queue lately. Pure: it is told the time.

Only time in which somebody was left behind counts: a queue that everybody leaves at once says nothing of what could
leave it. It knows no request, and not what makes the others wait: slots, memory, or the length of prompts.
"""

from collections import deque
from typing import NamedTuple

MIN_SERVED = 32  # the rate is taken over so many at least, in a slow service
MIN_BUSY_S = 5.0  # and over so much time at least, in a fast one


class _Departure(NamedTuple):
    busy_s: float  # on the clock of busy time
    num_served: int


class QueueWait:
    """Told of each step that is planned; asked at the door."""

    def __init__(self) -> None:
        self._recent: deque[_Departure] = deque()
        self._num_recent = 0  # served, of those in `_recent`
        self._start_s = 0.0  # busy time at which they begin
        self._busy_s = 0.0  # up to `_seen_s`
        self._seen_s = 0.0
        self._num_served = 0
        self._is_busy = False  # somebody was left behind by the last step

    def note_step(self, now_s: float, num_served: int, num_waiting: int) -> None:
        """A step has been planned: so many have left the queue by now, in all, and so many still wait."""
        self._busy_s = self._busy_until(now_s)
        if self._is_busy and num_served > self._num_served:
            self._recent.append(_Departure(self._busy_s, num_served - self._num_served))
            self._num_recent += num_served - self._num_served
            self._forget()
        self._is_busy = num_waiting > 0
        self._num_served = num_served
        self._seen_s = now_s

    def expected_s(self, now_s: float, num_ahead: int) -> float:
        """Seconds until a group with so many ahead of it would be taken; 0 if nothing says that it has to wait."""
        busy_s = self._busy_until(now_s) - self._start_s
        if not self._is_busy or busy_s <= 0:
            return 0.0
        # One more than was seen: with the first steps nobody may have left yet.
        return num_ahead * busy_s / (self._num_recent + 1)

    def _busy_until(self, now_s: float) -> float:
        return self._busy_s + (now_s - self._seen_s if self._is_busy else 0.0)

    def _forget(self) -> None:
        """Drops the oldest while what is left says enough."""
        while (
            self._num_recent - self._recent[0].num_served >= MIN_SERVED
            and self._busy_s - self._recent[0].busy_s >= MIN_BUSY_S
        ):
            oldest = self._recent.popleft()
            self._num_recent -= oldest.num_served
            self._start_s = oldest.busy_s
