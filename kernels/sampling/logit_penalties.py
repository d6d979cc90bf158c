"""Penalties of tokens that a sequence contains already, exactly as in `penalty_reference`, in two launches.

The first counts occurrences in a scratch of one word per token. In the second, the one program that takes a token's
count penalises the token. Cost grows with the length of histories; only clearing the scratch grows with the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.penalty_reference import PenaltyRows

TILE = 512
NUM_WARPS = 4
_OCCURS = tl.constexpr(1 << 30)  # flag beside the count of occurrences in the output


@triton.jit
def _load_history(  # tokens of one tile of one history, and the mask of those inside it
    seat_ptr: tl.tensor,
    length_ptr: tl.tensor,
    token_table_ptr: tl.tensor,
    stride_table: tl.tensor,
    i_penalised: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    o_place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_place = o_place < tl.load(length_ptr + i_penalised)
    p_history = token_table_ptr + tl.load(seat_ptr + i_penalised).to(tl.int64) * stride_table
    return tl.load(p_history + o_place, mask=m_place, other=0), o_place, m_place


@triton.jit(do_not_specialize=["stride_table"])
def count_kernel(
    seat_ptr: tl.tensor,  # [E] int32
    length_ptr: tl.tensor,  # [E] int32
    num_prompt_ptr: tl.tensor,  # [E] int32
    token_table_ptr: tl.tensor,  # [num_seats, width] int32
    counts_ptr: tl.tensor,  # [E, V] int32, zeros on entry
    stride_table: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """counts[e, token] = occurrences in the output, plus a flag if the token occurs in prompt or output."""
    i_penalised = tl.program_id(0).to(tl.int64)
    b_token, o_place, m_place = _load_history(seat_ptr, length_ptr, token_table_ptr, stride_table, i_penalised, TILE)
    p_count = counts_ptr + i_penalised * vocab_size + b_token
    m_output = m_place & (o_place >= tl.load(num_prompt_ptr + i_penalised))
    tl.atomic_or(p_count, tl.full((TILE,), _OCCURS, tl.int32), mask=m_place, sem="relaxed")
    tl.atomic_add(p_count, tl.full((TILE,), 1, tl.int32), mask=m_output, sem="relaxed")


@triton.jit(do_not_specialize=["stride_table"])
def penalise_kernel(
    logits_ptr: tl.tensor,  # [S, V] float32
    logit_row_ptr: tl.tensor,  # [E] int32
    seat_ptr: tl.tensor,  # [E] int32
    length_ptr: tl.tensor,  # [E] int32
    penalty_ptr: tl.tensor,  # [E, 3] float32
    token_table_ptr: tl.tensor,  # [num_seats, width] int32
    counts_ptr: tl.tensor,  # [E, V] int32, zeros again on return
    stride_logits: tl.tensor,
    stride_table: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Penalise each token of one tile of one history, unless another occurrence of it already has been."""
    i_penalised = tl.program_id(0).to(tl.int64)
    b_token, _, m_place = _load_history(seat_ptr, length_ptr, token_table_ptr, stride_table, i_penalised, TILE)
    p_count = counts_ptr + i_penalised * vocab_size + b_token
    b_count = tl.atomic_xchg(p_count, tl.zeros((TILE,), tl.int32), mask=m_place, sem="relaxed")
    m_own = m_place & (b_count != 0)
    b_count = (b_count & (_OCCURS - 1)).to(tl.float32)
    repetition = tl.load(penalty_ptr + i_penalised * 3)
    presence = tl.load(penalty_ptr + i_penalised * 3 + 1)
    frequency = tl.load(penalty_ptr + i_penalised * 3 + 2)
    p_logit = logits_ptr + tl.load(logit_row_ptr + i_penalised).to(tl.int64) * stride_logits + b_token
    b_x = tl.load(p_logit, mask=m_own, other=0.0)
    b_x = tl.where(b_x < 0.0, b_x * repetition, tl.div_rn(b_x, tl.zeros_like(b_x) + repetition))
    b_x = b_x - frequency * b_count
    b_x = b_x - tl.where(b_count > 0.0, presence, 0.0)
    tl.store(p_logit, b_x, mask=m_own)


def penalise(logits: Tensor, rows: PenaltyRows, token_table: Tensor) -> None:
    """Penalise in place the tokens of each row's history, as `penalty_reference.penalise` does.

    Products are rounded before they are subtracted, so results are bitwise those of the reference. Never waits.

    logits:      float32 [S, V], V contiguous
    token_table: int32 [num_seats, width], width contiguous; a seat's history is its first `length` tokens
    """
    num_penalised, vocab_size = len(rows), logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert token_table.dtype == torch.int32 and token_table.stride(1) == 1 and rows.max_length <= token_table.shape[1]
    if num_penalised == 0 or rows.max_length == 0:
        return
    counts = torch.zeros((num_penalised, vocab_size), dtype=torch.int32, device=logits.device)
    grid = (num_penalised, triton.cdiv(rows.max_length, TILE))
    count_kernel[grid](
        rows.seats,
        rows.lengths,
        rows.num_prompt,
        token_table,
        counts,
        token_table.stride(0),
        vocab_size,
        TILE=TILE,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    penalise_kernel[grid](
        logits,
        rows.logit_rows,
        rows.seats,
        rows.lengths,
        rows.penalties,
        token_table,
        counts,
        logits.stride(0),
        token_table.stride(0),
        vocab_size,
        TILE=TILE,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
