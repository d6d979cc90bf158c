"""When what results brought is settled: at once if somebody waits for it, else, under load, with what follows.

To journal a token and to bring it to its reader costs the same whether it comes alone or with others of its sample.
Where many sequences take quick steps that is more than the steps cost: the tokens of several go together then, so many
that deliveries stay within a rate, and no token waits longer than a limit.

Knows no results: who settles asks, and says what is urgent.
"""

import asyncio
import time
from collections.abc import Callable

# A delivery costs the scheduler some 40 microseconds and its reader 30: a fifth of one core at this rate.
SECONDS_PER_DELIVERY = 1 / 3000
MAX_HELD_TOKENS = 256  # to settle more at once would hold up the next step


class SettlePace:
    """`wake` is called when something has been held back for as long as it may be: `longest_s` at most."""

    def __init__(self, longest_s: float, wake: Callable[[], None]) -> None:
        self._longest_s = longest_s
        self._wake = wake
        self._is_urgent = False
        self._settled_s = 0.0
        self._interval_s = 0.0  # from then on
        self._timer: asyncio.TimerHandle | None = None

    def hasten(self) -> None:
        """Somebody waits for what is not settled: a first token, or an end."""
        self._is_urgent = True

    def is_due(self, num_tokens: int) -> bool:
        """Whether to settle now, so many tokens. They are held back otherwise, until `wake` at the latest."""
        if self._is_urgent or num_tokens >= MAX_HELD_TOKENS:
            return True
        if time.monotonic() - self._settled_s >= self._interval_s:
            return True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._end_wait)
        return False

    def record_settled(self, num_deliveries: int) -> None:
        """All is settled: news of so many samples, each of which goes to its reader."""
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
