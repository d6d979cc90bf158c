"""Finding the tokens that top-k and top-p keep, exactly as `sampling.truncation_thresholds` does, in two launches.

The threshold is searched among the bits of float32 numbers, with exact integer counts and masses, so nothing is sorted
and the order of addition does not matter: programs share a row. The first launch adds up each part of a row, which says
roughly how deep the threshold lies; in the second each program collects the depths of its part down to there, and the
last of a row's programs to finish searches them. Knows nothing of how a token is then drawn.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.choice_math import NO_ID, SMALLEST, depth, load_scaled, mass, row_maximum
from kernels.sampling.choice_reference import SampleRows
from kernels.sampling.fixed_point import part_of, powers_table

SELECT_TILE = 1024
SELECT_WARPS = 8
WAYS = 8  # parts into which each pass of a search splits the remaining range
MOST_PARTS = 64  # of a row
MAX_SELECTED = 128  # samples per launch, with V words of scratch each
_FEW, _PARTS_OF_MANY = 8, 8  # above so many samples, programs enough for any GPU with fewer parts of a row

_SEARCH_TILE = tl.constexpr(512)  # depths; with more, sums do not fit into Ampere's registers
_ONE = tl.constexpr(0x3FF0000000000000)  # bits of float64 1.0
# First limits of a search: 1.5, 2, 3, 4, 6, 8, 12 below the maximum, as the bits of these numbers.
_COARSE_FIRST = tl.constexpr(0x3FC00000)
_COARSE_STEP = tl.constexpr(0x00400000)


@triton.jit
def _sum_up_to(b_limits: tl.tensor, b_depth: tl.tensor, b_weight: tl.tensor) -> tl.tensor:
    """Weights [WAYS, TILE]: each is kept in the rows whose limit is at least its depth, and 0 in the others."""
    return tl.where(b_depth[None, :] <= b_limits[:, None], b_weight[None, :], 0)


@triton.jit
def _coarse_limits(floor: tl.tensor, WAYS: tl.constexpr) -> tl.tensor:
    """Depths [WAYS] up to which the first launch sums, the last of them the floor."""
    o_way = tl.arange(0, WAYS)
    return tl.where(o_way == WAYS - 1, floor, tl.minimum(o_way * _COARSE_STEP + _COARSE_FIRST, floor))


@triton.jit
def _search(
    p_depths: tl.tensor,
    num_depths: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    below: tl.tensor,  # sum of the weights of depths under `first`
    target: tl.tensor,
    b_table: tl.tensor,
    BY_MASS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Lowest depth in [first, last] up to which weights sum to `target` or more, and the sum before it.

    The result is `last` if no lower depth reaches `target`; `last` itself is not checked. A depth's weight is its mass,
    or 1. Each pass splits the range into WAYS parts and keeps one, or less where depths are sparse.
    """
    o_way = tl.arange(0, WAYS)
    while first < last:
        step = (last - first + WAYS - 1) // WAYS
        b_limits = tl.minimum(first + (o_way + 1) * step, last) - 1
        b_acc = tl.zeros((WAYS, TILE), tl.int64)
        b_low = tl.zeros((TILE,), tl.int32) + last
        b_high = tl.zeros((TILE,), tl.int32) + first
        for i_tile in range(0, num_depths, TILE):
            b_depth = _load_depths(p_depths, i_tile, num_depths, TILE)
            m_within = (b_depth >= first) & (b_depth < last)
            if tl.max(m_within.to(tl.int32), 0) > 0:
                b_weight = m_within.to(tl.int64)
                if BY_MASS:
                    b_weight = b_weight * mass(b_depth, b_table)
                b_acc += _sum_up_to(b_limits, b_depth, b_weight)
                b_low = tl.where(m_within, tl.minimum(b_low, b_depth), b_low)
                b_high = tl.where(m_within, tl.maximum(b_high, b_depth), b_high)
        b_sums = below + tl.sum(b_acc, 1)
        m_short = b_sums < target
        below = tl.max(tl.where(m_short, b_sums, below), 0)
        first = tl.maximum(tl.max(tl.where(m_short, b_limits + 1, first), 0), tl.min(b_low, 0))
        if first < last:  # then the answer is one of the depths in the range
            last = tl.minimum(tl.min(tl.where(m_short, last, b_limits), 0), tl.max(b_high, 0))
    return last, below


@triton.jit
def _load_depths(p_depths: tl.tensor, i_tile: tl.tensor, num_depths: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Depths from other programs, read past the first-level cache, which each multiprocessor has for itself."""
    o_depth = i_tile + tl.arange(0, TILE)
    return tl.load(p_depths + o_depth, mask=o_depth < num_depths, other=NO_ID, cache_modifier=".cg")


@triton.jit
def sum_kernel(
    logits_ptr: tl.tensor,  # [L, V]
    logit_rows_ptr: tl.tensor,  # [S] int32; unused without INDEXED
    selecting_ptr: tl.tensor,  # [N] int32
    part_max_ptr: tl.tensor,  # [S, MAXIMA] float32
    temperature_ptr: tl.tensor,  # [S] float32
    top_k_ptr: tl.tensor,  # [S] int32
    threshold_ptr: tl.tensor,  # [S] float32, the floor
    part_sums_ptr: tl.tensor,  # [N, parts, WAYS] int64
    progress_ptr: tl.tensor,  # [N, 2] int32, set to 0
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    part_size: tl.tensor,
    INDEXED: tl.constexpr,
    MAXIMA: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Counts of one part of one row up to the coarse limits if the sample has top-k, else masses."""
    i_selected, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_sample = tl.load(selecting_ptr + i_selected).to(tl.int64)
    i_row = i_sample
    if INDEXED:
        i_row = tl.load(logit_rows_ptr + i_sample).to(tl.int64)
    p_row = logits_ptr + i_row * stride_logits
    top = row_maximum(part_max_ptr, i_sample, MAXIMA)
    divisor = tl.maximum(tl.load(temperature_ptr + i_sample), SMALLEST)
    by_count = tl.load(top_k_ptr + i_sample) < vocab_size
    b_limits = _coarse_limits(depth(tl.load(threshold_ptr + i_sample)), WAYS)
    b_table = powers_table()
    b_acc = tl.zeros((WAYS, TILE), tl.int64)
    for i_tile in range(i_part * part_size, min((i_part + 1) * part_size, vocab_size), TILE):
        b_depth = depth(load_scaled(p_row, i_tile + tl.arange(0, TILE), vocab_size, top, divisor))
        b_weight = tl.full((TILE,), 1, tl.int64)
        if not by_count:
            b_weight = mass(b_depth, b_table)
        b_acc += _sum_up_to(b_limits, b_depth, b_weight)
    o_sum = (i_selected * tl.num_programs(1) + i_part) * WAYS + tl.arange(0, WAYS)
    tl.store(part_sums_ptr + o_sum, tl.sum(b_acc, 1))
    if i_part == 0:
        tl.store(progress_ptr + 2 * i_selected + tl.arange(0, 2), tl.zeros((2,), tl.int32))


@triton.jit
def select_kernel(
    logits_ptr: tl.tensor,  # [L, V]
    logit_rows_ptr: tl.tensor,  # [S] int32; unused without INDEXED
    selecting_ptr: tl.tensor,  # [N] int32
    part_max_ptr: tl.tensor,  # [S, MAXIMA] float32
    temperature_ptr: tl.tensor,  # [S] float32
    top_k_ptr: tl.tensor,  # [S] int32
    top_p_ptr: tl.tensor,  # [S] int64: bits of float64
    threshold_ptr: tl.tensor,  # float32 [S]: the floor on entry, on return the threshold of top-k and top-p too
    part_sums_ptr: tl.tensor,  # [N, parts, WAYS] int64
    progress_ptr: tl.tensor,  # [N, 2] int32: depths that are collected, programs that have finished
    depths_ptr: tl.tensor,  # [N, V] int32, scratch
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    part_size: tl.tensor,
    INDEXED: tl.constexpr,
    MAXIMA: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Threshold of one sample, by the last of the programs that share its row.

    Distributions of real models leave few depths to collect; the worst case is the whole row.
    """
    i_selected, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_sample = tl.load(selecting_ptr + i_selected).to(tl.int64)
    i_row = i_sample
    if INDEXED:
        i_row = tl.load(logit_rows_ptr + i_sample).to(tl.int64)
    p_row = logits_ptr + i_row * stride_logits
    p_depths = depths_ptr + i_selected * vocab_size
    p_progress = progress_ptr + 2 * i_selected
    top = row_maximum(part_max_ptr, i_sample, MAXIMA)
    divisor = tl.maximum(tl.load(temperature_ptr + i_sample), SMALLEST)
    top_k = tl.load(top_k_ptr + i_sample)
    top_p = tl.load(top_p_ptr + i_sample)
    floor = depth(tl.load(threshold_ptr + i_sample))
    by_count = top_k < vocab_size

    num_parts = tl.num_programs(1)
    o_part = tl.arange(0, MOST_PARTS)
    o_sum = (i_selected * num_parts + o_part[:, None]) * WAYS + tl.arange(0, WAYS)[None, :]
    b_sums = tl.sum(tl.load(part_sums_ptr + o_sum, mask=(o_part < num_parts)[:, None], other=0), 0)
    b_limits = _coarse_limits(floor, WAYS)
    total = tl.max(b_sums, 0)
    target = top_k.to(tl.int64)
    if not by_count:
        target = part_of(total, top_p)
    m_short = b_sums < target
    first = tl.max(tl.where(m_short, b_limits + 1, 0), 0)
    last = tl.min(tl.where(m_short, floor, b_limits), 0)
    below = tl.max(tl.where(m_short, b_sums, 0), 0)

    for i_tile in range(i_part * part_size, min((i_part + 1) * part_size, vocab_size), TILE):
        b_depth = depth(load_scaled(p_row, i_tile + tl.arange(0, TILE), vocab_size, top, divisor))
        b_keep = (b_depth <= last).to(tl.int32)
        num_kept = tl.sum(b_keep, 0)
        if num_kept > 0:
            o_kept = tl.atomic_add(p_progress, num_kept) + tl.cumsum(b_keep, 0) - b_keep
            tl.store(p_depths + o_kept, b_depth, mask=b_keep > 0)
    tl.debug_barrier()  # all threads have stored before one of them increments
    if tl.atomic_add(p_progress + 1, 1, sem="acq_rel") == num_parts - 1:
        num_depths = tl.load(p_progress, cache_modifier=".cg")
        b_table = powers_table()
        if by_count:
            is_cut = total > target
            num_at_edge = tl.zeros((), tl.int64)
            if is_cut:
                last, below = _search(
                    p_depths, num_depths, first, last, below, target, b_table, False, WAYS, _SEARCH_TILE
                )
                num_at_edge = target - below  # equal logits at the edge count only up to k
            if top_p < _ONE:
                b_sum = tl.zeros((_SEARCH_TILE,), tl.int64)
                for i_tile in range(0, num_depths, _SEARCH_TILE):
                    b_depth = _load_depths(p_depths, i_tile, num_depths, _SEARCH_TILE)
                    m_kept = (b_depth < last) | ((b_depth == last) & (not is_cut))
                    b_sum += tl.where(m_kept, mass(b_depth, b_table), 0)
                edge = tl.max(mass(tl.zeros((WAYS,), tl.int32) + last, b_table), 0)
                target = part_of(tl.sum(b_sum, 0) + num_at_edge * edge, top_p)
                first, below = first * 0, below * 0
        if top_p < _ONE:
            last, below = _search(p_depths, num_depths, first, last, below, target, b_table, True, WAYS, _SEARCH_TILE)
        tl.store(threshold_ptr + i_sample, -last.to(tl.float32, bitcast=True))


def survival_thresholds(logits: Tensor, rows: SampleRows, part_max: Tensor, *, indexed: bool) -> Tensor:
    """Thresholds float32 [S]: the floors, raised for samples with top-k or top-p."""
    num_selecting, vocab_size = len(rows.selecting), logits.shape[1]
    if num_selecting == 0:
        return rows.floors
    thresholds, top_p = rows.floors.clone(), rows.top_p.view(torch.int64)
    parts, part_size = selection_parts(num_selecting, vocab_size)
    most = min(num_selecting, MAX_SELECTED)
    depths, progress = (
        torch.empty((most, width), dtype=torch.int32, device=logits.device) for width in (vocab_size, 2)
    )
    part_sums = torch.empty((most, parts, WAYS), dtype=torch.int64, device=logits.device)
    for selecting in torch.split(rows.selecting, MAX_SELECTED):
        grid = (len(selecting), parts)
        row_of = (logits, rows.logit_rows, selecting, part_max, rows.temperatures, rows.top_k)
        sizes = (logits.stride(0), vocab_size, part_size)
        constants = {"INDEXED": indexed, "MAXIMA": part_max.shape[1], "WAYS": WAYS, "TILE": SELECT_TILE}
        options = {"num_warps": SELECT_WARPS, "enable_fp_fusion": True}
        sum_kernel[grid](*row_of, thresholds, part_sums, progress, *sizes, **constants, **options)
        select_kernel[grid](
            *row_of,
            top_p,
            thresholds,
            part_sums,
            progress,
            depths,
            *sizes,
            MOST_PARTS=MOST_PARTS,
            **constants,
            **options,
        )
    return thresholds


def selection_parts(num_selecting: int, vocab_size: int) -> tuple[int, int]:
    """Number of parts of a row, none of them empty, and the size of a part, in whole tiles."""
    num_tiles = triton.cdiv(vocab_size, SELECT_TILE)
    wanted = MOST_PARTS if num_selecting <= _FEW else _PARTS_OF_MANY
    tiles_of_part = triton.cdiv(num_tiles, wanted)
    return triton.cdiv(num_tiles, tiles_of_part), tiles_of_part * SELECT_TILE
