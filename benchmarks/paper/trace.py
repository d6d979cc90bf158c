"""Requests that arrive as a Poisson process, with lengths like the paper's.

The same seed makes the same requests whatever the rate: the moments of arrival are stretched, so two systems, or two
rates, are compared on the same work. Lengths are drawn in batches that are spread evenly over their distributions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.lengths import INDEPENDENT, PAIRED, Dataset, Lengths, LengthSampler

BATCH = 500  # of lengths drawn together
SEED = 12


@dataclass(frozen=True, slots=True)
class Request:
    """Request of a trace. It ends with its last token; all of its sequences have the same length."""

    arrival_s: float
    num_input: int
    num_output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival."""

    requests: list[Request]
    duration_s: float  # of the arrivals
    width: int = 1  # samples, or beams, of each request
    num_prefix: int = 0  # tokens that all inputs begin with, counted in `num_input`


Draw = Callable[[int], list[Lengths]]


def poisson_trace(
    draw: Draw, rate: float, duration_s: float, *, width: int = 1, num_prefix: int = 0, seed: int = SEED
) -> Trace:
    """Draw a trace. `draw` makes the lengths; `rate` requests a second, at least one in all."""
    random = Random(seed)
    requests: list[Request] = []
    lengths: list[Lengths] = []
    arrival_s = random.expovariate(1.0) / rate
    while not requests or arrival_s < duration_s:
        if not lengths:
            lengths = draw(BATCH)
        each = lengths.pop()
        requests.append(Request(arrival_s, num_prefix + each.num_input, each.num_output))
        arrival_s += random.expovariate(1.0) / rate
    return Trace(requests=requests, duration_s=duration_s, width=width, num_prefix=num_prefix)


def paper_lengths(dataset: Dataset, seed: int = SEED) -> Draw:
    """Draw lengths as in Fig. 11, Alpaca's paired as in its data."""
    return LengthSampler(dataset, seed, opposite_halves=PAIRED.get(dataset, INDEPENDENT)).draw
