"""The parts of a decoder layer, each a frozen bundle of weights that can be called.

They map rows of hidden states to rows of hidden states, and know no checkpoint, family or batch; attention over the
cache is passed in.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layers import layer_ops
from worker_svc.model.config import Llama3Scaling, NormPlace, RopeConfig, YarnScaling

Activation = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": F.silu,
    "swish": F.silu,
}

# The kernels' names of the same functions.
KERNEL_ACTIVATIONS: dict[str, layer_ops.Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class Product(Protocol):
    """x W^T + b, for any form of the weight."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The product [T, out], written to `out` if that is given and this kind of product supports it."""


MakeProduct = Callable[[Tensor, Tensor | None], Product]


@dataclass(frozen=True, slots=True)
class Linear:
    """The product with the unpacked weight."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer norm or root-mean-square norm over the last dimension, in float32 inside."""

    size: int
    eps: float
    rms: bool
    weight: Tensor | None  # [size]
    bias: Tensor | None  # [size]

    def __call__(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def of_heads(self, heads: Tensor) -> Tensor:
        """Norm of each head, or of all heads of a token as one vector, as the size says. heads: [T, heads, head_dim]"""
        return self(heads.reshape(len(heads), -1, self.size)).view(heads.shape)


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(up x)), or with a gate down(act(gate x) * up x), gate and up in one product."""

    up: Product  # [intermediate, hidden], or gate above up: [2 * intermediate, hidden]
    down: Product
    activation: Activation
    gated: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.gated:
            return self.down(self.activation(x))
        gate, up = x.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of each token's rotary angles, [T, 1, head_dim] each, computed once for all layers."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate dimension i against dimension i + head_dim / 2. x: [T, heads, head_dim]"""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


def rotation(positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> Rotation:
    """Angles in float32, since positions beyond 2^8 have no exact bfloat16. positions: [T]"""
    angles = positions.to(torch.float32).unsqueeze(1) * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """theta^(-2i / head_dim) for i below head_dim / 2, scaled, as [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / rope.theta**exponents / rope.linear_factor
    if rope.llama3 is not None:
        return _scaled_llama3(frequencies, rope.llama3)
    if rope.yarn is not None:
        return _scaled_yarn(frequencies, rope.yarn, rope.theta)
    return frequencies


def _scaled_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_positions * frequencies / (2 * torch.pi)  # over the trained context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _scaled_yarn(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Keep the frequencies of pairs before `first`, which turn often, and slow those behind `last`."""
    num_pairs = frequencies.numel()

    def pair_with(turns: float) -> float:
        """The index of the pair that makes this many turns over the original context."""
        return num_pairs * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first or 0.001
    slowed = ((torch.arange(num_pairs, dtype=torch.float32, device=frequencies.device) - first) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - slowed) + frequencies / scaling.factor * slowed


@dataclass(frozen=True, slots=True)
class Attention:
    """Query, key and value in one product, norms and rotation on heads, and the output product."""

    qkv: Product  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    out: Product  # [hidden, num_heads * head_dim]
    q_norm: Norm | None
    k_norm: Norm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(self, x: Tensor, rotate: Rotation | None, attend: Attend) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.of_heads(q), self.k_norm.of_heads(k)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        return self.out(attend(q, k, v).reshape(x.shape[0], -1))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, then MLP, each added to its input and normalized where `norm_place` says."""

    attention: Attention
    mlp: Mlp
    attention_norm: Norm
    mlp_norm: Norm
    norm_place: NormPlace

    def __call__(self, x: Tensor, rotate: Rotation | None, attend: Attend) -> Tensor:
        match self.norm_place:
            case NormPlace.BEFORE:
                x = x + self.attention(self.attention_norm(x), rotate, attend)
                return x + self.mlp(self.mlp_norm(x))
            case NormPlace.AFTER_SUM:
                x = self.attention_norm(x + self.attention(x, rotate, attend))
                return self.mlp_norm(x + self.mlp(x))
            case NormPlace.ON_OUTPUT:
                x = x + self.attention_norm(self.attention(x, rotate, attend))
                return x + self.mlp_norm(self.mlp(x))
