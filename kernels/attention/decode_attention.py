"""Attention of one query per row over keys and values in blocks, read through block tables, in one launch.

A plan splits keys between programs (`decode_plan`; the idea of Flash-Decoding). The last of a row's programs to finish
merges the results of all of them (as Stream-K sums its parts); the result of a row with one split is written directly.
Heads that share keys are the rows of one matrix product. The torch reference is `decode_reference`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode_plan import WORK_FIELDS
from kernels.attention.decode_reference import DecodePlan
from kernels.attention.key_loads import (
    add_weighted_values,
    blocks_of,
    clamped,
    load_rows,
    queries_for_keys,
    row_offsets,
)
from kernels.attention.partial_merge import merge_splits
from kernels.attention.score_math import online_softmax, tanh
from kernels.attention.shape import Attended, ScoreRule, assert_fits, launch_strides

LN_2 = tl.constexpr(math.log(2.0))
# The tile of partial results that is merged at once: at most 64 registers for each of 128 threads, so that merging
# takes few rounds, and no more registers than four programs of a multiprocessor have.
MERGE_ELEMENTS = 8192
MERGE_COLUMNS = 512  # of heads by their dimension
MERGE_SPLITS = 16
MOST_PROGRAMS = 65_535  # in the second and third dimension of a grid


@triton.jit
def attend_keys(
    b_q: tl.tensor,  # [ROWS, PADDED_DIM]
    p_key: tl.tensor,  # one head's, at block 0 and offset 0
    p_value: tl.tensor,
    p_table: tl.tensor,  # the row's block table
    stride_kb: tl.tensor,
    stride_kt: tl.tensor,
    stride_vb: tl.tensor,
    stride_vt: tl.tensor,
    i_first: tl.tensor,
    i_end: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    SOFT_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Weighted sum of the values of keys i_first to i_end - 1, with the maximum score and the sum of the weights.

    tiles  |....kkkk|kkkkkkkk|kkk.....|     a dot reads the nearest k again, and its weight is 0
                i_first         i_end
    """
    ROWS: tl.constexpr = b_q.shape[0]
    DIM: tl.constexpr = b_q.shape[1]
    DTYPE: tl.constexpr = b_q.dtype
    PAIRED: tl.constexpr = p_value.dtype.element_ty.primitive_bitwidth == 8 and DTYPE.primitive_bitwidth == 16
    b_q = queries_for_keys(b_q, PAIRED)
    b_max = tl.full((ROWS,), float("-inf"), tl.float32)
    b_sum = tl.zeros((ROWS,), tl.float32)
    b_acc = tl.zeros((ROWS, DIM // 2 if PAIRED else DIM), tl.float32)
    b_odd = tl.zeros((ROWS, DIM // 2 if PAIRED else 1), tl.float32)
    i_begin = i_first // TILE * TILE
    i_some = tl.maximum(i_end, i_first + 1)  # without keys one id is loaded, and not used
    b_block = blocks_of(i_begin + tl.arange(0, TILE), i_first, i_some, p_table, BLOCK_SIZE)
    for i_tile in range(i_begin, i_end, TILE):
        o_tile = i_tile + tl.arange(0, TILE)
        m_key = (o_tile - i_first).to(tl.uint32) < (i_end - i_first).to(tl.uint32)
        o_key = clamped(o_tile, i_first, i_end)
        b_next = blocks_of(o_tile + TILE, i_first, i_end, p_table, BLOCK_SIZE)
        p_k = p_key + row_offsets(b_block, o_key, stride_kb, stride_kt, BLOCK_SIZE)
        b_k = load_rows(p_k, HEAD_DIM, DIM).to(b_q.dtype)
        b_products = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        factor = scale
        if SOFT_CAP:
            b_products = tanh(b_products * scale)
            factor = soft_cap
        b_products = tl.where(m_key[None, :], b_products, float("-inf"))
        b_weights, b_shrink, b_max, b_sum = online_softmax(b_products, b_max, b_sum, factor)
        p_v = p_value + row_offsets(b_block, o_key, stride_vb, stride_vt, BLOCK_SIZE)
        b_acc, b_odd = add_weighted_values(b_weights, p_v, b_shrink, b_acc, b_odd, HEAD_DIM, DIM, PAIRED, DTYPE)
        b_block = b_next
    if PAIRED:
        b_acc = tl.interleave(b_acc, b_odd)
    return b_acc, b_max, b_sum


@triton.jit(do_not_specialize=["stride_table"])
def decode_kernel(
    query_ptr: tl.tensor,  # [R, num_heads, head_dim]
    key_ptr: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_ptr: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    table_ptr: tl.tensor,  # [R, max_blocks] int32
    work_ptr: tl.tensor,  # [max_work, 5] int32
    num_work_ptr: tl.tensor,  # [1] int32
    out_ptr: tl.tensor,  # [R, num_heads, head_dim], contiguous
    lse_ptr: tl.tensor,  # [R, num_heads] float32
    partial_out_ptr: tl.tensor,  # [max_work + max_partials, num_heads, head_dim] float32
    partial_lse_ptr: tl.tensor,  # [max_work + max_partials, num_heads] float32
    num_arrived_ptr: tl.tensor,  # [R, num_kv_heads] int32
    num_partials_ptr: tl.tensor,  # [R] int32
    first_partials_ptr: tl.tensor,  # [R] int32
    stride_qr: tl.tensor,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WITH_LSE: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    WITH_PREFIX: tl.constexpr,
) -> None:
    """Softmax(score(q K^T)) V for one key-value head's group of heads, over one split of one row's keys.

    Neighbouring programs read neighbouring heads of the same tokens. For a row with several splits, each program writes
    its result to partial_out and increments num_arrived; the last one merges all, including results that another kernel
    has written for the row's prefix before this launch.

    partial_out  | splits of row 0 | prefix of row 0 | splits of row 1 | prefix of row 1 | ...
    """
    i_head = tl.program_id(0)
    i_work = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if i_work >= tl.load(num_work_ptr):
        return
    p_work = work_ptr + i_work * WORK_FIELDS
    i_row = tl.load(p_work).to(tl.int64)
    i_first, i_end = tl.load(p_work + 1), tl.load(p_work + 2)
    i_first_work, num_splits = tl.load(p_work + 3).to(tl.int64), tl.load(p_work + 4)
    i_first_partial, num_partials = i_first_work, num_splits
    if WITH_PREFIX:
        i_first_partial = tl.load(first_partials_ptr + i_row).to(tl.int64) - num_splits
        num_partials += tl.load(num_partials_ptr + i_row)

    o_group, o_dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    m_group = o_group < GROUP
    m_q = m_group[:, None] & (o_dim < HEAD_DIM)[None, :]
    p_q = query_ptr + i_row * stride_qr + (i_head * GROUP + o_group)[:, None] * stride_qh + o_dim[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    b_acc, b_max, b_sum = attend_keys(
        b_q,
        key_ptr + i_head.to(tl.int64) * stride_kh,
        value_ptr + i_head.to(tl.int64) * stride_vh,
        table_ptr + i_row * stride_table,
        stride_kb,
        stride_kt,
        stride_vb,
        stride_vt,
        i_first,
        i_end,
        scale,
        soft_cap,
        SOFT_CAP,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
    )
    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = b_acc / b_divisor[:, None]
    b_lse = b_max + tl.log2(b_divisor)

    i_first_head = i_row * NUM_KV_HEADS * GROUP + i_head * GROUP
    o_out = o_group[:, None] * HEAD_DIM + o_dim[None, :]
    if num_partials == 1:
        tl.store(out_ptr + i_first_head * HEAD_DIM + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_q)
        if WITH_LSE:
            tl.store(lse_ptr + i_first_head + o_group, b_lse * LN_2, mask=m_group)
    else:
        stride_lse: tl.constexpr = NUM_KV_HEADS * GROUP
        i_partial = (i_first_partial + (i_work - i_first_work)) * stride_lse + i_head * GROUP
        tl.store(partial_out_ptr + i_partial * HEAD_DIM + o_out, b_out, mask=m_q)
        tl.store(partial_lse_ptr + i_partial + o_group, b_lse, mask=m_group)
        tl.debug_barrier()  # all threads have stored before one of them increments
        p_arrived = num_arrived_ptr + i_row * NUM_KV_HEADS + i_head
        if tl.atomic_add(p_arrived, 1, sem="acq_rel") == num_splits - 1:
            i_partial = i_first_partial * stride_lse + i_head * GROUP
            for i_group in range(0, GROUP, HEADS):
                o_head = i_group + tl.arange(0, HEADS)
                m_head = o_head < GROUP
                b_merged, b_merged_lse = merge_splits(
                    partial_out_ptr + i_partial * HEAD_DIM,
                    partial_lse_ptr + i_partial,
                    stride_lse * HEAD_DIM,
                    stride_lse,
                    o_head,
                    m_head,
                    o_dim,
                    num_partials,
                    HEAD_DIM,
                    SPLITS,
                )
                p_out = out_ptr + i_first_head * HEAD_DIM + o_head[:, None] * HEAD_DIM + o_dim[None, :]
                m_out = m_head[:, None] & (o_dim < HEAD_DIM)[None, :]
                tl.store(p_out, b_merged.to(out_ptr.dtype.element_ty), mask=m_out)
                if WITH_LSE:
                    tl.store(lse_ptr + i_first_head + o_head, b_merged_lse * LN_2, mask=m_head)
            tl.store(p_arrived, 0)


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: DecodePlan,
    rule: ScoreRule,
    with_lse: bool = False,
    out: Tensor | None = None,
) -> Attended:
    """softmax(score(Q K^T)) V for each row, K and V read through its block table (paper, eq. 4).

    Grouped queries: heads h * G to h * G + G - 1 share key-value head h. Scores, weights' sums and results accumulate
    in float32; keys of e4m3 are widened in registers, to float16 unless queries are of float32. Queues one launch,
    without waiting.

    query:                  [R, num_heads, head_dim], head_dim contiguous
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides with head_dim contiguous
    plan:                   of these rows and this shape
    rule:                   its scale is positive
    out:                    output, contiguous, else like query; allocated if None
    """
    shape = plan.shape
    assert len(query) == len(plan.rows.context_lens), "not the plan's queries"
    assert_fits(shape, query, key_cache, value_cache, plan.block_size)
    assert rule.scale > 0, "the greatest product must be the greatest score"
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    assert out.shape == query.shape and out.is_contiguous()
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if with_lse else None
    decode_kernel[launch_grid(plan)](
        query,
        key_cache,
        value_cache,
        plan.rows.block_tables,
        plan.work,
        plan.num_work,
        out,
        plan.partial_lse if lse is None else lse,
        plan.partial_out,
        plan.partial_lse,
        plan.num_arrived,
        plan.num_work if plan.prefixes is None else plan.prefixes.num_partials,
        plan.num_work if plan.prefixes is None else plan.prefixes.first_partials,
        *launch_strides(query, key_cache, value_cache, plan.rows.block_tables),
        *score_factors(rule),
        **launch_constants(plan, rule.soft_cap is not None, with_lse),
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
        enable_fp_fusion=True,
    )
    return Attended(out, lse)


def launch_grid(plan: DecodePlan) -> tuple[int, int, int]:
    """Heads of a piece of work beside each other; then the pieces, in two dimensions if they are too many for one."""
    rounds = triton.cdiv(len(plan.work), MOST_PROGRAMS)
    return plan.shape.num_kv_heads, triton.cdiv(len(plan.work), rounds), rounds


def score_factors(rule: ScoreRule) -> tuple[float, float]:
    """Factors of products before and after the soft cap, such that weights are powers of two."""
    if rule.soft_cap is None:
        return rule.scale * math.log2(math.e), 1.0
    return rule.scale / rule.soft_cap, rule.soft_cap * math.log2(math.e)


def launch_constants(plan: DecodePlan, soft_cap: bool, with_lse: bool) -> dict[str, int | bool]:
    """The kernel's constexpr arguments."""
    shape = plan.shape
    heads = min(triton.next_power_of_2(shape.group), max(1, MERGE_COLUMNS // shape.padded_dim))
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "ROWS": shape.dot_rows,
        "PADDED_DIM": shape.padded_dim,
        "BLOCK_SIZE": plan.block_size,
        "TILE": plan.config.tile,
        "SOFT_CAP": soft_cap,
        "WITH_LSE": with_lse,
        "HEADS": heads,
        "SPLITS": min(MERGE_SPLITS, MERGE_ELEMENTS // (heads * shape.padded_dim)),
        "WITH_PREFIX": plan.prefixes is not None,
    }
