"""Causal attention of many queries per row over keys and values in blocks, read through block tables, in one launch.

A program computes a tile of queries of all heads that share keys, so that each key is read once for the group, a chunk
of few tokens still fills the matrix units, and little of the tile lies beyond the diagonal. The host plans the tiles
(`prefill_plan`). The torch reference is `prefill_reference`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode_attention import score_factors
from kernels.attention.key_loads import add_weighted_values, clamped, load_rows, queries_for_keys, row_offsets
from kernels.attention.prefill_reference import PrefillPlan
from kernels.attention.score_math import online_softmax, tanh
from kernels.attention.shape import Attended, ScoreRule, assert_fits, launch_strides

LN_2 = tl.constexpr(math.log(2.0))
TILE_FIELDS = tl.constexpr(2)


@triton.jit
def _attend_tile(
    b_q: tl.tensor,  # [ROWS, PADDED_DIM]
    b_max: tl.tensor,  # [ROWS]
    b_sum: tl.tensor,  # [ROWS]
    b_acc: tl.tensor,  # [ROWS, PADDED_DIM]; if PAIRED, its even columns
    b_odd: tl.tensor,  # [ROWS, PADDED_DIM / 2], its odd columns; unused otherwise
    o_position: tl.tensor,  # [ROWS] of each row's query in its context
    o_key: tl.tensor,  # [TILE] positions
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
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The new b_max, b_sum, b_acc and b_odd after one tile of keys; without MASKED every row sees all of them."""
    DIM: tl.constexpr = b_q.shape[1]
    o_loaded = clamped(o_key, i_first, i_end) if MASKED else o_key.to(tl.uint32)
    b_block = tl.load(p_table + o_loaded // BLOCK_SIZE)
    p_k = p_key + row_offsets(b_block, o_loaded, stride_kb, stride_kt, BLOCK_SIZE)
    b_k = load_rows(p_k, HEAD_DIM, DIM).to(b_q.dtype)
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
    b_acc, b_odd = add_weighted_values(b_weights, p_v, b_shrink, b_acc, b_odd, HEAD_DIM, DIM, PAIRED, DTYPE)
    return b_max, b_sum, b_acc, b_odd


@triton.jit
def _queries_and_heads(
    i_query: tl.tensor,
    query_len: tl.tensor,
    i_part: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
) -> tl.tensor:
    """Each row's query, its head within the group, and the mask of rows that have both."""
    o_row = tl.arange(0, ROWS)
    o_pair = i_query * HEADS + o_row
    o_query, o_group = o_pair // HEADS, i_part * HEADS + o_pair % HEADS
    return o_query, o_group, (o_row < ROWS // HEADS * HEADS) & (o_query < query_len) & (o_group < GROUP)


@triton.jit(do_not_specialize=["stride_table", "window"])
def prefill_kernel(
    query_ptr: tl.tensor,  # [T, num_heads, head_dim]
    key_ptr: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_ptr: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    query_start_ptr: tl.tensor,  # [R + 1] int32
    context_lens_ptr: tl.tensor,  # [R] int32
    table_ptr: tl.tensor,  # [R, max_blocks] int32
    tiles_ptr: tl.tensor,  # [num_tiles, 2] int32, a row below 0 where a tile is padding
    out_ptr: tl.tensor,  # [T, num_heads, head_dim], contiguous
    lse_ptr: tl.tensor,  # [T, num_heads] float32
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_kb: tl.tensor,
    stride_kt: tl.tensor,
    stride_kh: tl.tensor,
    stride_vb: tl.tensor,
    stride_vt: tl.tensor,
    stride_vh: tl.tensor,
    stride_table: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    WITH_LSE: tl.constexpr,
) -> None:
    """Softmax(score(q K^T) + mask) V for a tile of queries and HEADS heads that share keys.

    Row m of the tile is query m // HEADS of head m % HEADS. Keys in tiles, q being the tile's first and last query:

        |....kkkk|KKKKKKKK|KKKKKKKK|kkkkkk..|    K: tiles that all queries see whole, in a loop without masks
            first full_first   full_end  end     k: keys that only some queries see; a dot reads the nearest key again
                                     q qqq
    """
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    QUERIES: tl.constexpr = ROWS // HEADS
    i_kv_head, i_part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    p_tile = tiles_ptr + tl.program_id(1) * TILE_FIELDS
    i_row, i_query = tl.load(p_tile).to(tl.int64), tl.load(p_tile + 1)
    if i_row < 0:
        return
    i_start = tl.load(query_start_ptr + i_row)
    query_len = tl.load(query_start_ptr + i_row + 1) - i_start
    num_before = tl.load(context_lens_ptr + i_row) - query_len  # keys that all queries of the row see

    o_dim = tl.arange(0, PADDED_DIM)
    o_query, o_group, m_row = _queries_and_heads(i_query, query_len, i_part, GROUP, ROWS, HEADS)
    o_q = (i_start + o_query).to(tl.int64) * stride_qt + (i_kv_head * GROUP + o_group) * stride_qh
    m_q = m_row[:, None] & (o_dim < HEAD_DIM)[None, :]
    b_q = tl.load(query_ptr + o_q[:, None] + o_dim[None, :], mask=m_q, other=0.0)
    b_max = tl.full((ROWS,), float("-inf"), tl.float32)
    b_sum = tl.zeros((ROWS,), tl.float32)
    DTYPE: tl.constexpr = b_q.dtype
    NARROW: tl.constexpr = value_ptr.dtype.element_ty.primitive_bitwidth == 8 and DTYPE.primitive_bitwidth == 16
    PAIRED: tl.constexpr = NARROW and PADDED_DIM <= 128  # sums of wider heads leave no registers for both halves
    b_q = queries_for_keys(b_q, PAIRED)
    b_acc = tl.zeros((ROWS, PADDED_DIM // 2 if PAIRED else PADDED_DIM), tl.float32)
    b_odd = tl.zeros((ROWS, PADDED_DIM // 2 if PAIRED else 1), tl.float32)
    p_key = key_ptr + i_kv_head.to(tl.int64) * stride_kh
    p_value = value_ptr + i_kv_head.to(tl.int64) * stride_vh
    p_table = table_ptr + i_row * stride_table
    o_position = num_before + o_query

    i_first_position = num_before + i_query
    i_end = num_before + tl.minimum(i_query + QUERIES, query_len)
    i_full_end = (i_first_position + 1) // TILE * TILE
    i_first = 0
    i_full_first = 0
    if WINDOWED:
        i_first = tl.maximum(0, i_first_position - window + 1)
        i_full_first = tl.minimum((tl.maximum(0, i_end - window) + TILE - 1) // TILE * TILE, i_full_end)

    for i_tile in range(i_full_first, i_full_end, TILE):
        b_max, b_sum, b_acc, b_odd = _attend_tile(
            b_q,
            b_max,
            b_sum,
            b_acc,
            b_odd,
            o_position,
            i_tile + tl.arange(0, TILE),
            i_first,
            i_end,
            p_key,
            p_value,
            p_table,
            stride_kb,
            stride_kt,
            stride_vb,
            stride_vt,
            scale,
            soft_cap,
            window,
            HEAD_DIM,
            BLOCK_SIZE,
            SOFT_CAP,
            WINDOWED,
            MASKED=False,
            PAIRED=PAIRED,
            DTYPE=DTYPE,
        )
    # Read again, so that no address of the results takes registers in the loop above.
    i_query = tl.load(p_tile + 1, volatile=True)
    # Tiles that a window's start or the diagonal crosses.
    i_low = i_first // TILE * TILE
    i_num_low = (i_full_first - i_low) // TILE
    for i_masked in range(i_num_low + (i_end - i_full_end + TILE - 1) // TILE):
        i_tile = i_full_end + (i_masked - i_num_low) * TILE
        if WINDOWED:
            i_tile = tl.where(i_masked < i_num_low, i_low + i_masked * TILE, i_tile)
        b_max, b_sum, b_acc, b_odd = _attend_tile(
            b_q,
            b_max,
            b_sum,
            b_acc,
            b_odd,
            o_position,
            i_tile + tl.arange(0, TILE),
            i_first,
            i_end,
            p_key,
            p_value,
            p_table,
            stride_kb,
            stride_kt,
            stride_vb,
            stride_vt,
            scale,
            soft_cap,
            window,
            HEAD_DIM,
            BLOCK_SIZE,
            SOFT_CAP,
            WINDOWED,
            MASKED=True,
            PAIRED=PAIRED,
            DTYPE=DTYPE,
        )

    o_query, o_group, m_row = _queries_and_heads(i_query, query_len, i_part, GROUP, ROWS, HEADS)
    o_out = (i_start + o_query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + i_kv_head * GROUP + o_group
    m_out = m_row[:, None] & (o_dim < HEAD_DIM)[None, :]
    if PAIRED:
        b_acc = tl.interleave(b_acc, b_odd)
    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = (b_acc / b_divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + o_out[:, None] * HEAD_DIM + o_dim[None, :], b_out, mask=m_out)
    if WITH_LSE:
        tl.store(lse_ptr + o_out, (b_max + tl.log2(b_divisor)) * LN_2, mask=m_row)


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: PrefillPlan,
    rule: ScoreRule,
    with_lse: bool = False,
    out: Tensor | None = None,
) -> Attended:
    """softmax(score(Q K^T) + mask) V for each row, K and V read through its block table (paper, eq. 4).

    Grouped queries: heads h * G to h * G + G - 1 share key-value head h. Scores, weights' sums and results accumulate
    in float32; keys of e4m3 are widened in registers, to float16 unless queries are of float32. Queues at most one
    launch, without waiting.

    query:                  [T, num_heads, head_dim], head_dim contiguous
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides with head_dim contiguous
    plan:                   of these rows and this shape; tokens in no tile are not written
    rule:                   its scale is positive
    out:                    output, contiguous, else like query; allocated if None
    """
    shape = plan.shape
    assert_fits(shape, query, key_cache, value_cache, plan.block_size)
    assert plan.tiles.is_contiguous() and plan.rows.block_tables.stride(1) == 1
    assert rule.scale > 0, "the greatest product must be the greatest score"
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    assert out.shape == query.shape and out.is_contiguous()
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if with_lse else None
    num_tiles = len(plan.tiles)
    if num_tiles == 0:
        return Attended(out, lse)
    prefill_kernel[(shape.num_kv_heads * num_parts(plan), num_tiles)](
        query,
        key_cache,
        value_cache,
        plan.rows.query_start,
        plan.rows.context_lens,
        plan.rows.block_tables,
        plan.tiles,
        out,
        out if lse is None else lse,
        *launch_strides(query, key_cache, value_cache, plan.rows.block_tables),
        *score_factors(rule),
        plan.sliding_window or 0,
        **launch_constants(plan, rule.soft_cap is not None, with_lse),
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
        enable_fp_fusion=True,
    )
    return Attended(out, lse)


def num_parts(plan: PrefillPlan) -> int:
    """Number of tiles that hold all heads of a group."""
    return -(-plan.shape.group // plan.config.heads(plan.shape))


def launch_constants(plan: PrefillPlan, soft_cap: bool, with_lse: bool) -> dict[str, int | bool]:
    """The kernel's constexpr arguments."""
    shape = plan.shape
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": shape.padded_dim,
        "BLOCK_SIZE": plan.block_size,
        "ROWS": plan.config.rows,
        "HEADS": plan.config.heads(shape),
        "TILE": plan.config.tile,
        "SOFT_CAP": soft_cap,
        "WINDOWED": plan.sliding_window is not None,
        "WITH_LSE": with_lse,
    }
