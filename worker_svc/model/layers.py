"""The parts of a decoder layer, each a frozen bundle of weights. They know no checkpoint, family or batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_svc.model.config import Llama3Scaling, NormPlace, RopeConfig, YarnScaling


class Product(Protocol):
    """x W^T + b, for any form of the weight."""

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias, in bytes."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The product [T, out], written to `out` if that is given and this kind of product supports it."""


MakeProduct = Callable[[Tensor, Tensor | None], Product]


@dataclass(frozen=True, slots=True)
class LayersOnly:
    """Makes the products of layers; those outside of them, the head and projections of embeddings, stay `Linear`."""

    make_product: MakeProduct

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        """Make a product of a layer."""
        return self.make_product(weight, bias)


@dataclass(frozen=True, slots=True)
class Linear:
    """The product with the unpacked weight."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

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


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(up x)), or with a gate down(act(gate x) * up x), gate and up in one product."""

    up: Product  # [intermediate, hidden], or gate above up: [2 * intermediate, hidden]
    down: Product
    gated: bool


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """theta^(-2i / head_dim) for i below head_dim / 2, scaled, as [head_dim / 2] float32.

    Computed on the CPU, so that all devices have the same: their powers and quotients differ by ulps, which positions
    multiply.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents / rope.linear_factor
    if rope.llama3 is not None:
        frequencies = _scaled_llama3(frequencies, rope.llama3)
    elif rope.yarn is not None:
        frequencies = _scaled_yarn(frequencies, rope.yarn, rope.theta)
    return frequencies.to(device)


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
    slowed = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
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


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, then MLP, each added to its input and normalized where `norm_place` says."""

    attention: Attention
    mlp: Mlp
    attention_norm: Norm
    mlp_norm: Norm
    norm_place: NormPlace

    @property
    def products(self) -> tuple[Product, Product, Product, Product]:
        """Products, in the order in which they are computed."""
        return self.attention.qkv, self.attention.out, self.mlp.up, self.mlp.down

    def with_products(self, change: Callable[[Product], Product]) -> Self:
        """Apply `change` to each product; all else stays the same."""
        qkv, out, up, down = map(change, self.products)
        return replace(
            self, attention=replace(self.attention, qkv=qkv, out=out), mlp=replace(self.mlp, up=up, down=down)
        )
