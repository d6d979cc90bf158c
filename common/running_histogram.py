"""Histogram of values by fixed buckets, cheap enough for each step and each delivery. Knows no unit and no exporter."""

from bisect import bisect_left
from collections.abc import Sequence


class RunningHistogram:
    """Counts of values by bucket. One thread at a time may observe and read."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds of the buckets, ascending; a last bucket takes what is above them."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as it occurred."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def decades(mantissas: Sequence[float], first: int, last: int) -> list[float]:
    """Bounds `mantissa * 10^exponent`, for the exponents from `first` to below `last`, and 10^last."""
    return [float(f"{mantissa}e{exponent}") for exponent in range(first, last) for mantissa in mantissas] + [10.0**last]
