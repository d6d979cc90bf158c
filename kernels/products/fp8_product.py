"""Products of e4m3 weights, one scale per output, with rows that are quantised as they come, one scale per row.

Scales are powers of two. So they cost no rounding, and a weight that was quantised is a number of bfloat16 and of
float16 too. `row_quantising` has the kernel; here is its torch reference. Knows no layers.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.products.output_slices import output_slices

E4M3 = torch.float8_e4m3fn
ALIGNMENT = 16  # of inputs and of outputs, for the matrix units
LEAST_PEAK = 2.0**-100  # of a row; smaller numbers become zeros
LEAST_PEAK_BITS = (127 - 100) << 23
# Bits of infinity, of which those of NaN without its sign are more; and the bits of the NaN that scales have.
INFINITY_BITS, NAN_BITS = 0x7F800000, 0x7FC00000
# The greatest number of e4m3 is 448, 1.75 * 2^8. Added to the bits of a float32 of mantissa above 1.75, the carry
# reaches its exponent.
CARRY = 0x1FFFFF
EXPONENT = -0x800000  # mask of the bits of sign and exponent
PEAK_EXPONENT = 8 << 23
INVERSE = 254 << 23  # less the bits of a power of two: those of its inverse


class Fp8Matrix(NamedTuple):
    """Rows of e4m3 numbers, each row with its scale: row i is codes[i] * scales[i]."""

    codes: Tensor  # [N, K] e4m3, contiguous
    scales: Tensor  # [N, 1] float32, contiguous

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The numbers, [N, K]."""
        return (self.codes.float() * self.scales).to(dtype)


def quantise_rows(x: Tensor) -> Fp8Matrix:
    """Round each row to e4m3, under the least power of two by which its greatest number fits.

    A row with NaN or an infinity gets a scale of NaN and codes of zero, so that all its products are NaN.

    x: [N, K], contiguous rows
    """
    peaks = x.abs().amax(1, keepdim=True).float().clamp(min=LEAST_PEAK)  # each step keeps NaN
    bits = ((peaks.view(torch.int32) + CARRY) & EXPONENT) - PEAK_EXPONENT
    inverses, finite = (INVERSE - bits).view(torch.float32), peaks.isfinite()
    codes = (x.float() * inverses).where(finite, 0.0).to(E4M3)
    return Fp8Matrix(codes, bits.view(torch.float32).where(finite, torch.nan))


def quantise_weight(weight: Tensor) -> Fp8Matrix:
    """Rows of a weight [N, K], quantised as `quantise_rows` does, some at a time."""
    parts = [quantise_rows(part) for part in output_slices(weight)]
    codes, scales = zip(*parts, strict=True)
    return Fp8Matrix(torch.cat(codes), torch.cat(scales))


def fixed_bias(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The bias, or zeros in the place of none where the product with a weight [N, K] must have one.

    Torch's CUTLASS kernel for scales by rows (Ada, Blackwell, and Hopper before CUDA 12.9) takes bfloat16 for its
    result's type if it gets no bias, before PyTorch's pull request 187569: bits of float16 results were wrong.
    """
    if bias is None and weight.dtype == torch.float16:
        return weight.new_zeros(len(weight))
    return bias


def fp8_product(rows: Fp8Matrix, weight: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows W^T + b, summed in float32 and rounded once to `dtype`.

    rows:    [T, K]
    weight:  [N, K]; on a GPU both sizes are multiples of `ALIGNMENT`
    bias:    [N], of `dtype`, which on a GPU has 16 bits; as `fixed_bias` gives it
    returns  [T, N]
    """
    if rows.codes.is_cuda:
        return product_on_gpu(rows, weight, bias, dtype)
    # On a CPU torch 2.11 has this product with one scale per matrix alone; later ones widen, as is done here.
    wide_bias = None if bias is None else bias.float()
    return F.linear(rows.dequantised(torch.float32), weight.dequantised(torch.float32), wide_bias).to(dtype)


def product_on_gpu(rows: Fp8Matrix, weight: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product by matrix units; arguments are those of `fp8_product`."""
    return torch._scaled_mm(
        rows.codes,
        weight.codes.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=False,  # on Hopper its sums keep about 14 bits
    )
