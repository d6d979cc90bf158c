"""Figures of a run's token times: throughput, latencies, medians over rounds, targets, equal outputs.

Knows neither processes nor files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Protocol, Self

from benchmarks.page_section import MIN_ROUNDS
from benchmarks.report import percentile

MORE_IS_BETTER = ("tokens_per_s",)
_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one load in one round; `median_of` combines those of all rounds."""

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
        """Compute figures. `token_s`: times of each request's tokens, since its arrival."""
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
        """Median of each figure by itself. Raises ValueError without rounds."""
        if not rounds:
            raise ValueError("a median needs at least one round")
        return cls(**{name: median(getattr(each, name) for each in rounds) for name in cls.__dataclass_fields__})


class Run(Protocol):
    """One system at one load in one round."""

    @property
    def round(self) -> int: ...
    @property
    def system(self) -> str: ...
    @property
    def load(self) -> str: ...
    @property
    def figures(self) -> Figures | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Ratio of our figure on one load to that of the best peer of each round; above 1 is better."""

    figure: str  # name in Figures
    rivals: tuple[str, ...]  # best in at least one round
    ratios: tuple[float, ...]  # one for each round that we and a peer ran; above 1: ours is better
    target: float

    @property
    def ratio(self) -> float:
        """Median of the rounds."""
        return median(self.ratios)

    @property
    def met(self) -> bool | None:
        """True if the target is met; None if rounds lie on both sides of it, or are too few to tell."""
        if len(self.ratios) < MIN_ROUNDS or min(self.ratios) < self.target <= max(self.ratios):
            return None
        return min(self.ratios) >= self.target

    @property
    def spread(self) -> str:
        """Describe the rounds."""
        if len(self.ratios) < MIN_ROUNDS:
            return f"{len(self.ratios)} of at least {MIN_ROUNDS} rounds"
        return f"{min(self.ratios):.2f} to {max(self.ratios):.2f} in {len(self.ratios)} rounds"

    @property
    def sentence(self) -> str:
        outcome = {True: "met", False: "NOT met", None: "within the noise"}[self.met]
        words = self.figure.removesuffix("_s").replace("_", " ").replace("tokens per", "tokens/s")
        rivals = " or ".join(self.rivals)
        return f"{words}: {self.ratio:.2f} x {rivals} ({self.spread}); target {self.target} x: {outcome}"


def verdicts(runs: Sequence[Run], load: str, ours: str, targets: Mapping[str, float]) -> list[Verdict]:
    """Compare each figure that has a target with the best peer's, round by round. Empty if ours or all are missing."""
    found = []
    for figure, target in targets.items():
        theirs = _by_round(runs, load, figure)
        mine = theirs.pop(ours, {})
        nearest = [min(made) for number in sorted(mine) if (made := _ratios(mine[number], theirs, number, figure))]
        if nearest:
            rivals = tuple(dict.fromkeys(peer for _, peer in nearest))
            ratios = tuple(ratio for ratio, _ in nearest)
            found.append(Verdict(figure=figure, rivals=rivals, ratios=ratios, target=target))
    return found


def _by_round(runs: Sequence[Run], load: str, figure: str) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.load == load and run.figures is not None:
            values.setdefault(run.system, {})[run.round] = getattr(run.figures, figure)
    return values


def _ratios(
    mine: float, theirs: Mapping[str, Mapping[int, float]], number: int, figure: str
) -> list[tuple[float, str]]:
    """Ratio to each peer of a round, above 1 if ours is better: more tokens a second, or less time."""
    others = [(values[number], peer) for peer, values in theirs.items() if number in values]
    return [(mine / other if figure in MORE_IS_BETTER else other / mine, peer) for other, peer in others]


def num_equal(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Count the requests with equal output, token for token, and the tokens before a first difference."""
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
