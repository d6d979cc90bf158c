"""Growth of a cost: the exponent of a power law through its points."""

import math
from collections.abc import Sequence
from statistics import linear_regression


def exponent_of(points: Sequence[tuple[float, float]]) -> float:
    """The slope of a line through the logarithms of both: 1 is linear, 0 constant. At least two points, all above 0."""
    return linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points]).slope
