"""The rate of requests that a system bears: where the normalised latency of a trace crosses a bound.

The same requests come closer together or further apart until the crossing lies between two rates that are nearly the
same. What was tried is kept: those are points of the curve.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

BOUND_S = 0.5  # a token: where the paper's figures are read
FIRST_STRIDE = 1.06
LatencyAt = Callable[[float], float]  # requests a second -> s/token


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """`rate` requests a second; points (rate, s/token) in order of rates."""

    rate: float
    points: list[tuple[float, float]]


def capacity(latency_at: LatencyAt, guess: float, precision: float, *, bound_s: float = BOUND_S) -> Capacity:
    """Find the rate whose latency is `bound_s`, to within `precision` of the rate, interpolated.

    Steps away from the guess grow until the bound lies behind.
    """
    points: dict[float, float] = {}

    def is_beyond(rate: float) -> bool:
        points[rate] = latency_at(rate)
        return points[rate] > bound_s

    low = high = guess
    stride = FIRST_STRIDE
    if is_beyond(guess):
        while is_beyond(low := low / stride):
            high, stride = low, stride**2
    else:
        while not is_beyond(high := high * stride):
            low, stride = high, stride**2
    while high - low > precision * high:
        part = min(0.8, max(0.2, _crossing(points[low], points[high], bound_s)))  # never only one side comes nearer
        middle = low + part * (high - low)
        if is_beyond(middle):
            high = middle
        else:
            low = middle
    rate = low + _crossing(points[low], points[high], bound_s) * (high - low)
    return Capacity(rate=rate, points=sorted(points.items()))


def _crossing(low_s: float, high_s: float, bound_s: float) -> float:
    """Interpolate the place of the bound between two latencies, from 0 to 1, on a logarithmic scale."""
    return log(bound_s / low_s) / log(high_s / low_s)
