"""Rows to e4m3 in one launch: a row is read once and kept in registers. The torch reference is in `fp8_product`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.products import fp8_product
from kernels.products.fp8_product import E4M3, Fp8Matrix

_ELEMENTS_PER_WARP = 512  # two 16-byte loads of half precision for each thread
_MAX_WARPS = 16
_LEAST_PEAK_BITS = tl.constexpr(fp8_product.LEAST_PEAK_BITS)
_INFINITY_BITS = tl.constexpr(fp8_product.INFINITY_BITS)
_NAN_BITS = tl.constexpr(fp8_product.NAN_BITS)
_CARRY = tl.constexpr(fp8_product.CARRY)
_EXPONENT = tl.constexpr(fp8_product.EXPONENT)
_PEAK_EXPONENT = tl.constexpr(fp8_product.PEAK_EXPONENT)
_INVERSE = tl.constexpr(fp8_product.INVERSE)


@triton.jit
def _rounded_to_e4m3(b_x: tl.tensor) -> tl.tensor:
    """Float32 to the nearest numbers that e4m3 has, halves to even. Numbers are at most 448.

    The conversion that follows then has nothing left to round: that of Triton's interpreter does so wrongly. Below
    2^-6 the steps of e4m3 are 2^-9, those of float32 around 1.5 * 2^14; above, all but 3 bits of the mantissa go.
    """
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_bits = (b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(b_x) < 0.015625, (b_x + 24576.0) - 24576.0, b_bits.to(tl.float32, bitcast=True))


@triton.jit
def quantise_rows_kernel(
    x_ptr: tl.tensor,  # [num_rows, SIZE]
    codes_ptr: tl.tensor,  # e4m3 [num_rows, SIZE]
    scales_ptr: tl.tensor,  # float32 [num_rows]
    x_stride: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,  # SIZE as a power of two
) -> None:
    """One row: scale = the least power of two for which max |x| / scale <= 448; codes = x / scale.

    The peak is compared as bits, which are in the order of the numbers, with NaN behind infinity: a maximum of numbers
    would drop NaN. A row whose peak is either has a scale of NaN and codes of zero.
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, TILE)
    m_x = o_x < SIZE
    b_x = tl.load(x_ptr + i_row * x_stride + o_x, mask=m_x, other=0.0).to(tl.float32)
    peak_bits = tl.maximum(tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF), _LEAST_PEAK_BITS)
    is_finite = peak_bits < _INFINITY_BITS
    bits = ((tl.minimum(peak_bits, _INFINITY_BITS) + _CARRY) & _EXPONENT) - _PEAK_EXPONENT
    inverse_bits = -bits + _INVERSE
    b_codes = tl.where(is_finite, _rounded_to_e4m3(b_x * inverse_bits.to(tl.float32, bitcast=True)), 0.0)
    tl.store(codes_ptr + i_row * SIZE + o_x, b_codes.to(codes_ptr.dtype.element_ty), mask=m_x)
    tl.store(scales_ptr + i_row, tl.where(is_finite, bits, _NAN_BITS).to(tl.float32, bitcast=True))


def quantise_rows(x: Tensor) -> Fp8Matrix:
    """Round each row to e4m3, under the least power of two by which its greatest number fits.

    A row with NaN or an infinity gets a scale of NaN and codes of zero, so that all its products are NaN.

    x: [N, K], contiguous rows
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1, "a row must be contiguous"
    codes = torch.empty((num_rows, size), dtype=E4M3, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        quantise_rows_kernel[(num_rows,)](
            x,
            codes,
            scales,
            x.stride(0),
            SIZE=size,
            TILE=triton.next_power_of_2(size),
            num_warps=num_warps(size),
            enable_fp_fusion=True,
        )
    return Fp8Matrix(codes, scales)


def num_warps(size: int) -> int:
    """Number of warps for one row."""
    tile: int = triton.next_power_of_2(size)
    return min(_MAX_WARPS, max(1, tile // _ELEMENTS_PER_WARP))
