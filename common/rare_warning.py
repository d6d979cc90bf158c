"""A warning of what others may cause as often as they like: at most one line a minute, with the number of times."""

import time
from typing import Any

import structlog

EVERY_S = 60.0

log = structlog.get_logger()


class RareWarning:
    """Writes the first time at once; what follows within a minute is counted, and told by the next line."""

    def __init__(self, event: str, **values: Any) -> None:
        """`values`: with each line."""
        self._event = event
        self._values = values
        self._written_s = float("-inf")
        self._num_times = 0  # since the last line

    def record(self, **values: Any) -> None:
        """Record that it happened once more; `values`: of this time, with a line that tells it."""
        self._num_times += 1
        now_s = time.monotonic()
        if now_s - self._written_s >= EVERY_S:
            log.warning(self._event, **self._values, **values, times=self._num_times)
            self._written_s, self._num_times = now_s, 0
