"""Merges results of attention over parts of the keys: by log-sum-exp, on the device, within the kernel that made them.

Used by the last of a row's programs to finish. Knows no layout but that of the partial results.
"""

import triton
import triton.language as tl


@triton.jit
def merge_splits(
    p_out: tl.tensor,  # partial results of the first split, from the first row on: [any, HEAD_DIM] float32
    p_lse: tl.tensor,  # [any] float32, in units of log2
    stride_out: tl.tensor,  # from one split to the next
    stride_lse: tl.tensor,
    o_row: tl.tensor,  # [ROWS] to be merged
    m_row: tl.tensor,  # [ROWS], others are not read
    o_dim: tl.tensor,  # [PADDED_DIM]
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """sum(out_s * 2^lse_s) / sum(2^lse_s) over splits s, and log2 of that sum.

    Results of other programs are read past the first-level cache, which each multiprocessor has for itself. The maximum
    is found before, so that the loop with the results has nothing to exchange between threads.
    """
    ROWS: tl.constexpr = o_row.shape[0]
    b_max = tl.full((ROWS,), float("-inf"), tl.float32)
    for i_split in range(0, num_splits, SPLITS):
        b_lse = _lse_of_splits(p_lse, stride_lse, i_split, num_splits, o_row, m_row, SPLITS)
        b_max = tl.maximum(b_max, tl.max(b_lse, 0))
    b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.zeros((ROWS,), tl.float32)
    b_acc = tl.zeros((ROWS, o_dim.shape[0]), tl.float32)
    o_out = o_row[:, None] * HEAD_DIM + o_dim[None, :]
    m_out = m_row[:, None] & (o_dim < HEAD_DIM)[None, :]
    for i_split in range(0, num_splits, SPLITS):
        o_split = (i_split + tl.arange(0, SPLITS)).to(tl.int64)
        p_split = p_out + o_split[:, None, None] * stride_out + o_out[None, :, :]
        m_split = (o_split < num_splits)[:, None, None] & m_out[None, :, :]
        b_out = tl.load(p_split, mask=m_split, other=0.0, cache_modifier=".cg")
        b_lse = _lse_of_splits(p_lse, stride_lse, i_split, num_splits, o_row, m_row, SPLITS)
        b_weights = tl.exp2(b_lse - b_shift[None, :])
        b_sum += tl.sum(b_weights, 0)
        b_acc += tl.sum(b_weights[:, :, None] * b_out, 0)
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    return b_acc / b_sum[:, None], b_max + tl.log2(b_sum)


@triton.jit
def _lse_of_splits(
    p_lse: tl.tensor,
    stride_lse: tl.tensor,
    i_split: tl.tensor,  # the first of SPLITS
    num_splits: tl.tensor,
    o_row: tl.tensor,
    m_row: tl.tensor,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """Log-sum-exps [SPLITS, ROWS], -inf of splits and rows that are not there."""
    o_split = (i_split + tl.arange(0, SPLITS)).to(tl.int64)
    p_split = p_lse + o_split[:, None] * stride_lse + o_row[None, :]
    m_split = (o_split < num_splits)[:, None] & m_row[None, :]
    return tl.load(p_split, mask=m_split, other=float("-inf"), cache_modifier=".cg")
