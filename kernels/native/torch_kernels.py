"""The CPU's kernels in plain torch: the references, used in production where there is no compiler.

A block has the layout `[block_size, num_kv_heads, head_dim]`. Knows rows, heads and blocks, no models.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.paged_attention import AttentionPlan, RaggedRows, paged_attention, plan_attention
from kernels.layers import layer_ops
from kernels.layers.layer_ops import Activation, Rotary
from kernels.native.cpu_kernels import PLAIN_LAYOUT, CacheShape, CpuPlan, GreedyTokens, HeadNorms, LayerCache, NormRule
from kernels.sampling.sampling_operations import REFERENCES


@dataclass(frozen=True, slots=True)
class TorchPlan(CpuPlan):
    """Plan of the reference that gathers keys and values."""

    attention: AttentionPlan


class TorchKernels:
    """Torch operations behind the interface `CpuKernels`."""

    name = "torch"
    block_layout = PLAIN_LAYOUT
    sampling = REFERENCES

    def plan(
        self, rows: RaggedRows, cache: LayerCache, sliding_window: int | None, *, is_second: bool = False
    ) -> TorchPlan:
        """See CpuKernels.plan."""
        return TorchPlan(plan_attention(rows, _in_slots(cache.keys, cache.shape), sliding_window))

    def attend(self, query: Tensor, cache: LayerCache, plan: CpuPlan, scale: float, out: Tensor) -> None:
        """See CpuKernels.attend."""
        assert isinstance(plan, TorchPlan), "not a plan of these kernels"
        shape = cache.shape
        heads = query.unflatten(1, (shape.num_heads, shape.head_dim))
        keys, values = _in_slots(cache.keys, shape), _in_slots(cache.values, shape)
        attended = paged_attention(heads, keys, values, plan.attention, scale).flatten(1)
        for tokens in _tokens(plan.attention):
            out[tokens] = attended[tokens]

    def rotate_and_write(
        self,
        qkv: Tensor,
        rotary: Tensor | None,
        positions: Tensor,
        slot_mapping: Tensor,
        cache: LayerCache,
        norms: HeadNorms | None = None,
    ) -> None:
        """See CpuKernels.rotate_and_write."""
        shape = cache.shape
        heads = qkv.unflatten(1, (-1, shape.head_dim))
        query, key, value = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if norms is not None:
            query.copy_(F.rms_norm(query, (shape.head_dim,), norms.query, norms.eps))
            key = F.rms_norm(key, (shape.head_dim,), norms.key, norms.eps)
        angles = None if rotary is None else Rotary(*rotary[positions].chunk(2, dim=1))
        keys, values = _in_slots(cache.keys, shape), _in_slots(cache.values, shape)
        layer_ops.rotate_and_write(query, key, value, angles, keys, values, slot_mapping)

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: NormRule, out: Tensor) -> None:
        """See CpuKernels.add_norm."""
        if norm.then_add and residual is not None:  # rounded once, as in native code
            out.copy_(residual.float() + _norm(x.float(), norm))
        else:
            out.copy_(_norm(x if residual is None else residual.add_(x), norm))

    def gated_activation(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        """See CpuKernels.gated_activation."""
        out.copy_(layer_ops.gated_activation(gate_up, activation))

    def activation(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        """See CpuKernels.activation."""
        if activation == "relu":  # without a copy
            torch.clamp_min(x, 0.0, out=out)
        else:
            out.copy_(layer_ops.activate(x, activation))

    def gather_rows(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """See CpuKernels.gather_rows."""
        torch.index_select(x, 0, rows, out=out)

    def embed(self, table: Tensor, token_ids: Tensor, out: Tensor, first_id: int = 0) -> None:
        """See CpuKernels.embed."""
        rows = token_ids - first_id
        is_here = (rows >= 0) & (rows < len(table))
        torch.index_select(table, 0, torch.where(is_here, rows, 0), out=out)
        out.masked_fill_(~is_here.unsqueeze(1), 0.0)

    def copy_rows(self, x: Tensor, out: Tensor) -> None:
        """See CpuKernels.copy_rows."""
        out.copy_(x)

    def greedy(self, logits: Tensor, out: GreedyTokens) -> None:
        """See CpuKernels.greedy."""
        torch.all(logits.isfinite(), dim=1, out=out.is_finite)
        out.token_ids.copy_(torch.where(out.is_finite, logits.argmax(dim=1), 0))


def _in_slots(side: Tensor, shape: CacheShape) -> Tensor:
    assert not shape.int8, "keys and values in int8 are for native kernels alone"
    return side.view(-1, shape.block_size, shape.num_kv_heads, shape.head_dim)


def _tokens(plan: AttentionPlan) -> list[Tensor | slice]:
    """Indices of the plan's query tokens."""
    chunks = [slice(row.start, row.end) for row in plan.prefill_rows]
    return [*(group.tokens for group in plan.decode_groups), *chunks]


def _norm(x: Tensor, norm: NormRule) -> Tensor:
    weight = None if norm.weight is None else norm.weight.to(x.dtype)
    if norm.rms:
        return F.rms_norm(x, (x.shape[1],), weight, norm.eps)
    return F.layer_norm(x, (x.shape[1],), weight, None if norm.bias is None else norm.bias.to(x.dtype), norm.eps)
