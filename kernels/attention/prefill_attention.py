"""Causal attention of many queries per row over keys and values in blocks, read through block tables, in one launch.

A program computes a tile of queries of all heads that share keys, so that each key is read once for the group, a chunk
of few tokens still fills the matrix units, and little of the tile lies beyond the diagonal. The host plans the tiles,
and splits their keys between programs where there are few (`prefill_plan`); as in decode attention, the last of a
tile's programs to finish merges the results of all. The torch reference is `prefill_reference`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode_attention import score_factors
from kernels.attention.key_loads import blocks_of, queries_for_keys
from kernels.attention.partial_merge import merge_splits
from kernels.attention.prefill_plan import WORK_FIELDS, num_heads
from kernels.attention.prefill_reference import PrefillPlan
from kernels.attention.prefill_tile import attend_tile, queries_and_heads, store_results
from kernels.attention.shape import Attended, ScoreRule, assert_fits, launch_strides

LN_2 = tl.constexpr(math.log(2.0))
FIELDS = tl.constexpr(WORK_FIELDS)
MERGE_ELEMENTS = 16384  # of partial results at once: 64 registers for each of 256 threads, as many as the loop's sums


@triton.jit(do_not_specialize=["stride_table", "window"])
def prefill_kernel(
    query_ptr: tl.tensor,  # [T, num_heads, head_dim]
    key_ptr: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_ptr: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    query_start_ptr: tl.tensor,  # [R + 1] int32
    context_lens_ptr: tl.tensor,  # [R] int32
    table_ptr: tl.tensor,  # [R, max_blocks] int32
    work_ptr: tl.tensor,  # [num_work, 6] int32, a row below 0 where it is padding
    out_ptr: tl.tensor,  # [T, num_heads, head_dim], contiguous
    lse_ptr: tl.tensor,  # [T, num_heads] float32
    partial_out_ptr: tl.tensor,  # [most_splits, NUM_KV_HEADS * PARTS, ROWS, head_dim] float32
    partial_lse_ptr: tl.tensor,  # [most_splits, NUM_KV_HEADS * PARTS, ROWS] float32
    num_arrived_ptr: tl.tensor,  # [most_splits, NUM_KV_HEADS * PARTS] int32
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
    MERGED_SPLITS: tl.constexpr,
) -> None:
    """Softmax(score(q K^T) + mask) V for a tile of queries and HEADS heads that share keys, over one split of the keys.

    Row m of the tile is query m // HEADS of head m % HEADS. Keys in tiles, q being the tile's first and last query:

        |....kkkk|KKKKKKKK|KKKKKKKK|kkkkkk..|    K: tiles that all queries see whole, in a loop without masks
            first full_first   full_end  end     k: keys that only some queries see; a dot reads the nearest key again
                                     q qqq

    A split has some of these tiles of keys. If there are several, each program writes its result to partial_out and
    increments num_arrived; the last one merges all.
    """
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    QUERIES: tl.constexpr = ROWS // HEADS
    i_kv_head, i_part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    p_work = work_ptr + tl.program_id(1) * FIELDS
    i_row, i_query = tl.load(p_work).to(tl.int64), tl.load(p_work + 1)
    if i_row < 0:
        return
    i_split_first, i_split_end = tl.load(p_work + 2) * TILE, tl.load(p_work + 3)
    i_start = tl.load(query_start_ptr + i_row)
    query_len = tl.load(query_start_ptr + i_row + 1) - i_start
    num_before = tl.load(context_lens_ptr + i_row) - query_len  # keys that all queries of the row see

    o_dim = tl.arange(0, PADDED_DIM)
    o_query, o_group, m_row = queries_and_heads(tl.arange(0, ROWS), i_query, query_len, i_part, GROUP, ROWS, HEADS)
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

    # Block ids are loaded a tile ahead into registers, so that no load of keys waits for them.
    i_begin, i_stop = tl.maximum(i_full_first, i_split_first), tl.minimum(i_full_end, i_split_end)
    b_block = blocks_of(i_begin + tl.arange(0, TILE), i_first, i_end, p_table, BLOCK_SIZE)
    for i_tile in range(i_begin, i_stop, TILE):
        o_key = i_tile + tl.arange(0, TILE)
        b_next = blocks_of(o_key + TILE, i_first, i_end, p_table, BLOCK_SIZE)
        b_max, b_sum, b_acc, b_odd = attend_tile(
            b_q,
            b_max,
            b_sum,
            b_acc,
            b_odd,
            o_position,
            o_key,
            b_block,
            i_first,
            i_end,
            p_key,
            p_value,
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
        b_block = b_next
    # Read again, so that no address of the results takes registers in the loop above.
    i_query = tl.load(p_work + 1, volatile=True)
    # Tiles that a window's start or the diagonal crosses.
    i_high = tl.maximum(i_full_end, i_split_first)
    i_num_low = 0
    if WINDOWED:
        i_num_low = tl.maximum(0, tl.minimum(i_full_first, i_split_end) - i_split_first) // TILE
    for i_masked in range(i_num_low + tl.maximum(0, i_split_end - i_high + TILE - 1) // TILE):
        i_tile = i_high + (i_masked - i_num_low) * TILE
        if WINDOWED:
            i_tile = tl.where(i_masked < i_num_low, i_split_first + i_masked * TILE, i_tile)
        o_key = i_tile + tl.arange(0, TILE)
        b_block = blocks_of(o_key, i_first, i_end, p_table, BLOCK_SIZE)
        b_max, b_sum, b_acc, b_odd = attend_tile(
            b_q,
            b_max,
            b_sum,
            b_acc,
            b_odd,
            o_position,
            o_key,
            b_block,
            i_first,
            i_end,
            p_key,
            p_value,
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

    o_query, o_group, m_row = queries_and_heads(tl.arange(0, ROWS), i_query, query_len, i_part, GROUP, ROWS, HEADS)
    if PAIRED:
        b_acc = tl.interleave(b_acc, b_odd)
    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = b_acc / b_divisor[:, None]
    b_lse = b_max + tl.log2(b_divisor)
    num_splits = tl.load(p_work + 5, volatile=True)
    if num_splits == 1:
        o_out = (i_start + o_query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + i_kv_head * GROUP + o_group
        store_results(out_ptr, lse_ptr, o_out, m_row, o_dim, b_out, b_lse * LN_2, HEAD_DIM, WITH_LSE)
    else:
        num_programs: tl.constexpr = NUM_KV_HEADS * PARTS  # of one piece of work
        i_own = tl.program_id(1).to(tl.int64) * num_programs + tl.program_id(0)
        o_partial = i_own * ROWS + tl.arange(0, ROWS)
        store_results(partial_out_ptr, partial_lse_ptr, o_partial, m_row, o_dim, b_out, b_lse, HEAD_DIM, True)
        tl.debug_barrier()  # all threads have stored before one of them increments
        i_first_program = tl.load(p_work + 4).to(tl.int64) * num_programs + tl.program_id(0)
        if tl.atomic_add(num_arrived_ptr + i_first_program, 1, sem="acq_rel") == num_splits - 1:
            b_merged, b_merged_lse = merge_splits(
                partial_out_ptr + i_first_program * (ROWS * HEAD_DIM),
                partial_lse_ptr + i_first_program * ROWS,
                num_programs * ROWS * HEAD_DIM,
                num_programs * ROWS,
                tl.arange(0, ROWS),
                m_row,
                o_dim,
                num_splits,
                HEAD_DIM,
                MERGED_SPLITS,
            )
            o_out = (i_start + o_query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + i_kv_head * GROUP + o_group
            store_results(out_ptr, lse_ptr, o_out, m_row, o_dim, b_merged, b_merged_lse * LN_2, HEAD_DIM, WITH_LSE)
            tl.store(num_arrived_ptr + i_first_program, 0)


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
    plan:                   of these rows and this shape; tokens of rows without work are not written
    rule:                   its scale is positive
    out:                    output, contiguous, else like query; allocated if None
    """
    shape = plan.shape
    assert_fits(shape, query, key_cache, value_cache, plan.block_size)
    assert plan.work.is_contiguous() and plan.rows.block_tables.stride(1) == 1
    assert rule.scale > 0, "the greatest product must be the greatest score"
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    assert out.shape == query.shape and out.is_contiguous()
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if with_lse else None
    if not len(plan.work):
        return Attended(out, lse)
    prefill_kernel[(num_heads(shape, plan.config), len(plan.work))](
        query,
        key_cache,
        value_cache,
        plan.rows.query_start,
        plan.rows.context_lens,
        plan.rows.block_tables,
        plan.work,
        out,
        plan.partials.lse if lse is None else lse,
        plan.partials.out,
        plan.partials.lse,
        plan.partials.num_arrived,
        *launch_strides(query, key_cache, value_cache, plan.rows.block_tables),
        *score_factors(rule),
        plan.sliding_window or 0,
        **launch_constants(plan, rule.soft_cap is not None, with_lse),
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
        enable_fp_fusion=True,
    )
    return Attended(out, lse)


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
        "MERGED_SPLITS": max(1, MERGE_ELEMENTS // (plan.config.rows * shape.padded_dim)),
    }
