"""Splits the work of shared-prefix attention on the device, from groups and context lengths on the device.

Two launches per iteration fill the plan that all layers use: the groups' prefixes, then decode's rows. They can be
captured in a graph, since the plan keeps its memory. The torch reference is
`kernels.attention.cascade_reference.fill_cascade_plan`.
"""

import triton
import triton.language as tl

from kernels.attention import cascade_groups, cascade_reference, decode_plan
from kernels.attention.cascade_reference import PREFIX_SHARES, CascadePlan
from kernels.attention.decode_plan import best_size, cdiv, even_splits
from kernels.attention.decode_reference import COSTS
from kernels.attention.split_sizes import SHARE_UNIT

GROUP_FIELDS = tl.constexpr(cascade_groups.GROUP_FIELDS)
WORK_FIELDS = tl.constexpr(cascade_reference.WORK_FIELDS)


@triton.jit(do_not_specialize=["num_groups"])
def prefix_plan_kernel(
    groups_ptr: tl.tensor,  # [max_groups, 3] int32
    group_of_row_ptr: tl.tensor,  # [R] int32
    work_ptr: tl.tensor,  # [max_work, 6] int32
    num_work_ptr: tl.tensor,  # [1] int32
    prefix_lens_ptr: tl.tensor,  # [R] int32
    num_partials_ptr: tl.tensor,  # [R] int32
    num_groups: tl.tensor,  # including empty ones
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    SHARE_SIZES: tl.constexpr,
    UNIT: tl.constexpr,
    COSTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Each program weighs all groups, writes one row's prefix, and the work of the group with its number, if any.

    Work items on the same keys, for all tiles of queries, are neighbours.
    """
    i_row = tl.program_id(0)
    o_group = tl.arange(0, PADDED_GROUPS)
    m_group = o_group < num_groups
    p_group = groups_ptr + o_group * GROUP_FIELDS
    b_count = tl.load(p_group + 1, mask=m_group, other=0)
    b_copies = cdiv(b_count * GROUP, ROWS)
    b_shared = tl.where(b_count > 0, tl.load(p_group + 2, mask=m_group, other=0), 0)
    b_tiles = cdiv(b_shared, TILE)
    i_size = best_size(b_tiles, b_copies, NUM_KV_HEADS, NUM_PROGRAMS, SHARE_SIZES, UNIT, COSTS)
    b_even, b_splits = even_splits(b_tiles, i_size)

    m_own = o_group == tl.load(group_of_row_ptr + i_row)
    tl.store(prefix_lens_ptr + i_row, tl.sum(tl.where(m_own, b_shared, 0), 0))
    tl.store(num_partials_ptr + i_row, tl.sum(tl.where(m_own, b_splits, 0), 0))

    m_own = o_group == i_row
    b_work = b_copies * b_splits
    tl.store(num_work_ptr, tl.sum(b_work, 0), mask=i_row == 0)
    i_first_work = tl.sum(tl.where(o_group < i_row, b_work, 0), 0)
    i_work = tl.sum(tl.where(m_own, b_work, 0), 0)
    i_even = tl.sum(tl.where(m_own, b_even, 0), 0)
    i_shared = tl.sum(tl.where(m_own, b_shared, 0), 0)
    i_copies = tl.maximum(1, tl.sum(tl.where(m_own, b_copies, 0), 0))
    i_count = tl.sum(tl.where(m_own, b_count, 0), 0)
    i_first_member = tl.load(groups_ptr + i_row * GROUP_FIELDS, mask=i_row < num_groups, other=0)
    for i_item in range(0, i_work, WIDTH):
        o_item = i_item + tl.arange(0, WIDTH)
        m_item = o_item < i_work
        o_split = o_item // i_copies
        p_work = work_ptr + (i_first_work + o_item) * WORK_FIELDS
        tl.store(p_work, i_first_member + tl.zeros_like(o_item), mask=m_item)
        tl.store(p_work + 1, i_count + tl.zeros_like(o_item), mask=m_item)
        tl.store(p_work + 2, o_item % i_copies * ROWS, mask=m_item)
        tl.store(p_work + 3, o_split * i_even * TILE, mask=m_item)
        tl.store(p_work + 4, tl.minimum((o_split + 1) * i_even * TILE, i_shared), mask=m_item)
        tl.store(p_work + 5, o_split, mask=m_item)


def fill_cascade_plan(plan: CascadePlan) -> None:
    """Split the groups' prefixes into work of nearly equal size, then the rows' other keys.

    Queues two launches, without waiting.
    """
    prefixes = plan.suffixes.prefixes
    assert prefixes is not None
    num_rows, num_groups = len(prefixes.lens), len(plan.groups.groups)
    assert num_groups <= num_rows, "each group's work is written by the program of a row"
    padded_groups = decode_plan.padded(num_groups)
    prefix_plan_kernel[(num_rows,)](
        plan.groups.groups,
        plan.groups.group_of_row,
        plan.work,
        plan.num_work,
        prefixes.lens,
        prefixes.num_partials,
        num_groups,
        **plan_constants(plan, padded_groups),
        num_warps=decode_plan.plan_warps(padded_groups),
        enable_fp_fusion=True,
    )
    decode_plan.fill_plan(plan.suffixes)


def plan_constants(plan: CascadePlan, padded_groups: int) -> dict[str, object]:
    """The kernel's constexpr arguments."""
    return {
        "GROUP": plan.suffixes.shape.group,
        "ROWS": plan.config.rows,
        "TILE": plan.config.prefix.tile,
        "PADDED_GROUPS": padded_groups,
        "NUM_KV_HEADS": plan.suffixes.shape.num_kv_heads,
        "NUM_PROGRAMS": plan.num_programs,
        "SHARE_SIZES": PREFIX_SHARES,
        "UNIT": SHARE_UNIT,
        "COSTS": tuple(COSTS),
        "WIDTH": decode_plan.WRITE_WIDTH,
    }
