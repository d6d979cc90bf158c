"""Exponentials and logarithms of kernels in 64-bit integers, and a product as float64 rounds it.

Integers give the same bits on every device, and cost as much on those that have hardly any float64. Errors are like
those of float64's own functions: of exp below 2^-52 of its value, of ln below 2^-51. Knows no logits.
"""

import triton
import triton.language as tl

UNIT = tl.constexpr(56)  # bits behind the point of logarithms, and of what `power` takes
_FRACTION = tl.constexpr((1 << 56) - 1)
_TABLE_SIZE = tl.constexpr(64)
_ONE = tl.constexpr(1 << 62)
_LOG2E = tl.constexpr(6653256548922161246)  # log2(e) * 2^62
_LN_2 = tl.constexpr(199786072581291495)  # ln(2) * 2^58
_LAST_GUESS = tl.constexpr(11629079)  # largest below ln(2) * 2^24
# 2^(-1/64), 2^(-2/64), 2^(-4/64), …, times 2^62.
_ROOT_1 = tl.constexpr(4562008997483360349)
_ROOT_2 = tl.constexpr(4512867096753504463)
_ROOT_4 = tl.constexpr(4416165660797809419)
_ROOT_8 = tl.constexpr(4228934724888366668)
_ROOT_16 = tl.constexpr(3877950241171266237)
_ROOT_32 = tl.constexpr(3260954456333195553)
# The series of 1 - 2^(-x/64): ln(2)^k / (k! 64^k), times 2^62, 2^63, 2^53, 2^54, 2^55, 2^56.
_SERIES_1 = tl.constexpr(49946518145322874)
_SERIES_2 = tl.constexpr(540942003612761)
_SERIES_3 = tl.constexpr(1907106652)
_SERIES_4 = tl.constexpr(10327387)
_SERIES_5 = tl.constexpr(44740)
_SERIES_6 = tl.constexpr(162)


@triton.jit
def _times(b_x: tl.tensor, b_y: tl.tensor) -> tl.tensor:
    """Product of int64 numbers / 2^64, rounded down."""
    b_factor = (tl.zeros_like(b_x) + b_y).to(tl.uint64, bitcast=True)
    return tl.umulhi(b_x.to(tl.uint64, bitcast=True), b_factor).to(tl.int64, bitcast=True)


@triton.jit
def _times_root(b_power: tl.tensor, o_index: tl.tensor, BIT: tl.constexpr, ROOT: tl.constexpr) -> tl.tensor:
    """The power, times the root where the index has the bit."""
    return tl.where((o_index & BIT) != 0, _times(b_power, ROOT << 1) << 1, b_power)


@triton.jit
def powers_table() -> tl.tensor:
    """2^(-i/64) * 2^62, int64 [64]."""
    o_index = tl.arange(0, _TABLE_SIZE)
    b_power = tl.full((_TABLE_SIZE,), _ONE, tl.int64)
    b_power = _times_root(b_power, o_index, 1, _ROOT_1)
    b_power = _times_root(b_power, o_index, 2, _ROOT_2)
    b_power = _times_root(b_power, o_index, 4, _ROOT_4)
    b_power = _times_root(b_power, o_index, 8, _ROOT_8)
    b_power = _times_root(b_power, o_index, 16, _ROOT_16)
    return _times_root(b_power, o_index, 32, _ROOT_32)


@triton.jit
def _power(b_fraction: tl.tensor, b_root: tl.tensor) -> tl.tensor:
    """2^-x * 2^62 for x in [0, 1); `b_root` is the table's entry for its first six bits.

    The others are the argument of a series, whose terms from the third on are below 2^-22: products of 32 bits suffice.
    """
    b_rest = (b_fraction & ((1 << 50) - 1)) << 13
    b_high = (b_rest >> 32).to(tl.int32)
    b_small = _SERIES_5 - _times_32(b_high, tl.zeros_like(b_high) + _SERIES_6)
    b_small = _SERIES_4 - _times_32(b_high, b_small)
    b_small = _SERIES_3 - _times_32(b_high, b_small)
    b_sum = _SERIES_2 - _times(b_rest, b_small.to(tl.int64) << 11)
    b_sum = _SERIES_1 - _times(b_rest, b_sum)
    b_sum = _times(b_rest, b_sum)
    return b_root - _times(b_root, b_sum << 3)


@triton.jit
def _times_32(b_x: tl.tensor, b_y: tl.tensor) -> tl.tensor:
    """Product of int32 numbers / 2^32, rounded down."""
    return tl.umulhi(b_x, b_y)


@triton.jit
def scaled_fixed(b_bits: tl.tensor, FACTOR: tl.constexpr) -> tl.tensor:
    """Product x * FACTOR / 2^62 for a float32 0 <= x < 32 given by its bits; less than 2^-56 is dropped."""
    b_mantissa = ((b_bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    b_shift = tl.minimum(tl.maximum(131 - (b_bits >> 23), 0), 63).to(tl.int64)
    return _times(b_mantissa << 39, FACTOR) >> b_shift


@triton.jit
def exponential(b_bits: tl.tensor, b_table: tl.tensor, POINT: tl.constexpr) -> tl.tensor:
    """exp(-x) * 2^POINT, rounded to the nearest integer, for tiles of float32 x >= 0 given by their bits."""
    b_power = scaled_fixed(b_bits, _LOG2E)
    b_whole = b_power >> UNIT
    b_root = tl.gather(b_table, ((b_power >> 50) & 63).to(tl.int32), 0)
    b_shift = tl.minimum(b_whole + (62 - POINT), 62)
    b_half = (tl.zeros_like(b_shift) + 1) << (b_shift - 1)
    b_value = (_power(b_power & _FRACTION, b_root) + b_half) >> b_shift
    return tl.where((b_bits < 0x42000000) & (b_whole <= POINT), b_value, 0)


@triton.jit
def _top_bit(x: tl.tensor) -> tl.tensor:
    """Index of the highest bit of an int64 > 0; a float32 may have been rounded up to the next power of two."""
    index = ((x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127).to(tl.int64)
    return tl.where((x >> index) == 0, index - 1, index)


@triton.jit
def _small_logarithm(x: tl.tensor, b_table: tl.tensor) -> tl.tensor:
    """ln(x / 2^62) for an int64 x in [2^62, 2^63): of a float32's logarithm g, and of x exp(-g), which is nearly 1."""
    guess = (tl.log((x >> 38).to(tl.float32) * 2.0**-24) * 2.0**24).to(tl.int32)
    guess = tl.minimum(tl.maximum(guess, 0), _LAST_GUESS).to(tl.int64) << 32
    exponent = _times(guess << 6, _LOG2E) >> 4
    root = tl.sum(tl.where(tl.arange(0, _TABLE_SIZE) == (exponent >> 50).to(tl.int32), b_table, 0), 0)
    rest = _times(x, _power(exponent, root)) - (1 << 60)
    return guess + ((rest - (((rest >> 9) * (rest >> 9)) >> 43)) >> 4)


@triton.jit
def logarithm(x: tl.tensor, POINT: tl.constexpr, b_table: tl.tensor) -> tl.tensor:
    """ln(x / 2^POINT) of an int64 x > 0, from 2^-33 to 2^33."""
    top = _top_bit(x)
    return _small_logarithm(x << (62 - top), b_table) + (((top - POINT) * _LN_2) >> 2)


@triton.jit
def gumbel_noise(odd: tl.tensor, b_table: tl.tensor) -> tl.tensor:
    """-ln(-ln(u)) for u = odd / 2^33, within 2^-48; `odd` is an int64.

    Near 1, -ln(u) is (1 - u) times a series in 1 - u that is little more than 1.
    """
    rest = (1 << 33) - odd
    if rest < (1 << 29):
        factor = rest << 31
        series = factor * 0 + _ONE // 14
        for i_term in tl.static_range(12):
            series = _ONE // (13 - i_term) + _times(factor, series)
        noise = logarithm(rest, 33, b_table) + _small_logarithm(_times(factor, series) + _ONE, b_table)
    else:
        noise = logarithm(-logarithm(odd, 33, b_table), UNIT, b_table)
    return -noise


@triton.jit
def _half_even(x: tl.tensor, num_bits: tl.tensor, is_more: tl.tensor) -> tl.tensor:
    """Quotient x / 2^num_bits, rounded to the nearest, halves to even; `is_more`: x is a little larger than it says."""
    one = x * 0 + 1
    rest, half = x & ((one << num_bits) - 1), (one << num_bits) >> 1
    quotient = x >> num_bits
    is_up = (rest > half) | ((rest == half) & (is_more | ((quotient & 1) != 0)))
    return quotient + (is_up & (num_bits > 0)).to(tl.int64)


@triton.jit
def part_of(x: tl.tensor, factor_bits: tl.tensor) -> tl.tensor:
    """ceil(x * factor) for int64 x > 0 and a float64 factor in (0, 1) given by its bits, both rounded as float64 is."""
    x = tl.maximum(x, 1)
    dropped = tl.maximum(_top_bit(x) - 52, 0)
    x = _half_even(x, dropped, x < 0)
    shift = 62 - _top_bit(x)
    x = x << shift
    factor = ((factor_bits & ((1 << 52) - 1)) | (1 << 52)) << 10
    high = _times(x, factor)
    surplus = _top_bit(high) - 52
    product = _half_even(high, surplus, (x * factor) != 0)
    point = 1021 + shift - dropped - (factor_bits >> 52) - surplus
    one = x * 0 + 1
    below = tl.minimum(tl.maximum(point, 0), 62)
    return ((product << tl.maximum(-point, 0)) + ((one << below) - 1)) >> below
