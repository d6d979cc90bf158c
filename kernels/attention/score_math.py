"""Functions of attention kernels on scores in registers: the soft cap's tanh, an online softmax in powers of two."""

import math

import triton
import triton.language as tl

_TWICE_LOG2_E = tl.constexpr(2.0 * math.log2(math.e))


@triton.jit
def tanh(b_x: tl.tensor) -> tl.tensor:
    """(1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x, which cannot overflow."""
    b_small = tl.exp2(-tl.abs(b_x) * _TWICE_LOG2_E)
    b_positive = (1.0 - b_small) / (1.0 + b_small)
    return tl.where(b_x < 0, -b_positive, b_positive)


@triton.jit
def online_softmax(
    b_scores: tl.tensor,  # [M, T] float32, times factor in units of log2; -inf for masked keys
    b_max: tl.tensor,  # [M] of all tiles before, in units of log2, -inf at first
    b_sum: tl.tensor,  # [M] relative to b_max
    factor: tl.tensor = 1.0,  # positive; applied here, it saves one operation per score
) -> tl.tensor:
    """One tile's weights, the factor that shrinks earlier sums, and the new maximum and sum.

    A row without any key so far keeps the maximum -inf and gets weights of 0, never NaN.
    """
    b_new_max = tl.maximum(b_max, tl.max(b_scores, 1) * factor)
    b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_weights = tl.exp2(b_scores * factor - b_shift[:, None])
    b_shrink = tl.exp2(b_max - b_shift)
    return b_weights, b_shrink, b_new_max, b_sum * b_shrink + tl.sum(b_weights, 1)
