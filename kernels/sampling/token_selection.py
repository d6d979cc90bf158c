"""Finding the tokens that top-k and top-p keep, exactly as `sampling.truncation_thresholds` does, in one launch.

The kernel searches the threshold among the bits of float32 numbers, with exact integer counts and masses, so nothing
is sorted and the order of addition does not matter. Knows nothing of how a token is then drawn.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.choice_math import NO_ID, SMALLEST, depth, load_scaled, mass, row_maximum
from kernels.sampling.choice_reference import SampleRows

SELECT_TILE = 1024
SELECT_WARPS = 8
WAYS = 8  # parts into which each pass of a search splits the remaining range
MAX_SELECTED = 128  # samples per launch, one program each, with V words of scratch

# First limits of a search: 1.5, 2, 3, 4, 6, 8, 12 below the maximum, as the bits of these numbers.
_COARSE_FIRST = tl.constexpr(0x3FC00000)
_COARSE_STEP = tl.constexpr(0x00400000)


@triton.jit
def _sum_up_to(b_limits: tl.tensor, b_depth: tl.tensor, b_weight: tl.tensor) -> tl.tensor:
    """Weights [WAYS, TILE]: each is kept in the rows whose limit is at least its depth, and 0 in the others."""
    return tl.where(b_depth[None, :] <= b_limits[:, None], b_weight[None, :], 0)


@triton.jit
def _search(
    p_depths: tl.tensor,
    num_depths: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    below: tl.tensor,  # sum of the weights of depths under `first`
    target: tl.tensor,
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
            o_depth = i_tile + tl.arange(0, TILE)
            b_depth = tl.load(p_depths + o_depth, mask=o_depth < num_depths, other=NO_ID)
            m_within = (b_depth >= first) & (b_depth < last)
            if tl.max(m_within.to(tl.int32), 0) > 0:
                b_weight = m_within.to(tl.int64)
                if BY_MASS:
                    b_weight = b_weight * mass(b_depth)
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
def select_kernel(
    logits_ptr: tl.tensor,  # [L, V]
    logit_rows_ptr: tl.tensor,  # [S] int32; unused without INDEXED
    selecting_ptr: tl.tensor,  # [N] int32
    part_max_ptr: tl.tensor,  # [S, PARTS] float32
    temperature_ptr: tl.tensor,  # [S] float32
    top_k_ptr: tl.tensor,  # [S] int32
    top_p_ptr: tl.tensor,  # [S] float64
    threshold_ptr: tl.tensor,  # float32 [S]: the floor on entry, on return the threshold of top-k and top-p too
    depths_ptr: tl.tensor,  # [N, V] int32, scratch
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    INDEXED: tl.constexpr,
    PARTS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Threshold of one sample: the first pass estimates it, the second collects the depths above, then search these.

    Distributions of real models leave few depths to collect; the worst case is the whole row.
    """
    i_selected = tl.program_id(0).to(tl.int64)
    i_sample = tl.load(selecting_ptr + i_selected).to(tl.int64)
    i_row = i_sample
    if INDEXED:
        i_row = tl.load(logit_rows_ptr + i_sample).to(tl.int64)
    p_row = logits_ptr + i_row * stride_logits
    p_depths = depths_ptr + i_selected * vocab_size
    top = row_maximum(part_max_ptr, i_sample, PARTS)
    divisor = tl.maximum(tl.load(temperature_ptr + i_sample), SMALLEST)
    top_k = tl.load(top_k_ptr + i_sample)
    top_p = tl.load(top_p_ptr + i_sample)
    floor = depth(tl.load(threshold_ptr + i_sample))
    by_count = top_k < vocab_size

    o_way = tl.arange(0, WAYS)
    b_limits = tl.where(o_way == WAYS - 1, floor, tl.minimum(_COARSE_FIRST + o_way * _COARSE_STEP, floor))
    b_acc = tl.zeros((WAYS, TILE), tl.int64)
    for i_tile in range(0, vocab_size, TILE):
        o_token = i_tile + tl.arange(0, TILE)
        b_depth = depth(load_scaled(p_row, o_token, vocab_size, top, divisor))
        b_weight = tl.full((TILE,), 1, tl.int64)
        if not by_count:
            b_weight = mass(b_depth)
        b_acc += _sum_up_to(b_limits, b_depth, b_weight)
    b_sums = tl.sum(b_acc, 1)
    total = tl.max(b_sums, 0)
    target = top_k.to(tl.int64)
    if not by_count:
        target = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    m_short = b_sums < target
    first = tl.max(tl.where(m_short, b_limits + 1, 0), 0)
    last = tl.min(tl.where(m_short, floor, b_limits), 0)
    below = tl.max(tl.where(m_short, b_sums, 0), 0)

    num_depths = 0
    for i_tile in range(0, vocab_size, TILE):
        o_token = i_tile + tl.arange(0, TILE)
        b_depth = depth(load_scaled(p_row, o_token, vocab_size, top, divisor))
        b_keep = (b_depth <= last).to(tl.int32)
        num_kept = tl.sum(b_keep, 0)
        if num_kept > 0:
            o_kept = num_depths + tl.cumsum(b_keep, 0) - b_keep
            tl.store(p_depths + o_kept, b_depth, mask=b_keep > 0)
            num_depths += num_kept
    tl.debug_barrier()  # all threads have stored before any of them loads

    if by_count:
        is_cut = total > target
        num_at_edge = tl.zeros((), tl.int64)
        if is_cut:
            last, below = _search(p_depths, num_depths, first, last, below, target, False, WAYS, TILE)
            num_at_edge = target - below  # equal logits at the edge count only up to k
        if top_p < 1.0:
            b_sum = tl.zeros((TILE,), tl.int64)
            for i_tile in range(0, num_depths, TILE):
                o_depth = i_tile + tl.arange(0, TILE)
                b_depth = tl.load(p_depths + o_depth, mask=o_depth < num_depths, other=NO_ID)
                b_sum += tl.where((b_depth < last) | ((b_depth == last) & (not is_cut)), mass(b_depth), 0)
            edge = tl.max(mass(tl.zeros((WAYS,), tl.int32) + last), 0)
            kept_mass = tl.sum(b_sum, 0) + num_at_edge * edge
            target = tl.ceil(kept_mass.to(tl.float64) * top_p).to(tl.int64)
            last, below = _search(p_depths, num_depths, last * 0, last, below * 0, target, True, WAYS, TILE)
    else:
        last, below = _search(p_depths, num_depths, first, last, below, target, True, WAYS, TILE)
    tl.store(threshold_ptr + i_sample, -last.to(tl.float32, bitcast=True))


def survival_thresholds(logits: Tensor, rows: SampleRows, part_max: Tensor, *, indexed: bool) -> Tensor:
    """Thresholds float32 [S]: the floors, raised for samples with top-k or top-p."""
    num_selecting, vocab_size = len(rows.selecting), logits.shape[1]
    if num_selecting == 0:
        return rows.floors
    thresholds = rows.floors.clone()
    depths = torch.empty((min(num_selecting, MAX_SELECTED), vocab_size), dtype=torch.int32, device=logits.device)
    for selecting in torch.split(rows.selecting, MAX_SELECTED):
        select_kernel[(len(selecting),)](
            logits,
            rows.logit_rows,
            selecting,
            part_max,
            rows.temperatures,
            rows.top_k,
            rows.top_p,
            thresholds,
            depths,
            logits.stride(0),
            vocab_size,
            INDEXED=indexed,
            PARTS=part_max.shape[1],
            WAYS=WAYS,
            TILE=SELECT_TILE,
            num_warps=SELECT_WARPS,
            enable_fp_fusion=True,
        )
    return thresholds
