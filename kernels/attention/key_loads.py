"""Reads of keys and values in blocks by attention kernels, with few instructions for addresses and conversions.

Whoever calls clamps positions to keys that exist, so no load of a row needs a mask. Values of e4m3 are read in pairs:
16-bit elements can be transposed on their way out of shared memory, single bytes cannot.
"""

import triton
import triton.language as tl


@triton.jit
def _wide_product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Product in 64 bits, by one instruction since both are known to fit into 32 bits without a sign."""
    return a.to(tl.uint32).to(tl.uint64) * b.to(tl.uint32).to(tl.uint64)


@triton.jit
def row_offsets(
    b_block: tl.tensor,  # [TILE] block ids
    o_key: tl.tensor,  # [TILE] uint32 positions
    stride_block: tl.tensor,  # both below 2^32, as `assert_fits` asserts
    stride_token: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Offsets of the keys' rows in a cache, uint64 [TILE]."""
    return _wide_product(b_block, stride_block) + _wide_product(o_key % BLOCK_SIZE, stride_token)


@triton.jit
def clamped(o_key: tl.tensor, i_first: tl.tensor, i_end: tl.tensor) -> tl.tensor:
    """Positions moved to the nearest one from i_first to i_end - 1, uint32."""
    return tl.minimum(tl.maximum(o_key, i_first), i_end - 1).to(tl.uint32)


@triton.jit
def blocks_of(
    o_key: tl.tensor, i_first: tl.tensor, i_end: tl.tensor, p_table: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Ids of the blocks that hold these positions, moved to the nearest one from i_first to i_end - 1.

    Loops load them for the tile after the next loads of keys: into registers, so that no load of keys waits for them,
    and none goes through shared memory with a barrier of its own.
    """
    return tl.load(p_table + clamped(o_key, i_first, i_end) // BLOCK_SIZE)


@triton.jit
def load_rows(p_row: tl.tensor, SIZE: tl.constexpr, PADDED: tl.constexpr) -> tl.tensor:
    """Rows [TILE, PADDED] of SIZE elements each from p_row [TILE] on; zeros for padding."""
    o_dim = tl.arange(0, PADDED)
    p_element = p_row[:, None] + o_dim[None, :]
    return tl.load(p_element) if SIZE == PADDED else tl.load(p_element, mask=(o_dim < SIZE)[None, :], other=0.0)


@triton.jit
def load_row_pairs(p_row: tl.tensor, SIZE: tl.constexpr, PADDED: tl.constexpr) -> tl.tensor:
    """Even and odd elements of rows of e4m3, as float16 [TILE, PADDED / 2] each."""
    b_pairs = load_rows(p_row.to(tl.pointer_type(tl.uint16)), SIZE // 2, PADDED // 2)
    b_even = (b_pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    b_odd = (b_pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return b_even.to(tl.float16), b_odd.to(tl.float16)


@triton.jit
def queries_for_keys(b_q: tl.tensor, PAIRED: tl.constexpr) -> tl.tensor:
    """Queries in the type in which products are computed: float16 where values come in pairs.

    e4m3 fits into it exactly and is converted by one instruction for two elements. Queries are cut to its range.
    """
    if PAIRED:
        b_q = tl.minimum(tl.maximum(b_q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return b_q


@triton.jit
def add_weighted_values(
    b_weights: tl.tensor,  # [ROWS, TILE] float32
    p_value: tl.tensor,  # [TILE] rows of values
    b_shrink: tl.tensor,  # [ROWS]
    b_acc: tl.tensor,  # [ROWS, PADDED_DIM] float32; if PAIRED, its even columns
    b_odd: tl.tensor,  # [ROWS, PADDED_DIM / 2], its odd columns; unused otherwise
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """b_acc and b_odd, shrunk, plus the weighted sum of a tile's values."""
    if PAIRED:
        b_even_v, b_odd_v = load_row_pairs(p_value, HEAD_DIM, PADDED_DIM)
        b_acc = tl.dot(b_weights.to(tl.float16), b_even_v, b_acc * b_shrink[:, None])
        b_odd = tl.dot(b_weights.to(tl.float16), b_odd_v, b_odd * b_shrink[:, None])
    else:
        b_v = load_rows(p_value, HEAD_DIM, PADDED_DIM).to(DTYPE)
        b_acc = tl.dot(b_weights.to(DTYPE), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_odd
