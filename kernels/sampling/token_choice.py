"""Choosing a token for each sample of a step, exactly as `choice_reference` does, in two to four launches.

Rows are split between programs wherever that cannot change the answer: a maximum, or a sum of integers, is the same in
any order. Top-k and top-p find their threshold by searching the bits of float32 numbers, so nothing is sorted.
It waits for nothing, and shapes depend only on what the host knows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.choice_reference import ChosenTokens, SampleRows

TILE = 2048
NUM_WARPS = 4
SELECT_TILE = 1024
SELECT_WARPS = 8
WAYS = 8  # into which a search splits what is left, at each pass
NUM_PARTS = ((8, 64), (64, 8), (math.inf, 2))  # of rows, for at most so many samples: enough programs for any GPU
MAX_SELECTED = 128  # samples whose threshold is sought at once, each by one program, with V words of scratch

# What a row contains, as flags.
_HAS_MINUS_INF = tl.constexpr(1)
_HAS_PLUS_INF_OR_NAN = tl.constexpr(2)
_INF_BITS = tl.constexpr(0x7F800000)
_NO_ID = tl.constexpr(0x7FFFFFFF)
_SMALLEST = tl.constexpr(1.1754943508222875e-38)  # normal float32: the least temperature
# The token that is most likely has at least the least noise, -3.14, so no score below this one wins.
_LOW_SCORE = tl.constexpr(-4.0)
_SLACK = tl.constexpr(1e-3)  # far more than float32 rounding, and the approximate logarithm, are off by
_FIXED_POINT = tl.constexpr(2.0**40)  # one, where probabilities are integers
_ROUNDER = tl.constexpr(2.0**52)  # adding it rounds to the nearest integer, halves to even
_NOISE_STEP = tl.constexpr(2.0**-32)
_LN_2_32 = tl.constexpr(32 * math.log(2.0))
# Where a search begins to look: 1.5, 2, 3, 4, 6, 8, 12 below the maximum, as the bits of these numbers.
_COARSE_FIRST = tl.constexpr(0x3FC00000)
_COARSE_STEP = tl.constexpr(0x00400000)


@triton.jit
def _load_scaled(
    p_row: tl.tensor, o_token: tl.tensor, vocab_size: tl.tensor, top: tl.tensor, divisor: tl.tensor
) -> tl.tensor:
    """(logit - maximum) / temperature, rounded as IEEE says; -inf past the vocabulary."""
    b_x = tl.load(p_row + o_token, mask=o_token < vocab_size, other=float("-inf")).to(tl.float32)
    b_x = b_x - top
    return tl.div_rn(b_x, tl.zeros_like(b_x) + divisor)


@triton.jit
def _depth(b_scaled: tl.tensor) -> tl.tensor:
    """Bits of how far a scaled logit is below 0: integers in the order of falling values, -0 and 0 the same."""
    return b_scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass(b_depth: tl.tensor) -> tl.tensor:
    """exp(scaled logit) as a fixed-point integer; 0 for what is too far below, or not a number."""
    b_scaled = -b_depth.to(tl.float32, bitcast=True)
    b_mass = tl.exp(b_scaled.to(tl.float64)) * _FIXED_POINT
    b_mass = (b_mass + _ROUNDER) - _ROUNDER
    return tl.where(b_depth < _INF_BITS, b_mass, 0.0).to(tl.int64)


@triton.jit
def _row_maximum(part_max_ptr: tl.tensor, i_sample: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """0 where it is not finite: such a sample is not valid, and its numbers need only do no harm."""
    top = tl.max(tl.load(part_max_ptr + i_sample * PARTS + tl.arange(0, PARTS)), 0)
    return tl.where(tl.abs(top) < float("inf"), top, 0.0)


@triton.jit
def _mix(b_x: tl.tensor) -> tl.tensor:
    """The bijection of 32 bits of `noise`, on uint32."""
    b_x = b_x ^ (b_x >> 16)
    b_x = b_x * 0x21F0AAAD
    b_x = b_x ^ (b_x >> 15)
    b_x = b_x * 0x735A2D97
    return b_x ^ (b_x >> 15)


@triton.jit
def _noise_bits(key: tl.tensor, o_token: tl.tensor) -> tl.tensor:
    """`noise.noise_bits`, as int32 [tokens]."""
    b_key = tl.zeros_like(o_token).to(tl.int64) + key
    b_bits = o_token.to(tl.uint32) * 0x9E3779B1 + b_key.to(tl.uint32)
    b_bits = _mix(b_bits) + (b_key >> 32).to(tl.uint32)
    return _mix(b_bits).to(tl.int32, bitcast=True)


@triton.jit
def _gumbel(b_bits: tl.tensor) -> tl.tensor:
    """`noise.gumbel`, float64."""
    b_uniform = ((b_bits.to(tl.int64) + 0x80000000).to(tl.float64) + 0.5) * _NOISE_STEP
    return -tl.log(-tl.log(b_uniform))


@triton.jit
def _gumbel_bound(b_bits: tl.tensor) -> tl.tensor:
    """No less than `_gumbel` (but for float32's rounding), at a tenth of the cost: -ln(1 - u) >= -ln(-ln(u))."""
    b_rest = (0x7FFFFFFF - b_bits).to(tl.uint32, bitcast=True)  # (1 - u) * 2^32 - 0.5
    return _LN_2_32 - tl.log(b_rest.to(tl.float32) + 0.5)


@triton.jit
def row_maxima_kernel(
    logits_ptr: tl.tensor,  # [L, V]
    logit_rows_ptr: tl.tensor,  # [S] int32; unused without INDEXED, where row i is sample i's
    part_max_ptr: tl.tensor,  # [S, PARTS] float32
    part_id_ptr: tl.tensor,  # [S, PARTS] int32
    part_flags_ptr: tl.tensor,  # [S, PARTS] int32
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    part_size: tl.tensor,
    INDEXED: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One part of one row: its maximum and where that first is, and what in it is not finite."""
    i_sample, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = i_sample
    if INDEXED:
        i_row = tl.load(logit_rows_ptr + i_sample).to(tl.int64)
    p_row = logits_ptr + i_row * stride_logits
    b_best = tl.full((TILE,), float("-inf"), tl.float32)
    b_id = tl.full((TILE,), _NO_ID, tl.int32)
    b_flags = tl.zeros((TILE,), tl.int32)
    for i_tile in range(i_part * part_size, min((i_part + 1) * part_size, vocab_size), TILE):
        o_token = i_tile + tl.arange(0, TILE)
        m_token = o_token < vocab_size
        b_x = tl.load(p_row + o_token, mask=m_token, other=float("-inf")).to(tl.float32)
        b_bits = b_x.to(tl.int32, bitcast=True)
        m_odd = m_token & ((b_bits & 0x7FFFFFFF) >= _INF_BITS)
        b_flags |= tl.where(m_odd, tl.where(b_x == float("-inf"), _HAS_MINUS_INF, _HAS_PLUS_INF_OR_NAN), 0)
        m_better = b_x > b_best
        b_best = tl.where(m_better, b_x, b_best)
        b_id = tl.where(m_better, o_token, b_id)
    best = tl.max(b_best, 0)
    o_part = i_sample * PARTS + i_part
    tl.store(part_max_ptr + o_part, best)
    tl.store(part_id_ptr + o_part, tl.min(tl.where(b_best == best, b_id, _NO_ID), 0))
    minus = tl.max(b_flags & _HAS_MINUS_INF, 0)
    tl.store(part_flags_ptr + o_part, minus | tl.max(b_flags & _HAS_PLUS_INF_OR_NAN, 0))


@triton.jit
def _sum_up_to(b_limits: tl.tensor, b_depth: tl.tensor, b_weight: tl.tensor) -> tl.tensor:
    """[WAYS, TILE]: each weight in the rows whose limit its depth does not pass."""
    return tl.where(b_depth[None, :] <= b_limits[:, None], b_weight[None, :], 0)


@triton.jit
def _search(
    p_depths: tl.tensor,
    num_depths: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    below: tl.tensor,  # what the weights of depths under `first` sum up to
    target: tl.tensor,
    BY_MASS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The least depth in [first, last] up to which weights sum up to `target` or more, and the sum before it.

    It is `last` if none before is; `last` itself is not looked at. A depth's weight is its mass, or 1. Each pass leaves
    one of the ways that the range is split into, or less where depths are sparse.
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
            b_depth = tl.load(p_depths + o_depth, mask=o_depth < num_depths, other=_NO_ID)
            m_within = (b_depth >= first) & (b_depth < last)
            if tl.max(m_within.to(tl.int32), 0) > 0:
                b_weight = m_within.to(tl.int64)
                if BY_MASS:
                    b_weight = b_weight * _mass(b_depth)
                b_acc += _sum_up_to(b_limits, b_depth, b_weight)
                b_low = tl.where(m_within, tl.minimum(b_low, b_depth), b_low)
                b_high = tl.where(m_within, tl.maximum(b_high, b_depth), b_high)
        b_sums = below + tl.sum(b_acc, 1)
        m_short = b_sums < target
        below = tl.max(tl.where(m_short, b_sums, below), 0)
        first = tl.maximum(tl.max(tl.where(m_short, b_limits + 1, first), 0), tl.min(b_low, 0))
        if first < last:  # then the answer is one of the depths looked at
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
    threshold_ptr: tl.tensor,  # [S] float32: the floor on entry, what survives top-k and top-p too on return
    depths_ptr: tl.tensor,  # [N, V] int32, scratch
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    INDEXED: tl.constexpr,
    PARTS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The threshold of one sample: a pass finds roughly where it is, a second keeps what lies above; a search there.

    What is kept is few for distributions as models have them, and in the worst case the whole row.
    """
    i_selected = tl.program_id(0).to(tl.int64)
    i_sample = tl.load(selecting_ptr + i_selected).to(tl.int64)
    i_row = i_sample
    if INDEXED:
        i_row = tl.load(logit_rows_ptr + i_sample).to(tl.int64)
    p_row = logits_ptr + i_row * stride_logits
    p_depths = depths_ptr + i_selected * vocab_size
    top = _row_maximum(part_max_ptr, i_sample, PARTS)
    divisor = tl.maximum(tl.load(temperature_ptr + i_sample), _SMALLEST)
    top_k = tl.load(top_k_ptr + i_sample)
    top_p = tl.load(top_p_ptr + i_sample)
    floor = _depth(tl.load(threshold_ptr + i_sample))
    by_count = top_k < vocab_size

    o_way = tl.arange(0, WAYS)
    b_limits = tl.where(o_way == WAYS - 1, floor, tl.minimum(_COARSE_FIRST + o_way * _COARSE_STEP, floor))
    b_acc = tl.zeros((WAYS, TILE), tl.int64)
    for i_tile in range(0, vocab_size, TILE):
        o_token = i_tile + tl.arange(0, TILE)
        b_depth = _depth(_load_scaled(p_row, o_token, vocab_size, top, divisor))
        b_weight = tl.full((TILE,), 1, tl.int64)
        if not by_count:
            b_weight = _mass(b_depth)
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
        b_depth = _depth(_load_scaled(p_row, o_token, vocab_size, top, divisor))
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
            num_at_edge = target - below  # of equals at the edge, as many count as fill up to k
        if top_p < 1.0:
            b_sum = tl.zeros((TILE,), tl.int64)
            for i_tile in range(0, num_depths, TILE):
                o_depth = i_tile + tl.arange(0, TILE)
                b_depth = tl.load(p_depths + o_depth, mask=o_depth < num_depths, other=_NO_ID)
                b_sum += tl.where((b_depth < last) | ((b_depth == last) & (not is_cut)), _mass(b_depth), 0)
            edge = tl.max(_mass(tl.zeros((WAYS,), tl.int32) + last), 0)
            kept_mass = tl.sum(b_sum, 0) + num_at_edge * edge
            target = tl.ceil(kept_mass.to(tl.float64) * top_p).to(tl.int64)
            last, below = _search(p_depths, num_depths, last * 0, last, below * 0, target, True, WAYS, TILE)
    else:
        last, below = _search(p_depths, num_depths, first, last, below, target, True, WAYS, TILE)
    tl.store(threshold_ptr + i_sample, -last.to(tl.float32, bitcast=True))


@triton.jit
def draw_kernel(
    logits_ptr: tl.tensor,  # [L, V]
    logit_rows_ptr: tl.tensor,  # [S] int32; unused without INDEXED
    part_max_ptr: tl.tensor,  # [S, PARTS] float32
    temperature_ptr: tl.tensor,  # [S] float32
    threshold_ptr: tl.tensor,  # [S] float32
    key_ptr: tl.tensor,  # [S] int64
    part_score_ptr: tl.tensor,  # [S, PARTS] float64
    part_id_ptr: tl.tensor,  # [S, PARTS] int32, overwritten unless the sample is greedy
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    part_size: tl.tensor,
    INDEXED: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One part of one row: the survivor whose scaled logit and noise sum up to most.

    Noise costs two float64 logarithms; a tile pays for them only if a bound of its scores reaches the best so far.
    """
    i_sample, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + i_sample)
    if temperature == 0.0:
        return
    i_row = i_sample
    if INDEXED:
        i_row = tl.load(logit_rows_ptr + i_sample).to(tl.int64)
    p_row = logits_ptr + i_row * stride_logits
    top = _row_maximum(part_max_ptr, i_sample, PARTS)
    divisor = tl.maximum(temperature, _SMALLEST)
    threshold = tl.load(threshold_ptr + i_sample)
    key = tl.load(key_ptr + i_sample)
    best = tl.full((), _LOW_SCORE, tl.float64)
    best_id = tl.full((), _NO_ID, tl.int32)
    for i_tile in range(i_part * part_size, min((i_part + 1) * part_size, vocab_size), TILE):
        o_token = i_tile + tl.arange(0, TILE)
        b_scaled = _load_scaled(p_row, o_token, vocab_size, top, divisor)
        m_survives = b_scaled >= threshold
        b_bits = _noise_bits(key, o_token)
        b_bound = tl.where(m_survives, b_scaled + _gumbel_bound(b_bits), float("-inf"))
        if tl.max(b_bound, 0) + _SLACK >= best:
            b_scores = tl.where(m_survives, _gumbel(b_bits) + b_scaled.to(tl.float64), float("-inf"))
            score = tl.max(b_scores, 0)
            if score > best:
                best = score
                best_id = tl.min(tl.where(b_scores == score, o_token, _NO_ID), 0)
    o_part = i_sample * PARTS + i_part
    tl.store(part_score_ptr + o_part, best)
    tl.store(part_id_ptr + o_part, best_id)


@triton.jit
def finish_kernel(
    temperature_ptr: tl.tensor,  # [S] float32
    part_max_ptr: tl.tensor,  # [S, PARTS] float32
    part_flags_ptr: tl.tensor,  # [S, PARTS] int32
    raw_flags_ptr: tl.tensor,  # [S, PARTS] int32, of raw logits; those of part_flags without EDITED
    part_score_ptr: tl.tensor,  # [S, PARTS] float64; unused without DRAWN
    part_id_ptr: tl.tensor,  # [S, PARTS] int32
    token_ids_ptr: tl.tensor,  # [S] int32
    valid_ptr: tl.tensor,  # [S] bool
    EDITED: tl.constexpr,
    DRAWN: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The best of a sample's parts, the lowest id among equals; 0 for a sample that is not valid."""
    i_sample = tl.program_id(0).to(tl.int64)
    o_part = i_sample * PARTS + tl.arange(0, PARTS)
    b_max = tl.load(part_max_ptr + o_part)
    b_best = b_max.to(tl.float64)
    if DRAWN:
        is_drawn = tl.load(temperature_ptr + i_sample) != 0.0
        b_best = tl.where(is_drawn, tl.load(part_score_ptr + o_part), b_best)
    b_id = tl.where(b_best == tl.max(b_best, 0), tl.load(part_id_ptr + o_part), _NO_ID)
    b_bad = tl.load(raw_flags_ptr + o_part)
    if EDITED:
        b_bad |= tl.load(part_flags_ptr + o_part) & _HAS_PLUS_INF_OR_NAN
    valid = (tl.max(b_bad, 0) == 0) & (tl.max(b_max, 0) > float("-inf"))
    tl.store(token_ids_ptr + i_sample, tl.where(valid, tl.min(b_id, 0), 0))
    tl.store(valid_ptr + i_sample, valid)


def choose_tokens(logits: Tensor, rows: SampleRows, edited: Tensor | None = None) -> ChosenTokens:
    """The argmax of greedy samples, a draw for the others; the lowest id among equals.

    Token by token what the reference gives, but for the last place of float64 exp and log, which libraries round
    differently: a sum of probabilities can be off by 2^-40 for each of its tokens, and a score by about 1e-15.

    logits: [L, V], raw, any floating dtype, V contiguous; they alone say whether a row is finite
    edited: float32 [S, V], from which sample i chooses instead of its row of `logits`
    """
    num_samples, vocab_size = len(rows), logits.shape[1]
    device = logits.device
    assert logits.stride(1) == 1 and vocab_size < 2**30
    assert edited is None or (edited.shape == (num_samples, vocab_size) and edited.stride(1) == 1)
    token_ids = torch.empty(num_samples, dtype=torch.int32, device=device)
    valid = torch.empty(num_samples, dtype=torch.bool, device=device)
    if num_samples == 0:
        return ChosenTokens(token_ids, valid)
    parts, part_size = split(num_samples, vocab_size)
    part_max, part_id, raw_flags = _row_maxima(logits, rows.logit_rows, num_samples)
    part_flags = raw_flags
    if edited is not None:
        part_max, part_id, part_flags = _row_maxima(edited, None, num_samples)
    part_score = part_max  # not looked at unless something is drawn
    if not rows.all_greedy:
        source = logits if edited is None else edited
        thresholds = _thresholds(source, rows, part_max, indexed=edited is None)
        part_score = torch.empty((num_samples, parts), dtype=torch.float64, device=device)
        draw_kernel[(num_samples, parts)](
            source,
            rows.logit_rows,
            part_max,
            rows.temperatures,
            thresholds,
            rows.keys,
            part_score,
            part_id,
            source.stride(0),
            vocab_size,
            part_size,
            INDEXED=edited is None,
            PARTS=parts,
            TILE=TILE,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    finish_kernel[(num_samples,)](
        rows.temperatures,
        part_max,
        part_flags,
        raw_flags,
        part_score,
        part_id,
        token_ids,
        valid,
        EDITED=edited is not None,
        DRAWN=not rows.all_greedy,
        PARTS=parts,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return ChosenTokens(token_ids, valid)


def split(num_samples: int, vocab_size: int) -> tuple[int, int]:
    """Into how many parts a row is split, a power of two, and the size of a part, in whole tiles.

    The last parts may be empty. There are few numbers of parts, since each is a kernel to compile.
    """
    num_tiles = triton.cdiv(vocab_size, TILE)
    wanted = next(parts for most, parts in NUM_PARTS if num_samples <= most)
    parts = min(wanted, triton.next_power_of_2(num_tiles))
    return parts, triton.cdiv(num_tiles, parts) * TILE


def _row_maxima(logits: Tensor, logit_rows: Tensor | None, num_samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """By sample and part: maximum, its token, flags."""
    parts, part_size = split(num_samples, logits.shape[1])
    part_max = torch.empty((num_samples, parts), dtype=torch.float32, device=logits.device)
    part_id, part_flags = (torch.empty_like(part_max, dtype=torch.int32) for _ in range(2))
    row_maxima_kernel[(num_samples, parts)](
        logits,
        part_id if logit_rows is None else logit_rows,
        part_max,
        part_id,
        part_flags,
        logits.stride(0),
        logits.shape[1],
        part_size,
        INDEXED=logit_rows is not None,
        PARTS=parts,
        TILE=TILE,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return part_max, part_id, part_flags


def _thresholds(logits: Tensor, rows: SampleRows, part_max: Tensor, *, indexed: bool) -> Tensor:
    """float32 [S]: the floors, and for samples with top-k or top-p what survives those, too."""
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
