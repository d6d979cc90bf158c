"""Slices of a weight's outputs, so that quantising it takes little memory beside the weight and the result."""

from collections.abc import Iterator

from torch import Tensor

SLICE_NUMBERS = 1 << 24  # of a slice, at the most, unless one output has more


def output_slices(weight: Tensor) -> Iterator[Tensor]:
    """Views of a weight [N, K], in order of the outputs."""
    yield from weight.split(max(1, SLICE_NUMBERS // weight.shape[1]))
