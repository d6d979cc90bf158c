"""Timeline of a simulation: what happens next, in the order of virtual time.

Knows nothing of what happens. What is due at the same moment happens in the order in which it was planned.
"""

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Timeline:
    """`now_s` is the present moment, in virtual seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._coming: list[tuple[float, int, Action]] = []
        self._turns = count()

    def at(self, moment_s: float, action: Action) -> None:
        """Plan an action; a moment that has passed is the present one."""
        heapq.heappush(self._coming, (max(moment_s, self.now_s), next(self._turns), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Plan an action so many seconds from now."""
        self.at(self.now_s + delay_s, action)

    def every(self, period_s: float, first_s: float, action: Action) -> None:
        """Plan an action again and again, without end."""

        def act() -> None:
            action()
            self.after(period_s, act)

        self.at(first_s, act)

    def run_until(self, end_s: float) -> None:
        """Let everything happen up to a moment, which is the present one then."""
        coming = self._coming
        while coming and coming[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(coming)
            action()
        self.now_s = end_s
