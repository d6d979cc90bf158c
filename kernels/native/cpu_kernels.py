"""Kernels of a CPU runner besides matrix products: one interface, two implementations.

`TorchKernels` are the references and need no compiler; `NativeKernels` are compiled at first use. Results agree up to
rounding. Tensors are on the CPU, in float32 or bfloat16; sums are in float32. No call allocates memory that grows with
the model; a call reads and writes only the tensors that it is given. Knows rows, heads and blocks, no models.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention.paged_attention import RaggedRows
from kernels.layers.layer_ops import Activation
from kernels.sampling.sampling_operations import SamplingOperations

PLAIN_LAYOUT = "plain"  # of a block: keys, then values, each [block_size, num_kv_heads, head_dim]


def stored_row(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a token's key, or value, of one head in a pool of this dtype; int8 includes the scale."""
    return head_dim + (torch.float32.itemsize if dtype == torch.int8 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Shape of attention, given by model and pool."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # of queries and results
    int8: bool = False  # keys and values are int8, with a float32 scale for each token and head; else they have `dtype`

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, "each key-value head serves as many heads as any other"

    @property
    def group(self) -> int:
        """Number of query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the pool."""
        return torch.int8 if self.int8 else self.dtype

    @property
    def side_numel(self) -> int:
        """Elements of the keys, or of the values, of one block in one layer, with scales."""
        return self.block_size * self.num_kv_heads * stored_row(self.head_dim, self.stored_dtype)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the pool. Only the kernels know the layout inside a block.

    So a pool belongs to the kernels that write it; any caller may copy and swap whole blocks.
    """

    keys: Tensor  # [num_blocks, side_numel], a block contiguous, any block stride
    values: Tensor
    shape: CacheShape


def layer_caches(pool: Tensor, shape: CacheShape) -> tuple[LayerCache, ...]:
    """Each layer's part of a pool. Make them once: kernels are fastest with the same objects.

    pool: [num_blocks, num_layers, 2, ...] with side_numel elements in the rest, contiguous
    """
    sides = pool.view(pool.shape[0], pool.shape[1], 2, shape.side_numel)
    assert pool.dtype == shape.stored_dtype, "not the pool of this shape"
    return tuple(LayerCache(sides[:, layer, 0], sides[:, layer, 1], shape) for layer in range(pool.shape[1]))


class CpuPlan:
    """Division of work that all layers with the same sliding window share in one iteration."""

    __slots__ = ()


class HeadNorms(NamedTuple):
    """RMS norms of each query head and each key head before rotation."""

    query: Tensor  # [head_dim], the dtype of the heads
    key: Tensor
    eps: float


class NormRule(NamedTuple):
    """RMS norm, or layer norm, with its weight and bias."""

    weight: Tensor | None  # [size], the dtype of the rows
    bias: Tensor | None
    eps: float
    rms: bool
    then_add: bool = False  # normalize x alone, then add the residual


class GreedyTokens(NamedTuple):
    """Greedy token of each row, in memory that the kernels write."""

    token_ids: Tensor  # [L] int64, contiguous: the lowest id on a tie; 0 if the row is not finite
    is_finite: Tensor  # [L] bool, contiguous: every logit of the row is finite


class CpuKernels(Protocol):
    """One implementation. Rows may have any stride; elements of a row are contiguous."""

    @property
    def name(self) -> str:
        """Name for logs: "torch", or "native" with the instruction set."""

    @property
    def block_layout(self) -> str:
        """Name of the order of keys and values in a block: the same name, shape and dtype mean the same bytes."""

    @property
    def sampling(self) -> SamplingOperations:
        """Operations that turn logits into tokens, candidates and log-probabilities."""

    def plan(
        self, rows: RaggedRows, cache: LayerCache, sliding_window: int | None, *, is_second: bool = False
    ) -> CpuPlan:
        """Divide the work over threads. The plan is valid while `rows` exists, and until the next plan for this window.

        With `is_second`, until the next second one: a window can have two plans, for other queries of the same tokens.

        A query at position p sees keys p - sliding_window + 1 to p. Entries of block tables beyond a row's context,
        and slots beyond it, are never read. Rows without queries are skipped.

        rows:  int32 tensors, block tables with contiguous rows
        cache: of any layer; only its shape and strides are read
        """

    def attend(self, query: Tensor, cache: LayerCache, plan: CpuPlan, scale: float, out: Tensor) -> None:
        """softmax(scale * Q K^T + mask) V for each row, with K and V read in place; prefill and decode together.

        query: [T, num_heads * head_dim]; may be the first columns of the fused product
        out:   [T, num_heads * head_dim]; not query's memory; tokens of no row are not written
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
        """Norm and rotate query heads in place; norm and rotate keys and write them and the values to their slots.

        Dimension i rotates with i + rotary_dim / 2; those from rotary_dim on do not rotate, and none without `rotary`.
        The columns of keys in `qkv` are undefined afterwards.

        qkv:          [T, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys, values
        rotary:       [max_positions, rotary_dim] float32, contiguous: cosines, then sines, of each position
        positions:    [T] int64
        slot_mapping: [T] int64, block_id * block_size + offset, no slot twice; a negative one is not written
        """

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: NormRule, out: Tensor) -> None:
        """Residual addition and norm: residual += x, rounded to its dtype; out = norm(residual). Without: norm(x).

        With `then_add`, out = residual + norm(x), and the residual does not change.

        x, residual, out: [T, size]; out may be x
        """

    def gated_activation(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        """Gate and product: out = activation(gate) * up.

        gate_up: [T, 2 * size], gate beside up
        out:     [T, size]
        """

    def activation(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        """Activation of every element. x, out: [T, size]; out may be x."""

    def gather_rows(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """out[i] = x[rows[i]]. x: [T, size]; rows: [L] int64; out: [L, size], not x's memory."""

    def embed(self, table: Tensor, token_ids: Tensor, out: Tensor, first_id: int = 0) -> None:
        """out[i] = table[token_ids[i] - first_id], or zeros for a row that the table does not have.

        table: [num_ids, size]; token_ids: [T] int64; out: [T, size]
        """

    def copy_rows(self, x: Tensor, out: Tensor) -> None:
        """Copy rows: out = x. x, out: [T, size], not the same memory."""

    def greedy(self, logits: Tensor, out: GreedyTokens) -> None:
        """Argmax of each row, and whether the row is finite, in one pass. logits: [L, vocab_size]."""
