"""Measurements of a load test, request by request, and their summary. Pure: knows neither clock nor server."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One request as its client saw it; times are seconds since it was due, so a late start counts too."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # of all its samples
    num_samples: int = 1
    num_cached_tokens: int = 0
    saving: float | None = None  # of its blocks, by sharing among its samples
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float
    failure: str | None = None  # name of its exception
    reason: str = ""  # message of the exception

    @property
    def output_len(self) -> float:
        """Mean length of its samples, in tokens."""
        return self.num_output_tokens / self.num_samples

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time per token after a sample's first; None with fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_len < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_len - 1)

    @property
    def normalized_latency_s(self) -> float | None:
        """End-to-end latency divided by the output's length (the paper, section 6.1)."""
        return self.end_s / self.output_len if self.num_output_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of one quantity, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Percentiles | None":
        """Percentiles as values that occurred (nearest rank), without None; None if there are no values."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return None

        def rank(percent: int) -> float:
            return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

        return cls(mean=sum(ordered) / len(ordered), p50=rank(50), p90=rank(90), p99=rank(99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A load test in numbers."""

    duration_s: float
    num_requests: int
    num_completed: int
    failures: dict[str, int]
    reasons: dict[str, str]  # message of the first failure of each kind
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    saving: float | None  # mean over requests
    requests_per_s: float
    output_tokens_per_s: float
    time_to_first_token_s: Percentiles | None
    time_per_output_token_s: Percentiles | None
    normalized_latency_s: Percentiles | None
    interrupted: bool = False  # what had not ended by then is not counted


def summarize(measurements: Sequence[Measurement], duration_s: float, *, interrupted: bool = False) -> Summary:
    """Sums up; latencies are those of completed requests."""
    completed = [each for each in measurements if each.failure is None]
    failed = [(each.failure, each.reason) for each in measurements if each.failure is not None]
    output_tokens = sum(each.num_output_tokens for each in measurements)
    return Summary(
        duration_s=duration_s,
        num_requests=len(measurements),
        num_completed=len(completed),
        failures=dict(Counter(failure for failure, _ in failed)),
        reasons=dict(reversed(failed)),
        prompt_tokens=sum(each.num_prompt_tokens for each in completed),
        output_tokens=output_tokens,
        cached_tokens=sum(each.num_cached_tokens for each in completed),
        saving=_mean([each.saving for each in completed if each.saving is not None]),
        requests_per_s=len(completed) / duration_s if duration_s else 0.0,
        output_tokens_per_s=output_tokens / duration_s if duration_s else 0.0,
        time_to_first_token_s=Percentiles.of(each.first_token_s for each in completed),
        time_per_output_token_s=Percentiles.of(each.time_per_output_token_s for each in completed),
        normalized_latency_s=Percentiles.of(each.normalized_latency_s for each in completed),
        interrupted=interrupted,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
