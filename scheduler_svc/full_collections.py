"""When Python may look through everything for garbage, which stops the process for as long as that takes.

Knows of requests only how many sequences are live, and nothing of what the garbage is.
"""

import asyncio
import gc
import time
from collections.abc import Callable

FEW_SEQUENCES = 2000  # of some 30 objects each: looked through in less time than a long step
AT_LATEST_S = 1800.0

_LOOK_EVERY_S = 1.0
_NEVER = 1 << 30  # collections of the middle generation


class FullCollections:
    """Python's own, of the oldest generation, as often as it finds right, but only where they are short."""

    def __init__(self, *, few: int = FEW_SEQUENCES, at_latest_s: float = AT_LATEST_S) -> None:
        """Without one for `at_latest_s` the next may be long."""
        self._thresholds = gc.get_threshold()
        self._few = few
        self._at_latest_s = at_latest_s
        self._num_seen = self._num_made()
        self._last_s = time.monotonic()

    def put_off(self) -> None:
        """None until `tend` lets them take place again."""
        gc.set_threshold(*self._thresholds[:2], _NEVER)

    def decide(self, num_sequences: int) -> None:
        """Whether they may take place, with so many sequences live."""
        if self._num_made() != self._num_seen:
            self._num_seen, self._last_s = self._num_made(), time.monotonic()
        # With 100,000 requests one would outlast the leader's lease. What ends is freed by its reference counts, so
        # little is missed; but if a cycle remains somewhere, memory must not grow for ever under a load that stays.
        if num_sequences <= self._few or time.monotonic() - self._last_s >= self._at_latest_s:
            gc.set_threshold(*self._thresholds)
        else:
            self.put_off()

    async def tend(self, num_sequences: Callable[[], int]) -> None:
        """Decides again and again, until cancelled; then they take place as they did before."""
        try:
            while True:
                self.decide(num_sequences())
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            gc.set_threshold(*self._thresholds)

    def _num_made(self) -> int:
        return int(gc.get_stats()[2]["collections"])
