"""Splits the work of decode attention on the device, from context lengths that the host need not know.

One launch per iteration fills the plan that all layers use; it can be captured in a graph, since the plan keeps its
memory. The torch reference is `kernels.attention.decode_reference.fill_plan`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode_reference import COSTS, SHARES, DecodePlan
from kernels.attention.split_sizes import SHARE_UNIT

WORK_FIELDS = tl.constexpr(5)
WRITE_WIDTH = 64  # entries of a row written at once
_WARP_SIZE = 32


@triton.jit
def cdiv(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return (a + b - 1) // b


@triton.jit
def even_splits(b_tiles: tl.tensor, i_size: tl.tensor) -> tl.tensor:
    """Tiles per split and number of splits of each row: `split_sizes.even_splits`."""
    b_wanted = tl.maximum(1, cdiv(b_tiles, i_size))
    b_even = tl.maximum(1, cdiv(b_tiles, b_wanted))
    return b_even, tl.maximum(1, cdiv(b_tiles, b_even))


@triton.jit
def _cost(
    b_tiles: tl.tensor,
    b_copies: tl.tensor,
    i_size: tl.tensor,
    i_total: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    COSTS: tl.constexpr,
) -> tl.tensor:
    """Estimated time with splits of this size, as in `split_sizes`."""
    b_even, b_splits = even_splits(b_tiles, i_size)
    i_longest = tl.max(b_even, 0).to(tl.int64) * COSTS[0] + COSTS[1]
    i_items = tl.sum(b_splits * b_copies, 0).to(tl.int64) * NUM_KV_HEADS
    i_waves = cdiv(i_items, NUM_PROGRAMS) * i_longest
    i_others = i_total * COSTS[0] + i_items * COSTS[1] - i_longest
    i_fair = cdiv(i_others, NUM_PROGRAMS) + i_longest
    i_most = tl.max(b_splits, 0)
    return tl.minimum(i_waves, i_fair) + tl.where(i_most > 1, COSTS[1] + i_most * COSTS[2], 0)


@triton.jit
def best_size(
    b_tiles: tl.tensor,  # of each row or prefix
    b_copies: tl.tensor,  # how often it occurs; 0 beyond the last
    NUM_KV_HEADS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    SHARE_SIZES: tl.constexpr,  # of splits, in twelfths of a fair share
    UNIT: tl.constexpr,
    COSTS: tl.constexpr,  # of a tile, a start and merging a split
) -> tl.tensor:
    """The size of splits, in tiles: `split_sizes.best_size`."""
    i_total = tl.sum(b_tiles.to(tl.int64) * b_copies, 0) * NUM_KV_HEADS
    i_size = tl.maximum(1, tl.max(b_tiles, 0))
    i_best = _cost(b_tiles, b_copies, i_size, i_total, NUM_KV_HEADS, NUM_PROGRAMS, COSTS)
    for i_share in tl.static_range(len(SHARE_SIZES)):
        i_tried = tl.maximum(1, cdiv(i_total * SHARE_SIZES[i_share], NUM_PROGRAMS * UNIT)).to(tl.int32)
        i_cost = _cost(b_tiles, b_copies, i_tried, i_total, NUM_KV_HEADS, NUM_PROGRAMS, COSTS)
        i_size = tl.where(i_cost < i_best, i_tried, i_size)
        i_best = tl.minimum(i_cost, i_best)
    return i_size


@triton.jit(do_not_specialize=["num_rows", "window"])
def plan_kernel(
    context_lens_ptr: tl.tensor,  # [R] int32
    work_ptr: tl.tensor,  # [max_work, 5] int32
    num_work_ptr: tl.tensor,  # [1] int32
    prefix_lens_ptr: tl.tensor,  # [R] int32
    num_partials_ptr: tl.tensor,  # [R] int32
    first_partials_ptr: tl.tensor,  # [R] int32
    num_rows: tl.tensor,
    window: tl.tensor,  # most keys that a query sees
    TILE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    SHARE_SIZES: tl.constexpr,
    UNIT: tl.constexpr,
    COSTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WITH_PREFIX: tl.constexpr,
) -> None:
    """Each program weighs all rows, which is cheaper than waiting for one that does, and writes one row's work."""
    i_row = tl.program_id(0)
    o_row = tl.arange(0, PADDED_ROWS)
    m_row = o_row < num_rows
    b_context = tl.load(context_lens_ptr + o_row, mask=m_row, other=0)
    if WITH_PREFIX:
        b_first = tl.load(prefix_lens_ptr + o_row, mask=m_row, other=0)
    else:
        b_first = tl.maximum(0, b_context - window)
    b_tiles = cdiv(b_context, TILE) - b_first // TILE
    i_size = best_size(b_tiles, m_row.to(tl.int32), NUM_KV_HEADS, NUM_PROGRAMS, SHARE_SIZES, UNIT, COSTS)
    b_even, b_splits = even_splits(b_tiles, i_size)
    m_own = o_row == i_row
    i_first_work = tl.sum(tl.where(o_row < i_row, b_splits, 0), 0)
    i_splits = tl.sum(tl.where(m_own, b_splits, 0), 0)
    i_even = tl.sum(tl.where(m_own, b_even, 0), 0)
    i_context = tl.sum(tl.where(m_own, b_context, 0), 0)
    i_first = tl.sum(tl.where(m_own, b_first, 0), 0)
    for i_split in range(0, i_splits, WIDTH):
        o_split = i_split + tl.arange(0, WIDTH)
        m_split = o_split < i_splits
        o_start = (i_first // TILE + o_split * i_even) * TILE
        p_work = work_ptr + (i_first_work + o_split) * WORK_FIELDS
        tl.store(p_work, i_row + tl.zeros_like(o_split), mask=m_split)
        tl.store(p_work + 1, tl.maximum(o_start, i_first), mask=m_split)
        tl.store(p_work + 2, tl.minimum(o_start + i_even * TILE, i_context), mask=m_split)
        tl.store(p_work + 3, i_first_work + tl.zeros_like(o_split), mask=m_split)
        tl.store(p_work + 4, i_splits + tl.zeros_like(o_split), mask=m_split)
    tl.store(num_work_ptr, i_first_work + i_splits, mask=i_row == num_rows - 1)
    if WITH_PREFIX:
        b_partials = tl.load(num_partials_ptr + o_row, mask=o_row < i_row, other=0)
        tl.store(first_partials_ptr + i_row, i_first_work + i_splits + tl.sum(b_partials, 0))


def fill_plan(plan: DecodePlan) -> None:
    """Split the rows' keys into work of nearly equal size. Queues one launch, without waiting."""
    num_rows = len(plan.rows.context_lens)
    padded_rows = padded(num_rows)
    plan_kernel[(num_rows,)](
        plan.rows.context_lens,
        plan.work,
        plan.num_work,
        *_prefix_arguments(plan),
        num_rows,
        plan.sliding_window if plan.sliding_window is not None else torch.iinfo(torch.int32).max,
        **plan_constants(
            tile=plan.config.tile,
            padded_rows=padded_rows,
            num_kv_heads=plan.shape.num_kv_heads,
            num_programs=plan.num_programs,
            with_prefix=plan.prefixes is not None,
        ),
        num_warps=plan_warps(padded_rows),
        enable_fp_fusion=True,
    )


def _prefix_arguments(plan: DecodePlan) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of the prefixes; without prefixes, placeholders that the kernel does not read."""
    if plan.prefixes is None:
        return plan.num_work, plan.num_work, plan.num_work
    return plan.prefixes.lens, plan.prefixes.num_partials, plan.prefixes.first_partials


def plan_constants(
    *, tile: int, padded_rows: int, num_kv_heads: int, num_programs: int, with_prefix: bool
) -> dict[str, object]:
    """The kernel's constexpr arguments."""
    return {
        "TILE": tile,
        "PADDED_ROWS": padded_rows,
        "NUM_KV_HEADS": num_kv_heads,
        "NUM_PROGRAMS": num_programs,
        "SHARE_SIZES": SHARES,
        "UNIT": SHARE_UNIT,
        "COSTS": tuple(COSTS),
        "WIDTH": WRITE_WIDTH,
        "WITH_PREFIX": with_prefix,
    }


def padded(num_rows: int) -> int:
    """A power of two that holds the rows; few values, since each compiles a kernel. A whole warp costs no more than a
    part of it.
    """
    power: int = triton.next_power_of_2(num_rows)
    return max(_WARP_SIZE, power)


def plan_warps(padded_rows: int) -> int:
    """Warps of the plan kernel; few, since most of it is sums over all rows."""
    return max(1, min(8, padded_rows // 256))
