"""Gate for full garbage collections (generation 2) of Python, which stop the process for as long as they take.

Knows the number of live sequences, and nothing else of requests or of the garbage.
"""

import asyncio
import gc
import time
from collections.abc import Callable

FEW_SEQUENCES = 2000  # of some 30 objects each: a collection takes less time than a long step
AT_LATEST_S = 1800.0

_LOOK_EVERY_S = 1.0
_NEVER = 1 << 30  # collections of the middle generation


class GcGate:
    """Allows full collections, as often as Python wants them, only while few sequences are live."""

    def __init__(self, *, few: int = FEW_SEQUENCES, at_latest_s: float = AT_LATEST_S) -> None:
        """`at_latest_s`: after so long without a full collection, the next is allowed however long it takes."""
        self._thresholds = gc.get_threshold()
        self._few = few
        self._at_latest_s = at_latest_s
        self._num_seen = self._num_collections()
        self._last_s = time.monotonic()

    def close(self) -> None:
        """Allow no full collection until `run` or `update` allows them again."""
        gc.set_threshold(*self._thresholds[:2], _NEVER)

    def update(self, num_sequences: int) -> None:
        """Open or close the gate, for so many live sequences."""
        if self._num_collections() != self._num_seen:
            self._num_seen, self._last_s = self._num_collections(), time.monotonic()
        # With 100,000 requests a collection would outlast the leader's lease. Ended requests are freed by reference
        # counts, so little is missed; but if a cycle remains somewhere, memory must not grow for ever under load.
        if num_sequences <= self._few or time.monotonic() - self._last_s >= self._at_latest_s:
            gc.set_threshold(*self._thresholds)
        else:
            self.close()

    async def run(self, num_sequences: Callable[[], int]) -> None:
        """Update every second, until cancelled; then restore Python's own thresholds."""
        try:
            while True:
                self.update(num_sequences())
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            gc.set_threshold(*self._thresholds)

    def _num_collections(self) -> int:
        return int(gc.get_stats()[2]["collections"])
