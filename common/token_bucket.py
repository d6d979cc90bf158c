"""A rate limit with a burst, as a token bucket. Pure: callers pass the time."""


class TokenBucket:
    """Holds at most `burst` tokens, and gains `rate` per second. Its debt is at most `burst` tokens, too."""

    __slots__ = ("_burst", "_num_tokens", "_rate", "_seen_s")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate = rate
        self._burst = burst
        self._num_tokens = burst
        self._seen_s = now_s

    @property
    def is_overdrawn(self) -> bool:
        """True once the debt is at its maximum: the caller goes on although no tokens are left."""
        return self._num_tokens <= -self._burst

    def take_token(self, now_s: float) -> bool:
        """Take a token. False: none was left, and the debt grows by one."""
        self._num_tokens = min(self._burst, self._num_tokens + (now_s - self._seen_s) * self._rate)
        self._seen_s = now_s
        self._num_tokens = max(self._num_tokens - 1, -self._burst)
        return self._num_tokens >= 0

    def wait_s(self) -> float:
        """Seconds until a token is available, as of the last `take_token`."""
        return max(0.0, (1 - self._num_tokens) / self._rate)
