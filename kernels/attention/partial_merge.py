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

    Results of other programs are read past the first-level cache, which each multiprocessor has for itself.
    """
    ROWS: tl.constexpr = o_row.shape[0]
    b_max = tl.full((ROWS,), float("-inf"), tl.float32)
    b_sum = tl.zeros((ROWS,), tl.float32)
    b_acc = tl.zeros((ROWS, o_dim.shape[0]), tl.float32)
    o_out = o_row[:, None] * HEAD_DIM + o_dim[None, :]
    m_out = m_row[:, None] & (o_dim < HEAD_DIM)[None, :]
    for i_split in range(0, num_splits, SPLITS):
        o_split = (i_split + tl.arange(0, SPLITS)).to(tl.int64)
        m_split = o_split < num_splits
        p_split = p_lse + o_split[:, None] * stride_lse + o_row[None, :]
        m_lse = m_split[:, None] & m_row[None, :]
        b_lse = tl.load(p_split, mask=m_lse, other=float("-inf"), cache_modifier=".cg")
        p_split = p_out + o_split[:, None, None] * stride_out + o_out[None, :, :]
        m_out_split = m_split[:, None, None] & m_out[None, :, :]
        b_out = tl.load(p_split, mask=m_out_split, other=0.0, cache_modifier=".cg")
        b_new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weights = tl.exp2(b_lse - b_shift[None, :])
        b_shrink = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_shrink + tl.sum(b_weights, 0)
        b_acc = b_acc * b_shrink[:, None] + tl.sum(b_weights[:, :, None] * b_out, 0)
        b_max = b_new_max
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    return b_acc / b_sum[:, None], b_max + tl.log2(b_sum)
