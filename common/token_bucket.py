"""A rate with a burst, counted as tokens that come back with time. Pure: it is told the time."""


class TokenBucket:
    """Holds at most `burst` tokens, of which `rate` come back every second. It may owe as many as it may hold."""

    __slots__ = ("_burst", "_num_tokens", "_rate", "_seen_s")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate = rate
        self._burst = burst
        self._num_tokens = burst
        self._seen_s = now_s

    @property
    def is_overdrawn(self) -> bool:
        """Whether it owes all that it may: whoever takes goes on although nothing is left."""
        return self._num_tokens <= -self._burst

    def take(self, now_s: float) -> bool:
        """Takes a token. False: there was none, and one is owed."""
        self._num_tokens = min(self._burst, self._num_tokens + (now_s - self._seen_s) * self._rate)
        self._seen_s = now_s
        self._num_tokens = max(self._num_tokens - 1, -self._burst)
        return self._num_tokens >= 0

    def wait_s(self) -> float:
        """Seconds until there is a token again, as of the last `take`."""
        return max(0.0, (1 - self._num_tokens) / self._rate)
