"""Lengths of requests as in the paper's traces: numbers of input and output tokens, drawn from its histograms.

Fig. 11 gives 128 bins of equal width for each length. A bin stands for the whole numbers in it, all equally likely;
with that the means are those that the paper states, to within 0.1 tokens. It knows nothing of text.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Literal

Dataset = Literal["alpaca", "sharegpt"]

TRACES = Path(__file__).with_name("fig11_lengths.json")
MAX_MODEL_LEN = 2048  # of OPT, which the paper served
PAPER_MEANS: dict[Dataset, tuple[float, float]] = {"alpaca": (19.31, 58.45), "sharegpt": (161.31, 337.99)}

# The figure does not say which input belongs to which output. In Alpaca's data the longer half of the prompts goes
# with the shorter half of the answers in 63 % of all pairs (own count of words and signs in a public excerpt of 1,807
# pairs; standard error 1 %): those with a text to work on are answered briefly. 50 % would be independence.
PAIRED: dict[Dataset, float] = {"alpaca": 0.63}
INDEPENDENT = 0.5


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of one request, in tokens."""

    num_input: int
    num_output: int


class Histogram:
    """Distribution of one length."""

    def __init__(self, low: int, high: int, densities: list[float]) -> None:
        width = (high - low) / len(densities)
        edges = [low + index * width for index in range(len(densities))]
        self._starts = [math.ceil(edge) for edge in edges]  # the first whole number of each bin
        self._ends = [*self._starts[1:], high + 1]  # behind the last; `high` itself was seen
        self._weights = densities
        self._cumulated = list(accumulate(densities))

    @property
    def mean(self) -> float:
        middles = [(start + end - 1) / 2 for start, end in zip(self._starts, self._ends, strict=True)]
        weighted = sum(weight * middle for weight, middle in zip(self._weights, middles, strict=True))
        return weighted / self._cumulated[-1]

    def quantile(self, part: float) -> int:
        """Length below which `part` of the distribution lies, 0 <= part < 1."""
        target = part * self._cumulated[-1]
        index = bisect_right(self._cumulated, target)
        start, end = self._starts[index], self._ends[index]
        within = 1 - (self._cumulated[index] - target) / self._weights[index]
        return min(end - 1, start + int(within * (end - start)))


class LengthSampler:
    """Requests of one trace, without end; the same seed draws the same ones.

    An output that does not fit behind its input into the context is drawn again, so that the inputs stay as they are.
    """

    def __init__(self, dataset: Dataset, seed: int, *, opposite_halves: float = INDEPENDENT) -> None:
        self._input, self._output = read_histograms(dataset)
        self._opposite_halves = opposite_halves  # probability that one length is above its median, the other below
        self._random = Random(seed)

    def __iter__(self) -> Iterator[Lengths]:
        """Draw lengths one after another, independently."""
        while True:
            yield from self.draw(1)

    def draw(self, num_requests: int) -> list[Lengths]:
        """Draw lengths spread evenly over both distributions: rare long ones occur as rarely as they should."""
        parts = zip(self._spread(num_requests), self._spread(num_requests), strict=True)
        return [self._request(part_of_input, part) for part_of_input, part in parts]

    def _request(self, part_of_input: float, part_of_half: float) -> Lengths:
        """Draw one request. `part_of_half`: place of the output in its half of the distribution."""
        num_input = self._input.quantile(part_of_input)
        while True:
            is_opposite = self._random.random() < self._opposite_halves
            is_above = (part_of_input < 0.5) == is_opposite
            num_output = self._output.quantile((part_of_half + is_above) / 2)
            if num_input + num_output <= MAX_MODEL_LEN:
                return Lengths(num_input, num_output)
            part_of_half = self._random.random()

    def _spread(self, number: int) -> list[float]:
        """Draw one number from each of `number` equal parts of 0 to 1; shuffle them."""
        parts = [(index + self._random.random()) / number for index in range(number)]
        self._random.shuffle(parts)
        return parts


def read_histograms(dataset: Dataset) -> tuple[Histogram, Histogram]:
    """Read the histograms of input and output."""
    trace: dict[str, dict[str, Any]] = json.loads(TRACES.read_text())[dataset]
    figures = (trace["input"], trace["output"])
    first, second = (Histogram(each["lo"], each["hi"], each["density"]) for each in figures)
    return first, second


def trace_source() -> str:
    """Source of the histograms."""
    return str(json.loads(TRACES.read_text())["source"])
