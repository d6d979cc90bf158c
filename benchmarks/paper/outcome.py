"""Outcome of serving a trace: latencies of its requests, and use of memory while requests arrived."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class MemoryUse:
    """Token slots, summed over steps; `pool` is the sum of all."""

    pool: int = 0
    filled: int = 0  # have a token
    reserved: int = 0  # will have one
    fragmented: int = 0  # kept for a request that will never use them

    def percentages(self) -> tuple[float, float, float, float]:
        """Percent of token states, reservation, internal fragmentation, and slots outside all requests."""
        if not self.pool:
            return (0.0, 0.0, 0.0, 0.0)
        rest = self.pool - self.filled - self.reserved - self.fragmented
        first, second, third, fourth = (
            round(100 * part / self.pool, 2) for part in (self.filled, self.reserved, self.fragmented, rest)
        )
        return first, second, third, fourth


@dataclass(slots=True)
class Outcome:
    """Sums. Latencies cover all requests; steps and memory those that began while requests arrived."""

    num_requests: int = 0
    normalized_latency_sum_s: float = 0.0
    num_steps: int = 0
    num_batched: int = 0  # requests, summed over steps
    num_preemptions: int = 0
    memory: MemoryUse = field(default_factory=MemoryUse)

    def end(self, latency_s: float, num_output: int) -> None:
        """Record that a request has its last token."""
        self.num_requests += 1
        self.normalized_latency_sum_s += latency_s / num_output

    @property
    def normalized_latency_s(self) -> float:
        """End-to-end latency by output length, mean over requests: seconds a token."""
        return self.normalized_latency_sum_s / self.num_requests

    @property
    def mean_batch(self) -> float:
        """Requests in a step."""
        return self.num_batched / self.num_steps
