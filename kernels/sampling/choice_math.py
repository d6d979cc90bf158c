"""Math of the kernels that choose tokens: scaled logits as ordered bits and as fixed-point masses, noise and scores.

Each function is one line of `sampling` or `noise`, on tiles in registers. None uses float64, of which many GPUs have
hardly any: masses and scores are `fixed_point` numbers. Knows no rows and no samples.
"""

import math

import triton
import triton.language as tl

from kernels.sampling.fixed_point import exponential, gumbel_noise, scaled_fixed

INF_BITS = tl.constexpr(0x7F800000)
NO_ID = tl.constexpr(0x7FFFFFFF)
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32: the lowest temperature
_POINT = tl.constexpr(40)  # bits behind the point of a mass
_ITSELF = tl.constexpr(1 << 62)  # the factor 1 of `scaled_fixed`
_SIGN = tl.constexpr(-(1 << 31))
_NOISE_STEP = tl.constexpr(2.0**-32)
_LN_2_32 = tl.constexpr(32 * math.log(2.0))


@triton.jit
def load_scaled(
    p_row: tl.tensor, o_token: tl.tensor, vocab_size: tl.tensor, top: tl.tensor, divisor: tl.tensor
) -> tl.tensor:
    """(logit - maximum) / temperature, rounded as IEEE 754 specifies; -inf past the vocabulary."""
    b_x = tl.load(p_row + o_token, mask=o_token < vocab_size, other=float("-inf")).to(tl.float32)
    b_x = b_x - top
    return tl.div_rn(b_x, tl.zeros_like(b_x) + divisor)


@triton.jit
def depth(b_scaled: tl.tensor) -> tl.tensor:
    """Distance of a scaled logit below 0, as float bits: integers in order of falling values; -0 equals 0."""
    return b_scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def mass(b_depth: tl.tensor, b_table: tl.tensor) -> tl.tensor:
    """exp(scaled logit) as a fixed-point integer; 0 if the logit is too far below 0 or NaN."""
    return exponential(b_depth, b_table, _POINT)


@triton.jit
def row_maximum(part_max_ptr: tl.tensor, i_sample: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Maximum of a sample's row; 0 if it is not finite, since the sample is invalid and its result is not used."""
    top = tl.max(tl.load(part_max_ptr + i_sample * PARTS + tl.arange(0, PARTS)), 0)
    return tl.where(tl.abs(top) < float("inf"), top, 0.0)


@triton.jit
def _mix(b_x: tl.tensor) -> tl.tensor:
    """32-bit bijection `noise._mix_32_`, on uint32."""
    b_x = b_x ^ (b_x >> 16)
    b_x = b_x * 0x21F0AAAD
    b_x = b_x ^ (b_x >> 15)
    b_x = b_x * 0x735A2D97
    return b_x ^ (b_x >> 15)


@triton.jit
def noise_bits(key: tl.tensor, o_token: tl.tensor) -> tl.tensor:
    """`noise.noise_bits`, as int32 [tokens]."""
    b_key = tl.zeros_like(o_token).to(tl.int64) + key
    b_bits = o_token.to(tl.uint32) * 0x9E3779B1 + b_key.to(tl.uint32)
    b_bits = _mix(b_bits) + (b_key >> 32).to(tl.uint32)
    return _mix(b_bits).to(tl.int32, bitcast=True)


@triton.jit
def score(bits: tl.tensor, scaled: tl.tensor, b_table: tl.tensor) -> tl.tensor:
    """Scaled logit, above -32, plus noise of one token, int64 with 56 bits behind the point."""
    odd = ((bits.to(tl.int64) + 0x80000000) << 1) + 1
    return gumbel_noise(odd, b_table) - scaled_fixed(depth(scaled), _ITSELF)


@triton.jit
def gumbel(b_bits: tl.tensor) -> tl.tensor:
    """`noise.gumbel` in float32, within 1e-4: near 1, -ln(u) is a series in 1 - u."""
    b_uniform = ((b_bits ^ _SIGN).to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * _NOISE_STEP
    b_rest = ((0x7FFFFFFF - b_bits).to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * _NOISE_STEP
    b_series = b_rest * (1.0 + b_rest * (0.5 + b_rest * (1.0 / 3.0 + b_rest * 0.25)))
    return -tl.log(tl.where(b_rest < 0.0625, b_series, -tl.log(b_uniform)))


@triton.jit
def gumbel_bound(b_bits: tl.tensor) -> tl.tensor:
    """Upper bound of `gumbel` (up to float32 rounding), at half of the cost: -ln(1 - u) >= -ln(-ln(u))."""
    b_rest = (0x7FFFFFFF - b_bits).to(tl.uint32, bitcast=True)  # (1 - u) * 2^32 - 0.5
    return _LN_2_32 - tl.log(b_rest.to(tl.float32) + 0.5)
