"""Gated activations: the activation of the gate and its product with the other half, in one launch.

The torch reference is `kernels.layers.layer_ops.gated_activation`. Knows rows, no layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layers.layer_ops import Activation

TILE = 1024
NUM_WARPS = 4
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _activate(b_x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Activation of float32. The tanh form of GELU is x sigmoid(2 z), since 1 + tanh(z) = 2 sigmoid(2 z)."""
    if ACTIVATION == "relu":
        return tl.maximum(b_x, 0.0)
    elif ACTIVATION == "silu":  # noqa: RET505
        return b_x * tl.sigmoid(b_x)
    elif ACTIVATION == "gelu":
        return 0.5 * b_x * (1.0 + tl.erf(b_x * _SQRT_HALF))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        return b_x * tl.sigmoid((b_x + 0.044715 * b_x * b_x * b_x) * _TWO_SQRT_2_OVER_PI)


@triton.jit
def gated_activation_kernel(
    x_ptr: tl.tensor,  # [T, 2 * SIZE], gate beside up
    out_ptr: tl.tensor,  # [T, SIZE]
    x_stride: tl.tensor,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One tile of one row: out = activation(gate) * up."""
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_x = o_x < SIZE
    p_gate = x_ptr + i_row * x_stride + o_x
    b_gate = tl.load(p_gate, mask=m_x, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + SIZE, mask=m_x, other=0.0).to(tl.float32)
    b_out = _activate(b_gate, ACTIVATION) * b_up
    tl.store(out_ptr + i_row * SIZE + o_x, b_out.to(out_ptr.dtype.element_ty), mask=m_x)


def gated_activation(x: Tensor, activation: Activation) -> Tensor:
    """Gate and product: activation(gate) * up, where x is gate beside up. Float32 inside, rounded once.

    x:      [T, 2 * size], any row stride
    returns [T, size], the dtype of x
    """
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1, "a row must be contiguous"
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        gated_activation_kernel[(num_rows, triton.cdiv(size, TILE))](
            x,
            out,
            x.stride(0),
            SIZE=size,
            ACTIVATION=activation,
            TILE=TILE,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return out
