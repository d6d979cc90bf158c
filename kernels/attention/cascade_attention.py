"""Attention of one query per row for rows that begin with the same blocks: one launch for prefixes, one for decode.

The queries of all rows that share a prefix are the rows of matrix products with its keys, so each key is read once for
all. The results go to the partial results of decode attention, which merges them with the rows' own parts. The torch
reference is `cascade_reference`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import decode_attention
from kernels.attention.cascade_plan import WORK_FIELDS
from kernels.attention.cascade_reference import CascadePlan
from kernels.attention.decode_attention import attend_keys, score_factors
from kernels.attention.shape import Attended, ScoreRule, assert_fits, launch_strides


@triton.jit
def _queries(
    p_work: tl.tensor,
    p_member: tl.tensor,  # the group's first
    i_head: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Row, head and mask of each query of a tile.

    Reads are volatile, so that calling this twice keeps no registers in between.
    """
    o_query = tl.load(p_work + 2, volatile=True) + tl.arange(0, ROWS)
    m_query = o_query < tl.load(p_work + 1, volatile=True) * GROUP
    b_row = tl.load(p_member + o_query // GROUP, mask=m_query, other=0).to(tl.int64)
    return b_row, i_head * GROUP + o_query % GROUP, m_query


@triton.jit(do_not_specialize=["stride_table"])
def prefix_kernel(
    query_ptr: tl.tensor,  # [R, num_heads, head_dim]
    key_ptr: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_ptr: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    table_ptr: tl.tensor,  # [R, max_blocks] int32
    members_ptr: tl.tensor,  # [R] int32
    work_ptr: tl.tensor,  # [max_work, 6] int32
    num_work_ptr: tl.tensor,  # [1] int32
    first_partials_ptr: tl.tensor,  # [R] int32
    partial_out_ptr: tl.tensor,  # [max_partials, num_heads, head_dim] float32
    partial_lse_ptr: tl.tensor,  # [max_partials, num_heads] float32
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
) -> None:
    """Softmax(score(q K^T)) V for one key-value head, one tile of a group's queries, and one split of its prefix.

    tile of queries  | member 0, heads 0 to GROUP - 1 | member 1, heads 0 to GROUP - 1 | ...

    The launch has as many programs as run at once, and they take work in turn, so a launch without work is cheap. Only
    one program writes the result of a member and a split.
    """
    i_head = tl.program_id(0)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    o_dim = tl.arange(0, PADDED_DIM)
    for i_work in range(tl.program_id(1), tl.load(num_work_ptr), tl.num_programs(1)):
        p_work = work_ptr + i_work * WORK_FIELDS
        p_member = members_ptr + tl.load(p_work)
        i_first, i_end = tl.load(p_work + 3), tl.load(p_work + 4)
        b_row, o_head, m_query = _queries(p_work, p_member, i_head, GROUP, ROWS)
        m_q = m_query[:, None] & (o_dim < HEAD_DIM)[None, :]
        p_q = query_ptr + (b_row * stride_qr + o_head * stride_qh)[:, None] + o_dim[None, :]
        b_q = tl.load(p_q, mask=m_q, other=0.0)
        b_acc, b_max, b_sum = attend_keys(
            b_q,
            key_ptr + i_head.to(tl.int64) * stride_kh,
            value_ptr + i_head.to(tl.int64) * stride_vh,
            table_ptr + tl.load(p_member).to(tl.int64) * stride_table,
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
        b_row, o_head, m_query = _queries(p_work, p_member, i_head, GROUP, ROWS)
        b_partial = tl.load(first_partials_ptr + b_row, mask=m_query, other=0) + tl.load(p_work + 5)
        o_partial = b_partial.to(tl.int64) * num_heads + o_head
        m_q = m_query[:, None] & (o_dim < HEAD_DIM)[None, :]
        p_out = partial_out_ptr + o_partial[:, None] * HEAD_DIM + o_dim[None, :]
        tl.store(p_out, b_acc / b_sum[:, None], mask=m_q)
        tl.store(partial_lse_ptr + o_partial, b_max + tl.log2(b_sum), mask=m_query)


def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: CascadePlan,
    rule: ScoreRule,
    out: Tensor | None = None,
) -> Attended:
    """softmax(score(Q K^T)) V for each row. The keys of a prefix are read once for all rows that share it, and results
    are merged with those of a row's other keys by log-sum-exp. Queues two launches, without waiting.

    query:                  [R, num_heads, head_dim], head_dim contiguous
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides with head_dim contiguous
    plan:                   of these rows and this shape
    out:                    output, contiguous, else like query; allocated if None
    """
    attend_prefixes(query, key_cache, value_cache, plan, rule)
    return decode_attention.decode_attention(query, key_cache, value_cache, plan.suffixes, rule, out=out)


def attend_prefixes(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: CascadePlan, rule: ScoreRule) -> None:
    """Writes each member's result for each split of its group's prefix to the partial results of the suffixes' plan."""
    suffixes, shape = plan.suffixes, plan.suffixes.shape
    assert suffixes.prefixes is not None
    assert len(query) == len(suffixes.rows.context_lens), "not the plan's queries"
    assert_fits(shape, query, key_cache, value_cache, suffixes.block_size)
    num_programs = min(len(plan.work), -(-plan.num_programs // shape.num_kv_heads))
    prefix_kernel[(shape.num_kv_heads, num_programs)](
        query,
        key_cache,
        value_cache,
        suffixes.rows.block_tables,
        plan.groups.members,
        plan.work,
        plan.num_work,
        suffixes.prefixes.first_partials,
        suffixes.partial_out,
        suffixes.partial_lse,
        *launch_strides(query, key_cache, value_cache, suffixes.rows.block_tables),
        *score_factors(rule),
        **launch_constants(plan, rule.soft_cap is not None),
        num_warps=plan.config.prefix.num_warps,
        num_stages=plan.config.prefix.num_stages,
        enable_fp_fusion=True,
    )


def launch_constants(plan: CascadePlan, soft_cap: bool) -> dict[str, int | bool]:
    """The prefix kernel's constexpr arguments."""
    shape = plan.suffixes.shape
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "ROWS": plan.config.rows,
        "PADDED_DIM": shape.padded_dim,
        "BLOCK_SIZE": plan.suffixes.block_size,
        "TILE": plan.config.prefix.tile,
        "SOFT_CAP": soft_cap,
    }
