"""Root-mean-square norm and layer norm of rows, with the residual addition before it, in one launch.

A row is read once and kept in registers, in float32. The torch references are in `layer_ops`. Knows rows and strides,
no layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS_PER_WARP = 512  # two 16-byte loads of half precision for each thread
_MAX_WARPS = 16


@triton.jit
def norm_kernel(
    x_ptr: tl.tensor,  # [num_outer, num_inner, SIZE]
    residual_ptr: tl.tensor,  # [num_outer * num_inner, SIZE], read and written if HAS_RESIDUAL
    weight_ptr: tl.tensor,  # [SIZE], read if HAS_WEIGHT
    bias_ptr: tl.tensor,  # [SIZE], read if HAS_BIAS
    out_ptr: tl.tensor,  # [num_outer * num_inner, SIZE]
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    num_inner: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,  # SIZE as a power of two
    RMS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """One row: residual += x; out = (residual - mean) / sqrt(mean((residual - mean)^2) + eps) * weight + bias.

    With RMS the subtracted mean is 0. The sum is rounded to the residual's dtype before it is normalised.
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, TILE)
    m_x = o_x < SIZE
    p_x = x_ptr + i_row // num_inner * outer_stride + i_row % num_inner * inner_stride + o_x
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        p_residual = residual_ptr + i_row * SIZE + o_x
        b_sum = b_x + tl.load(p_residual, mask=m_x, other=0.0).to(tl.float32)
        b_kept = b_sum.to(residual_ptr.dtype.element_ty)
        tl.store(p_residual, b_kept, mask=m_x)
        b_x = b_kept.to(tl.float32)
    if not RMS:
        b_x = tl.where(m_x, b_x - tl.sum(b_x) / SIZE, 0.0)
    b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x) / SIZE + eps)
    if HAS_WEIGHT:
        b_x *= tl.load(weight_ptr + o_x, mask=m_x, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b_x += tl.load(bias_ptr + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(out_ptr + i_row * SIZE + o_x, b_x.to(out_ptr.dtype.element_ty), mask=m_x)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """Root-mean-square norm: x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside.

    With `residual`, x is first added to it, in place, and the sum is normalised.

    x:        [T, size] or [T, heads, size], any strides but the last
    weight:   [size]
    residual: [T, size], contiguous
    returns   the shape and dtype of x, contiguous
    """
    return _norm(x, weight, None, eps, residual, rms=True)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """Layer norm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias; arguments like `rms_norm`."""
    return _norm(x, weight, bias, eps, residual, rms=False)


def num_warps(size: int) -> int:
    """Number of warps for one row."""
    tile: int = triton.next_power_of_2(size)
    return min(_MAX_WARPS, max(1, tile // _ELEMENTS_PER_WARP))


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, *, rms: bool
) -> Tensor:
    rows = x if x.dim() == 3 else x.unsqueeze(1)
    num_outer, num_inner, size = rows.shape
    assert x.stride(-1) == 1, "a row must be contiguous"
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    norm_kernel[(num_outer * num_inner,)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        rows.stride(0),
        rows.stride(1),
        num_inner,
        eps,
        SIZE=size,
        TILE=triton.next_power_of_2(size),
        RMS=rms,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        num_warps=num_warps(size),
        enable_fp_fusion=True,
    )
    return out
