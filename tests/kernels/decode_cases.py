"""Rows of one query each over scattered, poisoned blocks, with what attention must make of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.attention.decode_config import DecodeConfig
from kernels.attention.decode_reference import DecodePlan, DecodeRows, empty_plan
from kernels.attention.shape import AttentionShape, ScoreRule
from tests.kernels.kv_writes import write_kv

NUM_LAYERS = 2
LAYER = 1  # attention reads a strided view; the layer before stays poisoned
BAD_BLOCK = 2**31 - 1  # in table entries that must not be read
TILE = 16  # small, so that short contexts have many tiles
SMALL = DecodeConfig(tile=TILE, num_warps=4, num_stages=3, programs_per_sm=1)


@dataclass(frozen=True)
class DecodeCase:
    """Keys and values per row, and the same in blocks of a pool that is NaN wherever no row has written."""

    query: Tensor  # [R, num_heads, head_dim], a view of packed queries, keys and values
    keys: list[Tensor]  # [context, num_kv_heads, head_dim]
    values: list[Tensor]
    key_cache: Tensor
    value_cache: Tensor
    rows: DecodeRows
    shape: AttentionShape
    block_size: int

    def empty_plan(self, num_programs: int, window: int | None = None) -> DecodePlan:
        """Make a plan without work, its results poisoned."""
        plan = empty_plan(self.rows, self.shape, SMALL, self.block_size, num_programs, window)
        plan.partial_out.fill_(math.nan)
        plan.partial_lse.fill_(math.nan)
        return plan

    def by_formula(self, rule: ScoreRule, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Results and log-sum-exps, computed plainly in one dtype, with exactly the keys that each query may see."""
        pairs = []
        for query, keys, values in zip(self.query, self.keys, self.values, strict=True):
            first = 0 if window is None else max(0, len(keys) - window)
            pairs.append(_attend(query.to(dtype), keys[first:].to(dtype), values[first:].to(dtype), rule))
        return torch.stack([out for out, _ in pairs]), torch.stack([lse for _, lse in pairs])

    def to(self, device: torch.device) -> "DecodeCase":
        return replace(
            self,
            query=self.query.to(device),
            keys=[keys.to(device) for keys in self.keys],
            values=[values.to(device) for values in self.values],
            key_cache=self.key_cache.to(device),
            value_cache=self.value_cache.to(device),
            rows=DecodeRows(self.rows.context_lens.to(device), self.rows.block_tables.to(device)),
        )


def decode_case(
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> DecodeCase:
    """Rows of these contexts, in shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    kv_dtype = kv_dtype or dtype
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    pool = torch.full((num_blocks, NUM_LAYERS, 2, block_size, num_kv_heads, head_dim), math.nan).to(kv_dtype)
    key_cache, value_cache = pool[:, LAYER, 0], pool[:, LAYER, 1]
    # Block 0 stays poisoned: it is what a masked table entry reads as.
    blocks = iter((1 + torch.randperm(num_blocks - 1, generator=generator)).tolist())
    tables = torch.full((len(lengths), max(counts)), BAD_BLOCK, dtype=torch.int32)
    keys, values = (
        [torch.randn(n, num_kv_heads, head_dim, generator=generator).to(kv_dtype) for n in lengths] for _ in range(2)
    )
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = torch.tensor([next(blocks) for _ in range(count)], dtype=torch.int32)
        position = torch.arange(length)
        slots = tables[row].long()[position // block_size] * block_size + position % block_size
        write_kv(keys[row], values[row], key_cache, value_cache, slots)
    packed = torch.randn(len(lengths), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    shape = AttentionShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype
    )
    rows = DecodeRows(torch.tensor(lengths, dtype=torch.int32), tables)
    return DecodeCase(packed[:, :num_heads], keys, values, key_cache, value_cache, rows, shape, block_size)


def _attend(query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """One row, head by head; without keys zeros and -inf."""
    group = query.shape[0] // keys.shape[1]
    out, lse = torch.empty_like(query), torch.empty(len(query), dtype=query.dtype, device=query.device)
    for head in range(len(query)):
        scores = (keys[:, head // group] @ query[head]) * rule.scale
        if rule.soft_cap is not None:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        out[head], lse[head] = scores.softmax(0) @ values[:, head // group], scores.logsumexp(0)
    return out, lse
