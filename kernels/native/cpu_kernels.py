"""Kernels of a CPU runner besides matrix products: one interface, two ways to compute.

`TorchKernels` are the references and need nothing; `NativeKernels` are compiled at first use. Results agree to
rounding. Tensors are on the CPU, in float32 or bfloat16; sums are in float32. They know rows, heads and blocks, no
models. No call allocates what grows with the model; a call reads and writes only the tensors that it is given.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention.paged_attention import RaggedRows
from kernels.layers.layer_ops import Activation
from kernels.sampling.sampling_operations import SamplingOperations


def stored_row(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a token's key, or value, of one head takes in a pool of this dtype: int8 has a scale beside it."""
    return head_dim + (torch.float32.itemsize if dtype == torch.int8 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Shape of attention, which model and pool fix."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # of queries and results
    int8: bool = False  # keys and values as stored: int8, with a float32 scale for each token and head; else as queries

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, "each key-value head serves as many heads as any other"

    @property
    def group(self) -> int:
        """Heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the pool."""
        return torch.int8 if self.int8 else self.dtype

    @property
    def side_numel(self) -> int:
        """Elements of the keys, or of the values, of one block in one layer, scales among them."""
        return self.block_size * self.num_kv_heads * stored_row(self.head_dim, self.stored_dtype)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the pool. How a block lies inside is known to the kernels alone.

    So a pool belongs to the kernels that write it; whole blocks may be copied and swapped by anybody.
    """

    keys: Tensor  # [num_blocks, side_numel], a block contiguous, any block stride
    values: Tensor
    shape: CacheShape


def layer_caches(pool: Tensor, shape: CacheShape) -> tuple[LayerCache, ...]:
    """Each layer's part of a pool. Make them once: kernels are quickest with the same objects.

    pool: [num_blocks, num_layers, 2, ...] with side_numel elements in the rest, contiguous
    """
    sides = pool.view(pool.shape[0], pool.shape[1], 2, shape.side_numel)
    assert pool.dtype == shape.stored_dtype, "not the pool of this shape"
    return tuple(LayerCache(sides[:, layer, 0], sides[:, layer, 1], shape) for layer in range(pool.shape[1]))


class CpuPlan:
    """Division of work that all layers with the same sliding window share in one iteration."""

    __slots__ = ()


class HeadNorms(NamedTuple):
    """Root-mean-square norms of each query head and each key head before rotation."""

    query: Tensor  # [head_dim], the dtype of the heads
    key: Tensor
    eps: float


class NormRule(NamedTuple):
    """Root-mean-square norm, or layer norm, with what it scales and shifts by."""

    weight: Tensor | None  # [size], the dtype of the rows
    bias: Tensor | None
    eps: float
    rms: bool
    then_add: bool = False  # normalize x alone, then add the residual


class GreedyTokens(NamedTuple):
    """The choice of each row, where the kernels are to put it."""

    token_ids: Tensor  # [L] int64, contiguous: the first of the greatest; 0 where the row is not finite
    is_finite: Tensor  # [L] bool, contiguous: whether every logit of the row is finite


class CpuKernels(Protocol):
    """One way to compute. Rows may have any stride, elements of a row are contiguous."""

    @property
    def name(self) -> str:
        """For logs: "torch", or "native" and for which instructions."""

    @property
    def sampling(self) -> SamplingOperations:
        """From logits to tokens, candidates and log-probabilities."""

    def plan(self, rows: RaggedRows, cache: LayerCache, sliding_window: int | None) -> CpuPlan:
        """Divides the work over threads. Valid until the next plan for this window is made, and while `rows` live.

        A query at position p sees keys p - sliding_window + 1 to p. Entries of block tables beyond a row's context,
        and slots beyond it, are never read. Rows may have no query; then they are left out.

        rows:  int32 tensors, block tables with contiguous rows
        cache: stands for every layer's, only its shape and strides are read
        """

    def attend(self, query: Tensor, cache: LayerCache, plan: CpuPlan, scale: float, out: Tensor) -> None:
        """softmax(scale * Q K^T + mask) V for each row, K and V read in their blocks; prefill and decode together.

        query: [T, num_heads * head_dim]; may be the first columns of the fused product
        out:   [T, num_heads * head_dim]; not query's memory; tokens of no row are left as they are
        """

    def rotate_and_write(
        self,
        qkv: Tensor,
        rotary: Tensor | None,
        positions: Tensor,
        slot_mapping: Tensor,
        cache: LayerCache,
        norms: HeadNorms | None = None,
    ) -> None:
        """Norms of heads, then rotation, of queries in place; each token's key, so treated, and value to its slot.

        Dimension i turns against i + rotary_dim / 2; those from rotary_dim on stay as they are, and all without
        `rotary`. What is left in the columns of keys is not defined.

        qkv:          [T, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys, values
        rotary:       [max_positions, rotary_dim] float32, contiguous: cosines, then sines, of each position
        positions:    [T] int64
        slot_mapping: [T] int64, block_id * block_size + offset, no slot twice; negative is not written
        """

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: NormRule, out: Tensor) -> None:
        """Residual addition and norm: residual += x, rounded to its dtype; out = norm(residual). Without one: norm(x).

        With `then_add`, out = residual + norm(x), and the residual stays as it is.

        x, residual, out: [T, size]; out may be x
        """

    def gated_activation(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        """Gate and product: out = activation(gate) * up.

        gate_up: [T, 2 * size], gate beside up
        out:     [T, size]
        """

    def activation(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        """The activation of every element. x, out: [T, size]; out may be x."""

    def gather_rows(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """out[i] = x[rows[i]]. x: [T, size]; rows: [L] int64; out: [L, size], not x's memory."""

    def embed(self, table: Tensor, token_ids: Tensor, out: Tensor) -> None:
        """out[i] = table[token_ids[i]]. table: [vocab_size, size]; token_ids: [T] int64; out: [T, size]."""

    def greedy(self, logits: Tensor, out: GreedyTokens) -> None:
        """The greatest logit of each row, and whether all are finite, in one pass. logits: [L, vocab_size]."""
