"""Latency of recently ended requests: time to first token, and between tokens. Pure: the caller gives the time."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

WINDOW_S = 60.0
MAX_KEPT = 4096  # requests; sorting so many takes about a millisecond


class _Ended(NamedTuple):
    ended_s: float
    first_token_ns: int
    token_ns: int | None  # None: no sample had a second token


class LatencySummary(NamedTuple):
    """Percentiles in nanoseconds; None without values. Its fields are those of `LatencyStats` on the wire."""

    num_requests: int
    first_token_p50_ns: int | None
    first_token_p99_ns: int | None
    token_p50_ns: int | None
    token_p99_ns: int | None


class RecentLatency:
    """One per engine: the latencies behind GetStats."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=MAX_KEPT)

    def record_end(self, now_s: float, first_token_ns: int | None, token_ns: int | None) -> None:
        """Record an ended request: time to its first token and mean time between tokens; None where it had none."""
        if first_token_ns is not None:
            self._ended.append(_Ended(now_s, first_token_ns, token_ns))

    def summary(self, now_s: float) -> LatencySummary:
        """Percentiles over the requests that ended within the window."""
        while self._ended and self._ended[0].ended_s < now_s - WINDOW_S:
            self._ended.popleft()
        first = sorted(each.first_token_ns for each in self._ended)
        between = sorted(each.token_ns for each in self._ended if each.token_ns is not None)
        return LatencySummary(
            len(first), percentile(first, 50), percentile(first, 99), percentile(between, 50), percentile(between, 99)
        )


def percentile(in_order: Sequence[int], percent: int) -> int | None:
    """Least value that so many percent of the values do not exceed; None if there are no values."""
    if not in_order:
        return None
    return in_order[max(0, -(-len(in_order) * percent // 100) - 1)]
