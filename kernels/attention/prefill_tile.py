"""Parts of prefill attention's kernel: rows of a tile of queries, one tile of keys in its loop, and its results."""

import triton
import triton.language as tl

from kernels.attention.key_loads import add_weighted_values, clamped, load_rows, row_offsets
from kernels.attention.score_math import online_softmax, tanh


@triton.jit
def queries_and_heads(
    o_row: tl.tensor,  # of a tile of queries
    i_query: tl.tensor,
    query_len: tl.tensor,
    i_part: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
) -> tl.tensor:
    """Each row's query, its head within the group, and the mask of rows that have both."""
    o_pair = i_query * HEADS + o_row
    o_query, o_group = o_pair // HEADS, i_part * HEADS + o_pair % HEADS
    return o_query, o_group, (o_row < ROWS // HEADS * HEADS) & (o_query < query_len) & (o_group < GROUP)


@triton.jit
def store_results(
    out_ptr: tl.tensor,  # [any, HEAD_DIM]
    lse_ptr: tl.tensor,
    o_out: tl.tensor,  # [ROWS] index of each row's result
    m_row: tl.tensor,  # [ROWS]
    o_dim: tl.tensor,  # [PADDED_DIM]
    b_out: tl.tensor,  # [ROWS, PADDED_DIM]
    b_lse: tl.tensor,  # [ROWS]
    HEAD_DIM: tl.constexpr,
    WITH_LSE: tl.constexpr,
) -> None:
    m_out = m_row[:, None] & (o_dim < HEAD_DIM)[None, :]
    tl.store(out_ptr + o_out[:, None] * HEAD_DIM + o_dim[None, :], b_out.to(out_ptr.dtype.element_ty), mask=m_out)
    if WITH_LSE:
        tl.store(lse_ptr + o_out, b_lse, mask=m_row)


@triton.jit
def attend_tile(
    b_q: tl.tensor,  # [ROWS, PADDED_DIM]
    b_max: tl.tensor,  # [ROWS]
    b_sum: tl.tensor,  # [ROWS]
    b_acc: tl.tensor,  # [ROWS, PADDED_DIM]; if PAIRED, its even columns
    b_odd: tl.tensor,  # [ROWS, PADDED_DIM / 2], its odd columns; unused otherwise
    b_weights: tl.tensor,  # [ROWS, TILE] of the tile before, not yet in b_acc; unused without LATE
    b_shrink: tl.tensor,  # [ROWS], not yet applied to b_acc; unused without LATE
    o_position: tl.tensor,  # [ROWS] of each row's query in its context
    o_key: tl.tensor,  # [TILE] positions
    o_before: tl.tensor,  # [TILE] positions of the tile before
    i_first: tl.tensor,  # if MASKED, instead of keys before i_first and from i_end on the nearest ones are loaded
    i_end: tl.tensor,
    p_key: tl.tensor,
    p_value: tl.tensor,
    p_table: tl.tensor,
    stride_kb: tl.tensor,
    stride_kt: tl.tensor,
    stride_vb: tl.tensor,
    stride_vt: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
    PAIRED: tl.constexpr,
    LATE: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The new b_max, b_sum, b_acc, b_odd, b_weights and b_shrink after one tile of keys; without MASKED every row sees
    all of them.

    With LATE values are a tile late, so that they are multiplied while the weights of this tile are computed, which
    needs no result of that product. The order of statements is that of the machine code.
    """
    o_loaded = clamped(o_key, i_first, i_end) if MASKED else o_key.to(tl.uint32)
    b_block = tl.load(p_table + o_loaded // BLOCK_SIZE)
    p_k = p_key + row_offsets(b_block, o_loaded, stride_kb, stride_kt, BLOCK_SIZE)
    b_k = load_rows(p_k, HEAD_DIM, b_q.shape[1]).to(b_q.dtype)
    b_products = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if LATE:
        b_acc, b_odd = add_tile(
            b_weights,
            b_shrink,
            b_acc,
            b_odd,
            o_before,
            i_first,
            i_end,
            p_value,
            p_table,
            stride_vb,
            stride_vt,
            HEAD_DIM,
            b_q.shape[1],
            BLOCK_SIZE,
            MASKED,
            PAIRED,
            DTYPE,
        )
    factor = scale
    if SOFT_CAP:
        b_products = tanh(b_products * scale)
        factor = soft_cap
    if MASKED:
        m_seen = o_key[None, :] <= o_position[:, None]
        if WINDOWED:
            m_seen &= o_key[None, :] > o_position[:, None] - window
        b_products = tl.where(m_seen, b_products, float("-inf"))
    b_new_weights, b_new_shrink, b_max, b_sum = online_softmax(b_products, b_max, b_sum, factor)
    if LATE:
        b_weights = b_new_weights.to(b_weights.dtype)
        b_shrink = b_new_shrink
    else:
        p_v = p_value + row_offsets(b_block, o_loaded, stride_vb, stride_vt, BLOCK_SIZE)
        b_acc, b_odd = add_weighted_values(
            b_new_weights, p_v, b_new_shrink, b_acc, b_odd, HEAD_DIM, b_q.shape[1], PAIRED, DTYPE
        )
    return b_max, b_sum, b_acc, b_odd, b_weights, b_shrink


@triton.jit
def add_tile(
    b_weights: tl.tensor,
    b_shrink: tl.tensor,
    b_acc: tl.tensor,
    b_odd: tl.tensor,
    o_key: tl.tensor,
    i_first: tl.tensor,
    i_end: tl.tensor,
    p_value: tl.tensor,
    p_table: tl.tensor,
    stride_vb: tl.tensor,
    stride_vt: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The new b_acc and b_odd with the weighted values of one tile of keys."""
    o_loaded = clamped(o_key, i_first, i_end) if MASKED else o_key.to(tl.uint32)
    b_block = tl.load(p_table + o_loaded // BLOCK_SIZE)
    p_v = p_value + row_offsets(b_block, o_loaded, stride_vb, stride_vt, BLOCK_SIZE)
    return add_weighted_values(b_weights, p_v, b_shrink, b_acc, b_odd, HEAD_DIM, PADDED_DIM, PAIRED, DTYPE)
