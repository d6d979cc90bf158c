"""Pace of settling: at once if a reader waits for a first token or an end, else, under load, several steps together.

A delivery, which is a journal record and a message to the reader, costs the same for one token of a sample as for many.
Where many sequences take quick steps, deliveries would cost more than the steps: the tokens of several steps go
together then, so that deliveries stay within a rate and no token waits longer than a limit.

Knows no results: the engine asks, and reports urgent news.
"""

import asyncio
import time
from collections.abc import Callable

# A delivery costs the scheduler some 40 microseconds and its reader 30: a fifth of one core at this rate.
SECONDS_PER_DELIVERY = 1 / 3000
MAX_HELD_TOKENS = 256  # settling more at once would delay the next step


class SettlePace:
    """One per engine. `wake` is called when tokens have been held back for `longest_s`, the longest allowed wait."""

    def __init__(self, longest_s: float, wake: Callable[[], None]) -> None:
        self._longest_s = longest_s
        self._wake = wake
        self._is_urgent = False
        self._settled_s = 0.0
        self._interval_s = 0.0  # from then on
        self._timer: asyncio.TimerHandle | None = None

    def hasten(self) -> None:
        """Make the next settling due at once: a reader waits for a first token, or for an end."""
        self._is_urgent = True

    def is_due(self, num_tokens: int) -> bool:
        """True if so many tokens are to be settled now. Else they are held back, until `wake` at the latest."""
        if self._is_urgent or num_tokens >= MAX_HELD_TOKENS:
            return True
        if time.monotonic() - self._settled_s >= self._interval_s:
            return True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._end_wait)
        return False

    def record_settled(self, num_deliveries: int) -> None:
        """Record a settling, with one delivery for each sample that had news."""
        self._is_urgent = False
        self._settled_s = time.monotonic()
        self._interval_s = min(self._longest_s, num_deliveries * SECONDS_PER_DELIVERY)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_wait(self) -> None:
        self._timer = None
        self._is_urgent = True
        self._wake()
