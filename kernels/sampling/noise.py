"""Counter-based noise: a pure function of (seed, sample index, position, vocabulary index).

There is no generator state, so a token that is recomputed gets the same noise on any device, at any place in any
batch. Knows nothing of logits.

Keys, the 32 random bits and the uniform are bit-identical everywhere: they are wrap-around integer arithmetic and
exact float64 scaling. The Gumbel value is two float64 logarithms of the uniform. Libraries differ in the last place
of a logarithm, about 1e-15, which matters only between tokens whose perturbed logits are that close.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)
_MIX_64 = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN_32 = 0x9E3779B1 - 2**32  # as a signed integer with the same bits: torch multiplies signed integers
_MIX_32 = (0x21F0AAAD, 0x735A2D97)


def row_keys(seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Keys of S rows, int64 [S] on the CPU: each of the three words is absorbed by a SplitMix64 round.

    `seeds` are uint64; `positions` are those of the tokens to sample.
    """
    return torch.from_numpy(position_keys(partial_keys(seeds, sample_indices), np.array(positions, dtype=np.int64)))


def partial_keys(seeds: Sequence[int], sample_indices: Sequence[int]) -> npt.NDArray[np.int64]:
    """Keys int64 [S] that have absorbed seed and sample index but no position, for `position_keys`."""
    key = _absorb(np.zeros(len(seeds), dtype=np.uint64), np.array(seeds, dtype=np.uint64))
    return _absorb(key, np.array(sample_indices, dtype=np.uint64)).view(np.int64)


def position_keys(partial: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Keys int64 [S] for these positions, equal to those of `row_keys`."""
    return _absorb(partial.view(np.uint64), positions.view(np.uint64)).view(np.int64)


def noise_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits for each pair of key and token, as int32.

    `keys` int64 and `token_ids` int32 broadcast against each other: [S, 1] with [V] gives [S, V], [N] with [N]
    gives [N]. Under one key, no two tokens have the same bits.
    """
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    bits = token_ids * _GOLDEN_32 + low
    _mix_32_(bits)
    bits += high
    _mix_32_(bits)
    return bits


def uniform(bits: Tensor) -> Tensor:
    """float64 in (0, 1), exact: midpoints of 2**32 equal steps, in the order of the signed bits."""
    return bits.to(torch.float64).add_(2.0**31 + 0.5).mul_(2.0**-32)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 between -3.14 and 22.88: -ln(-ln(uniform)), increasing in the uniform."""
    return uniform(bits).log_().neg_().log_().neg_()


def _absorb(keys: npt.NDArray[np.uint64], words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One round of SplitMix64, in numpy, which is faster than torch for a few hundred numbers."""
    key = (keys ^ words) + _GOLDEN_64
    for shift, factor in zip((30, 27), _MIX_64, strict=True):
        key = (key ^ (key >> np.uint64(shift))) * factor
    return key ^ (key >> np.uint64(31))


def _mix_32_(x: Tensor) -> None:
    """Apply a 32-bit bijection with low bias in place (xor-shift and multiply, twice); shifts are logical."""
    _xor_shift_32_(x, 16)
    x *= _MIX_32[0]
    _xor_shift_32_(x, 15)
    x *= _MIX_32[1]
    _xor_shift_32_(x, 15)


def _xor_shift_32_(x: Tensor, count: int) -> None:
    x ^= (x >> count).bitwise_and_((1 << (32 - count)) - 1)
