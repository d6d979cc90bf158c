"""Choosing a token for each sample of a step, exactly as `choice_reference` does, in two to five launches.

Rows are split between programs where that cannot change the result: a maximum, or a sum of integers, is the same in
any order. `token_selection` finds the tokens that top-k and top-p keep. Never waits for the device: shapes depend only
on values that the host knows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.choice_math import (
    INF_BITS,
    NO_ID,
    SMALLEST,
    gumbel,
    gumbel_bound,
    load_scaled,
    noise_bits,
    row_maximum,
    score,
)
from kernels.sampling.choice_reference import ChosenTokens, SampleRows
from kernels.sampling.fixed_point import powers_table
from kernels.sampling.token_selection import survival_thresholds

TILE = 2048
NUM_WARPS = 4
NUM_PARTS = ((8, 64), (64, 8), (math.inf, 2))  # (samples at most, parts of a row): enough programs for any GPU

# Flags of a row's contents.
_HAS_MINUS_INF = tl.constexpr(1)
_HAS_PLUS_INF_OR_NAN = tl.constexpr(2)
# The most likely token has a scaled logit of 0 and noise of at least -3.14, so no score below this one wins.
_LOW_SCORE = tl.constexpr(-4 * (1 << 56))
_SLACK = tl.constexpr(1e-3)  # far above twice the error of float32 rounding and of the approximate logarithms
_TO_FLOAT = tl.constexpr(2.0**-56)


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
    """Maximum of one part of one row, the first token that has it, and flags of values that are not finite."""
    i_sample, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = i_sample
    if INDEXED:
        i_row = tl.load(logit_rows_ptr + i_sample).to(tl.int64)
    p_row = logits_ptr + i_row * stride_logits
    b_best = tl.full((TILE,), float("-inf"), tl.float32)
    b_id = tl.full((TILE,), NO_ID, tl.int32)
    b_flags = tl.zeros((TILE,), tl.int32)
    for i_tile in range(i_part * part_size, min((i_part + 1) * part_size, vocab_size), TILE):
        o_token = i_tile + tl.arange(0, TILE)
        m_token = o_token < vocab_size
        b_x = tl.load(p_row + o_token, mask=m_token, other=float("-inf")).to(tl.float32)
        b_bits = b_x.to(tl.int32, bitcast=True)
        m_odd = m_token & ((b_bits & 0x7FFFFFFF) >= INF_BITS)
        b_flags |= tl.where(m_odd, tl.where(b_x == float("-inf"), _HAS_MINUS_INF, _HAS_PLUS_INF_OR_NAN), 0)
        m_better = b_x > b_best
        b_best = tl.where(m_better, b_x, b_best)
        b_id = tl.where(m_better, o_token, b_id)
    best = tl.max(b_best, 0)
    o_part = i_sample * PARTS + i_part
    tl.store(part_max_ptr + o_part, best)
    tl.store(part_id_ptr + o_part, tl.min(tl.where(b_best == best, b_id, NO_ID), 0))
    minus = tl.max(b_flags & _HAS_MINUS_INF, 0)
    tl.store(part_flags_ptr + o_part, minus | tl.max(b_flags & _HAS_PLUS_INF_OR_NAN, 0))


@triton.jit
def draw_kernel(
    logits_ptr: tl.tensor,  # [L, V]
    logit_rows_ptr: tl.tensor,  # [S] int32; unused without INDEXED
    part_max_ptr: tl.tensor,  # [S, PARTS] float32
    temperature_ptr: tl.tensor,  # [S] float32
    threshold_ptr: tl.tensor,  # [S] float32
    key_ptr: tl.tensor,  # [S] int64
    part_score_ptr: tl.tensor,  # [S, PARTS] int64, fixed point
    part_id_ptr: tl.tensor,  # [S, PARTS] int32, overwritten unless the sample is greedy
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    part_size: tl.tensor,
    INDEXED: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Kept token with the largest sum of scaled logit and noise, in one part of one row.

    A tile computes noise only if a bound of its scores reaches the best so far; in float32, which leaves one token or a
    few whose exact scores decide.
    """
    i_sample, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + i_sample)
    if temperature == 0.0:
        return
    i_row = i_sample
    if INDEXED:
        i_row = tl.load(logit_rows_ptr + i_sample).to(tl.int64)
    p_row = logits_ptr + i_row * stride_logits
    top = row_maximum(part_max_ptr, i_sample, PARTS)
    divisor = tl.maximum(temperature, SMALLEST)
    threshold = tl.load(threshold_ptr + i_sample)
    key = tl.load(key_ptr + i_sample)
    b_table = powers_table()
    best = tl.full((), _LOW_SCORE, tl.int64)
    best_id = tl.full((), NO_ID, tl.int32)
    for i_tile in range(i_part * part_size, min((i_part + 1) * part_size, vocab_size), TILE):
        o_token = i_tile + tl.arange(0, TILE)
        b_scaled = load_scaled(p_row, o_token, vocab_size, top, divisor)
        m_survives = (b_scaled >= threshold) & (b_scaled <= 0.0)  # of a row that is not finite, those that are
        b_bits = noise_bits(key, o_token)
        b_bound = tl.where(m_survives, b_scaled + gumbel_bound(b_bits), float("-inf"))
        least = best.to(tl.float32) * _TO_FLOAT - _SLACK
        if tl.max(b_bound, 0) >= least:
            b_score = tl.where(m_survives, b_scaled + gumbel(b_bits), float("-inf"))
            highest = tl.max(b_score, 0)
            while highest >= least:
                token = tl.min(tl.where(b_score == highest, o_token, NO_ID), 0)
                m_token = o_token == token
                exact = score(
                    tl.sum(tl.where(m_token, b_bits, 0), 0),
                    tl.max(tl.where(m_token, b_scaled, float("-inf")), 0),
                    b_table,
                )
                is_better = (exact > best) | ((exact == best) & (token < best_id))
                best = tl.where(is_better, exact, best)
                best_id = tl.where(is_better, token, best_id)
                least = best.to(tl.float32) * _TO_FLOAT - _SLACK
                b_score = tl.where(m_token, float("-inf"), b_score)
                highest = tl.max(b_score, 0)
    o_part = i_sample * PARTS + i_part
    tl.store(part_score_ptr + o_part, best)
    tl.store(part_id_ptr + o_part, best_id)


@triton.jit
def finish_kernel(
    temperature_ptr: tl.tensor,  # [S] float32
    part_max_ptr: tl.tensor,  # [S, PARTS] float32
    part_flags_ptr: tl.tensor,  # [S, PARTS] int32
    raw_flags_ptr: tl.tensor,  # [S, PARTS] int32, of raw logits; equals part_flags without EDITED
    part_score_ptr: tl.tensor,  # [S, PARTS] int64, fixed point; unused without DRAWN
    part_id_ptr: tl.tensor,  # [S, PARTS] int32
    token_ids_ptr: tl.tensor,  # [S] int32
    valid_ptr: tl.tensor,  # [S] bool
    EDITED: tl.constexpr,
    DRAWN: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The best of a sample's parts, the lowest id on a tie; 0 for an invalid sample."""
    i_sample = tl.program_id(0).to(tl.int64)
    o_part = i_sample * PARTS + tl.arange(0, PARTS)
    b_max = tl.load(part_max_ptr + o_part)
    m_best = b_max == tl.max(b_max, 0)
    if DRAWN:
        is_drawn = tl.load(temperature_ptr + i_sample) != 0.0
        b_score = tl.load(part_score_ptr + o_part)
        m_best = tl.where(is_drawn, b_score == tl.max(b_score, 0), m_best)
    b_id = tl.where(m_best, tl.load(part_id_ptr + o_part), NO_ID)
    b_bad = tl.load(raw_flags_ptr + o_part)
    if EDITED:
        b_bad |= tl.load(part_flags_ptr + o_part) & _HAS_PLUS_INF_OR_NAN
    valid = (tl.max(b_bad, 0) == 0) & (tl.max(b_max, 0) > float("-inf"))
    tl.store(token_ids_ptr + i_sample, tl.where(valid, tl.min(b_id, 0), 0))
    tl.store(valid_ptr + i_sample, valid)


def choose_tokens(logits: Tensor, rows: SampleRows, edited: Tensor | None = None) -> ChosenTokens:
    """Choose the argmax for greedy samples and draw the others; the lowest id wins a tie.

    Tokens equal those of the reference, except for the last places of its float64 exp and log and of the fixed-point
    numbers here (`fixed_point`): a sum of probabilities can be off by 2^-40 for a few of its tokens, and a score by
    2^-47. So a token differs where the sum comes that close to its limit, or two tokens' scores to one another: once in
    some 10^13 draws.

    logits: [L, V], raw, any floating dtype, V contiguous; they alone decide whether a row is finite
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
    part_score = part_max  # not read unless a sample is drawn
    if not rows.all_greedy:
        source = logits if edited is None else edited
        thresholds = survival_thresholds(source, rows, part_max, indexed=edited is None)
        part_score = torch.empty((num_samples, parts), dtype=torch.int64, device=device)
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
    """Number of parts of a row, a power of two, and the size of a part, in whole tiles.

    The last parts may be empty. Few numbers of parts are used, since each compiles its own kernel.
    """
    num_tiles = triton.cdiv(vocab_size, TILE)
    wanted = next(parts for most, parts in NUM_PARTS if num_samples <= most)
    parts = min(wanted, triton.next_power_of_2(num_tiles))
    return parts, triton.cdiv(num_tiles, parts) * TILE


def _row_maxima(logits: Tensor, logit_rows: Tensor | None, num_samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, its token, and flags, by sample and part."""
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
