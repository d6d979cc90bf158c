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
    o_position: tl.tensor,  # [ROWS] of each row's query in its context
    o_key: tl.tensor,  # [TILE] positions
    b_block: tl.tensor,  # [TILE] ids of their blocks, as `blocks_of` gives them
    i_first: tl.tensor,  # if MASKED, instead of keys before i_first and from i_end on the nearest ones are loaded
    i_end: tl.tensor,
    p_key: tl.tensor,
    p_value: tl.tensor,
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
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The new b_max, b_sum, b_acc and b_odd after one tile of keys; without MASKED every row sees all of them."""
    o_loaded = clamped(o_key, i_first, i_end) if MASKED else o_key.to(tl.uint32)
    p_k = p_key + row_offsets(b_block, o_loaded, stride_kb, stride_kt, BLOCK_SIZE)
    b_k = load_rows(p_k, HEAD_DIM, b_q.shape[1]).to(b_q.dtype)
    b_products = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    factor = scale
    if SOFT_CAP:
        b_products = tanh(b_products * scale)
        factor = soft_cap
    if MASKED:
        m_seen = o_key[None, :] <= o_position[:, None]
        if WINDOWED:
            m_seen &= o_key[None, :] > o_position[:, None] - window
        b_products = tl.where(m_seen, b_products, float("-inf"))
    b_weights, b_shrink, b_max, b_sum = online_softmax(b_products, b_max, b_sum, factor)
    p_v = p_value + row_offsets(b_block, o_loaded, stride_vb, stride_vt, BLOCK_SIZE)
    b_acc, b_odd = add_weighted_values(b_weights, p_v, b_shrink, b_acc, b_odd, HEAD_DIM, b_q.shape[1], PAIRED, DTYPE)
    return b_max, b_sum, b_acc, b_odd
