"""Operations of a decoder layer other than matrix products and attention: the torch references, on any device.

Rotation of heads and their write into slots, norms with the residual addition, gated activations. They know rows and
heads, not models; the kernels with the same signatures are in `rotary_write`, `norms` and `activations`.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]
_E4M3_MAX = 448.0  # larger numbers are out of e4m3's range and would become NaN


class Rotary(NamedTuple):
    """Rotary angles of each token, the same for all layers."""

    cos: Tensor  # [T, rotary_dim / 2]
    sin: Tensor


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Rotary | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate queries in place, and put each token's rotated key and its value into its slot.

    Dimension i rotates with i + rotary_dim / 2. Those from rotary_dim on are unchanged, and without `rotary` all are.
    For a cache of e4m3, numbers are rounded to the nearest, at most 448. `key` itself is unchanged.

    query:                  [T, num_heads, head_dim], any token stride
    key, value:             [T, num_kv_heads, head_dim], any token stride
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], any block stride
    slot_mapping:           [T] int64, block_id * block_size + offset, no slot twice; negative where a token is
                            padding and is not written
    """
    if rotary is not None:
        query.copy_(_rotated(query, rotary))
        key = _rotated(key, rotary)
    block_size = key_cache.shape[1]
    is_token = slot_mapping >= 0
    slots = slot_mapping[is_token]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, offsets] = _stored(key[is_token], key_cache.dtype)
    value_cache[blocks, offsets] = _stored(value[is_token], value_cache.dtype)


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    half = rotary.cos.shape[1]
    cos, sin = rotary.cos.unsqueeze(1), rotary.sin.unsqueeze(1)
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """Root-mean-square norm: x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside.

    With `residual`, x is first added to it, in place, and the sum is normalised.

    x:        [T, size] or [T, heads, size], any strides but the last
    weight:   [size]
    residual: [T, size], contiguous
    returns   the shape and dtype of x, contiguous
    """
    x = x if residual is None else residual.add_(x)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """Layer norm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias; arguments like `rms_norm`."""
    x = x if residual is None else residual.add_(x)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def gated_activation(x: Tensor, activation: Activation) -> Tensor:
    """Gate and product: activation(gate) * up, where x is gate beside up.

    x:      [T, 2 * size], any row stride
    returns [T, size], the dtype of x
    """
    gate, up = x.chunk(2, dim=-1)
    return activate(gate, activation) * up


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Activation of every element."""
    match activation:
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
