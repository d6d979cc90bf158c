"""Products with weights of 4 bits: codes become numbers in registers, on their way to the matrix units.

For few rows, as decode steps have; the inputs are split over programs where outputs alone are too few of them, and the
last program of a tile to finish sums the parts. For many rows the weight is written out once, for an ordinary product.
The torch references are in `int4_matrix`. Knows no layers.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.products import int4_matrix
from kernels.products.int4_matrix import Int4Matrix
from kernels.products.int4_tiling import MOST_ROWS, OUTPUTS, Int4Tiling, int4_tiling

NUM_WARPS = 4
NUM_STAGES = 4
EXPANDED_OUTPUTS = 16  # of a program that writes a weight out
_GROUP = tl.constexpr(int4_matrix.GROUP)
_WORDS = tl.constexpr(int4_matrix.WORDS)
_CODES_PER_WORD = tl.constexpr(int4_matrix.CODES_PER_WORD)
_BITS = tl.constexpr(int4_matrix.BITS)
_LARGEST = tl.constexpr(int4_matrix.LARGEST)
_CODE_PAIR = tl.constexpr(int4_matrix.LARGEST * 0x10001)  # mask of two codes, 16 bits apart
_FLOAT16_BITS = tl.constexpr(int4_matrix.FLOAT16_BASE_BITS * 0x10001)
_BFLOAT16_BITS = tl.constexpr(int4_matrix.BFLOAT16_BASE_BITS * 0x10001)
_FLOAT16_BASE = tl.constexpr(int4_matrix.FLOAT16_BASE)
_BFLOAT16_BASE = tl.constexpr(int4_matrix.BFLOAT16_BASE)


@triton.jit
def _code_pairs(b_words: tl.tensor, i_place: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Codes of a place and of the place four further on, as numbers.

    A code in the lowest bits of the mantissa of 1024 (float16), or of 128 (bfloat16), is that number more. So two
    codes, 16 bits apart, become numbers by one shift and one operation on bits.
    """
    b_pairs = (b_words >> _BITS * i_place) & _CODE_PAIR
    if tl.float32 == DTYPE:
        return (b_pairs & 0xFFFF).to(DTYPE), (b_pairs >> 16).to(DTYPE)
    else:  # noqa: RET505
        b_pairs |= _FLOAT16_BITS if tl.float16 == DTYPE else _BFLOAT16_BITS
        b_low, b_high = b_pairs.to(tl.int16), (b_pairs >> 16).to(tl.int16)
        return b_low.to(DTYPE, bitcast=True), b_high.to(DTYPE, bitcast=True)


@triton.jit
def _number_of_zero(b_zeros: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Zero points as `_code_pairs` makes numbers of codes: their difference is exact."""
    if tl.float16 == DTYPE:
        return b_zeros.to(DTYPE) + _FLOAT16_BASE
    elif tl.bfloat16 == DTYPE:  # noqa: RET505
        return b_zeros.to(DTYPE) + _BFLOAT16_BASE
    else:
        return b_zeros.to(DTYPE)


@triton.jit
def _store_outputs(
    b_sums: tl.tensor,  # [ROWS, OUTPUTS] float32
    p_out: tl.tensor,
    p_bias: tl.tensor,  # [OUTPUTS]
    m_out: tl.tensor,
    m_bias: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:
    if HAS_BIAS:
        b_sums += tl.load(p_bias, mask=m_bias, other=0.0).to(tl.float32)[None, :]
    tl.store(p_out, b_sums.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["num_rows"])
def int4_kernel(
    x_ptr: tl.tensor,  # [num_rows, num_groups * GROUP]
    codes_ptr: tl.tensor,  # int32 [num_outputs, num_groups * WORDS]
    scales_ptr: tl.tensor,  # [num_groups, num_outputs]
    zeros_ptr: tl.tensor,  # uint8 [num_groups, num_outputs]
    bias_ptr: tl.tensor,  # [num_outputs], read if HAS_BIAS
    out_ptr: tl.tensor,  # [num_rows, num_outputs]
    partial_ptr: tl.tensor,  # float32 [num_splits, num_rows, num_outputs], unless num_splits is 1
    num_arrived_ptr: tl.tensor,  # int32 [row tiles * output tiles], zeros, unless num_splits is 1
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_groups: tl.tensor,
    split_groups: tl.tensor,  # groups of a program
    num_splits: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """A tile of outputs for a tile of rows, over a split of the inputs.

    out = x W^T + b with W[n, k] = scales[k / GROUP, n] * (code(n, k) - zeros[k / GROUP, n]). Products with whole
    numbers are summed over a group, then scaled, in float32.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    i_tile, i_split, i_row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_row = i_row_tile * ROWS + tl.arange(0, ROWS)
    o_out = i_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    o_word = tl.arange(0, _WORDS)
    o_near_row = tl.minimum(o_row, num_rows - 1).to(tl.int64)
    o_near_out = tl.minimum(o_out, num_outputs - 1)
    p_codes = codes_ptr + o_near_out[None, :].to(tl.int64) * (num_groups * _WORDS) + o_word[:, None]
    p_x = x_ptr + o_near_row[:, None] * x_stride + o_word[None, :]
    b_sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    i_first = i_split * split_groups
    for i_group in range(i_first, tl.minimum(i_first + split_groups, num_groups)):
        b_words = tl.load(p_codes + i_group * _WORDS)
        b_zeros = _number_of_zero(tl.load(zeros_ptr + i_group * num_outputs + o_near_out), DTYPE)[None, :]
        b_scales = tl.load(scales_ptr + i_group * num_outputs + o_near_out).to(tl.float32)
        b_products = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for i_place in tl.static_range(_CODES_PER_WORD // 2):
            b_low, b_high = _code_pairs(b_words, i_place, DTYPE)
            b_x = tl.load(p_x + i_group * _GROUP + i_place * _WORDS)
            b_products = tl.dot(b_x, b_low - b_zeros, b_products, input_precision="ieee")
            b_x = tl.load(p_x + i_group * _GROUP + (i_place + _CODES_PER_WORD // 2) * _WORDS)
            b_products = tl.dot(b_x, b_high - b_zeros, b_products, input_precision="ieee")
        b_sums += b_products * b_scales[None, :]

    m_row, m_outputs = o_row < num_rows, o_out < num_outputs
    m_out = m_row[:, None] & m_outputs[None, :]
    o_sums = o_row[:, None].to(tl.int64) * num_outputs + o_out[None, :]
    if num_splits == 1:
        _store_outputs(b_sums, out_ptr + o_sums, bias_ptr + o_out, m_out, m_outputs, HAS_BIAS)
    else:
        split_size = num_rows.to(tl.int64) * num_outputs
        tl.store(partial_ptr + i_split * split_size + o_sums, b_sums, mask=m_out)
        tl.debug_barrier()  # all threads have stored before one of them increments
        p_arrived = num_arrived_ptr + i_row_tile * tl.num_programs(0) + i_tile
        if tl.atomic_add(p_arrived, 1, sem="acq_rel") == num_splits - 1:
            b_sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for i_part in range(num_splits):  # in order, so that every run gives the same sum
                p_part = partial_ptr + i_part * split_size + o_sums
                b_sums += tl.load(p_part, mask=m_out, other=0.0, cache_modifier=".cg")
            _store_outputs(b_sums, out_ptr + o_sums, bias_ptr + o_out, m_out, m_outputs, HAS_BIAS)
            tl.store(p_arrived, 0)


@triton.jit
def expand_int4_kernel(
    codes_ptr: tl.tensor,  # int32 [num_outputs, num_groups * WORDS]
    scales_ptr: tl.tensor,  # [num_groups, num_outputs]
    zeros_ptr: tl.tensor,  # uint8 [num_groups, num_outputs]
    out_ptr: tl.tensor,  # [num_outputs, num_groups * GROUP]
    num_outputs: tl.tensor,
    num_groups: tl.tensor,
    OUTPUTS: tl.constexpr,
) -> None:
    """One group of some outputs: out[n, k] = scales[k / GROUP, n] * (code(n, k) - zeros[k / GROUP, n])."""
    i_group = tl.program_id(0)
    o_out = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    m_out = o_out < num_outputs
    o_word = tl.arange(0, _WORDS)
    o_first = (o_out[:, None].to(tl.int64) * num_groups + i_group) * _WORDS + o_word[None, :]
    b_words = tl.load(codes_ptr + o_first, mask=m_out[:, None], other=0)
    b_scales = tl.load(scales_ptr + i_group * num_outputs + o_out, mask=m_out, other=0.0).to(tl.float32)
    b_zeros = tl.load(zeros_ptr + i_group * num_outputs + o_out, mask=m_out, other=0).to(tl.float32)
    p_out = out_ptr + (o_out[:, None].to(tl.int64) * num_groups + i_group) * _GROUP + o_word[None, :]
    for i_place in tl.static_range(_CODES_PER_WORD):
        b_codes = ((b_words >> _BITS * i_place) & _LARGEST).to(tl.float32)
        b_numbers = (b_codes - b_zeros[:, None]) * b_scales[:, None]
        tl.store(p_out + i_place * _WORDS, b_numbers.to(out_ptr.dtype.element_ty), mask=m_out[:, None])


def int4_product(x: Tensor, weight: Int4Matrix, bias: Tensor | None, num_arrived: Tensor) -> Tensor:
    """X W^T + b. Codes are exact, sums and scales in float32; of many rows, the weight is rounded to the dtype of x.

    x:           [T, K], contiguous rows
    weight:      [N, K]
    bias:        [N], of the dtype of x
    num_arrived: int32, as `arrival_counters` makes it; zeros before and after
    returns      [T, N]
    """
    num_rows, num_outputs = len(x), len(weight.codes)
    assert x.stride(1) == 1, "a row must be contiguous"
    if num_rows > MOST_ROWS:
        return F.linear(x, expanded(weight, x.dtype), bias)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if num_rows:
        tiling = int4_tiling(num_rows, num_outputs, len(weight.scales), x.dtype, x.device)
        _launch(x, weight, bias, out, num_arrived, tiling)
    return out


def _launch(
    x: Tensor, weight: Int4Matrix, bias: Tensor | None, out: Tensor, num_arrived: Tensor, tiling: Int4Tiling
) -> None:
    num_rows, num_outputs = out.shape
    assert tiling.num_splits == 1 or tiling.num_tiles <= len(num_arrived), "a counter for each tile"
    partials = out
    if tiling.num_splits > 1:
        partials = torch.empty((tiling.num_splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    int4_kernel[(tiling.num_output_tiles, tiling.num_splits, tiling.num_row_tiles)](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        out if bias is None else bias,
        out,
        partials,
        num_arrived,
        num_rows,
        num_outputs,
        len(weight.scales),
        tiling.split_groups,
        tiling.num_splits,
        x.stride(0),
        ROWS=tiling.rows,
        OUTPUTS=OUTPUTS,
        HAS_BIAS=bias is not None,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        enable_fp_fusion=True,
    )


def expanded(weight: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, [N, K], each number rounded once."""
    num_groups, num_outputs = weight.scales.shape
    out = torch.empty((num_outputs, num_groups * int4_matrix.GROUP), dtype=dtype, device=weight.codes.device)
    expand_int4_kernel[(num_groups, triton.cdiv(num_outputs, EXPANDED_OUTPUTS))](
        weight.codes,
        weight.scales,
        weight.zeros,
        out,
        num_outputs,
        num_groups,
        OUTPUTS=EXPANDED_OUTPUTS,
        num_warps=NUM_WARPS,
    )
    return out
