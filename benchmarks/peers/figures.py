"""What is made of a run's token times: throughput, latencies, their medians over rounds, targets, equal outputs.

Knows neither processes nor files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Self

from benchmarks.report import percentile

_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one load in one round; `median_of` makes those of all rounds."""

    tokens_per_s: float
    seconds: float  # from the begin of the load to the last token
    normalised_latency_s: float  # mean over requests of (last token - arrival) / output tokens
    first_token_p50_s: float  # from the arrival of a request
    first_token_p99_s: float
    per_token_p50_s: float  # gaps between two tokens of a request
    per_token_p99_s: float
    peak_memory_mib: float

    @classmethod
    def of(cls, arrivals_s: Sequence[float], token_s: Sequence[Sequence[float]], peak_memory_bytes: int) -> Self:
        """`token_s` are the moments of each request's tokens, on the clock of its arrival."""
        first = [times[0] - arrival for arrival, times in zip(arrivals_s, token_s, strict=True)]
        whole = [(times[-1] - arrival) / len(times) for arrival, times in zip(arrivals_s, token_s, strict=True)]
        gaps = [later - sooner for times in token_s for sooner, later in pairwise(times)] or [0.0]
        seconds = max(times[-1] for times in token_s)
        return cls(
            tokens_per_s=round(sum(map(len, token_s)) / seconds, 1),
            seconds=round(seconds, 3),
            normalised_latency_s=round(fmean(whole), _DIGITS),
            first_token_p50_s=round(percentile(first, 50), _DIGITS),
            first_token_p99_s=round(percentile(first, 99), _DIGITS),
            per_token_p50_s=round(percentile(gaps, 50), _DIGITS),
            per_token_p99_s=round(percentile(gaps, 99), _DIGITS),
            peak_memory_mib=round(peak_memory_bytes / 2**20, 1),
        )

    @classmethod
    def median_of(cls, rounds: Sequence[Self]) -> Self:
        """Each figure by itself. Raises ValueError without rounds."""
        if not rounds:
            raise ValueError("a median needs at least one round")
        return cls(**{name: median(getattr(each, name) for each in rounds) for name in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ours against one target."""

    name: str
    ratio: float
    target: float

    @property
    def met(self) -> bool:
        return self.ratio >= self.target

    @property
    def sentence(self) -> str:
        return f"{self.ratio:.2f} x {self.name}; target {self.target} x: {'met' if self.met else 'NOT met'}"


def verdicts(tokens_per_s: Mapping[str, float], ours: str, targets: Mapping[str, float]) -> list[Verdict]:
    """Of the peers that were measured."""
    if ours not in tokens_per_s:
        return []
    return [
        Verdict(name, tokens_per_s[ours] / tokens_per_s[name], target)
        for name, target in targets.items()
        if name in tokens_per_s
    ]


def num_equal(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many requests have the same output, token for token; how many tokens stand before a first difference."""
    agreed = [_common(one, other) for one, other in zip(tokens, reference, strict=True)]
    return {
        "requests": len(reference),
        "equal": sum(number == len(other) for number, other in zip(agreed, reference, strict=True)),
        "tokens_before_a_difference": sum(agreed),
        "tokens": sum(map(len, reference)),
    }


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    number = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        number += 1
    return number
