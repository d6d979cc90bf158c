"""Ragged rows over scattered, poisoned blocks whose layout is the kernels' own, and what attention makes of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.attention.paged_attention import RaggedRows
from kernels.native.cpu_kernels import CacheShape, CpuKernels, LayerCache, layer_caches

NUM_LAYERS = 3
LAYER = 1  # the layers around it stay poisoned
BAD_BLOCK = 2**31 - 1  # in table entries that must not be read
AWKWARD_LENGTHS = (1, 15, 16, 17, 33, 63, 64, 65, 129)
DECODE = [(1, length) for length in AWKWARD_LENGTHS]
PREFILL = [(2, 2), (17, 17), (64, 64), (33, 66), (1, 1), (7, 100)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# For a sum in another order.
SLACK = {torch.float32: 2e-6, torch.bfloat16: 2e-3}


@dataclass(frozen=True)
class Case:
    """Queries, keys and values per row; the pool, or its scales, is NaN wherever no row has written."""

    qkv: Tensor  # [T, all heads * head_dim], the queries' columns filled
    keys: list[Tensor]  # [context, num_kv_heads, head_dim]
    values: list[Tensor]
    spans: Sequence[tuple[int, int]]
    cache: LayerCache
    rows: RaggedRows

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.cache.shape.head_dim)

    @property
    def query(self) -> Tensor:
        return self.qkv[:, : self.cache.shape.num_heads * self.cache.shape.head_dim]

    def attend(self, kernels: CpuKernels, window: int | None = None) -> Tensor:
        """Into a poisoned, strided output."""
        plan = kernels.plan(self.rows, self.cache, window)
        out = torch.full_like(self.qkv, math.nan)[:, : self.query.shape[1]]
        kernels.attend(self.query, self.cache, plan, self.scale, out)
        return out

    def expected(self, window: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        """Compute the formula, with exactly the keys that each query may see."""
        shape = self.cache.shape
        heads = self.query.to(dtype).unflatten(1, (shape.num_heads, shape.head_dim))
        outs, begin = [], 0
        for (num_queries, context), keys, values in zip(self.spans, self.keys, self.values, strict=True):
            query = heads[begin : begin + num_queries].transpose(0, 1)
            begin += num_queries
            key, value = (x.to(dtype).transpose(0, 1).repeat_interleave(shape.group, 0) for x in (keys, values))
            position = torch.arange(context - num_queries, context).unsqueeze(1)
            seen = torch.arange(context) <= position
            if window is not None:
                seen &= torch.arange(context) > position - window
            scores = (query @ key.transpose(1, 2) * self.scale).masked_fill(~seen, -math.inf)
            outs.append((scores.softmax(-1) @ value).transpose(0, 1).flatten(1))
        return torch.cat(outs)

    def error(self, kernels: CpuKernels, window: int | None = None) -> tuple[float, float]:
        """The greatest error against float64, and that of the formula in the case's own dtype."""
        exact = self.expected(window)
        own = (self.expected(window, self.query.dtype).double() - exact).abs().max()
        return float((self.attend(kernels, window).double() - exact).abs().max()), float(own)


def attention_case(
    kernels: CpuKernels,
    spans: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
    seed: int = 0,
) -> Case:
    """Rows of (queries, context) in shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    shape = CacheShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, int8=int8
    )
    counts = [-(-context // block_size) for _, context in spans]
    num_blocks = sum(counts) + 2
    side_bytes = shape.side_numel * shape.stored_dtype.itemsize
    poisoned = torch.full(
        (num_blocks, NUM_LAYERS, 2, side_bytes), 255, dtype=torch.uint8
    )  # NaN in any dtype that has it
    cache = layer_caches(poisoned.view(shape.stored_dtype), shape)[LAYER]
    blocks = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = torch.full((len(spans), max(counts)), BAD_BLOCK, dtype=torch.int32)
    keys, values = (
        [torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype) for _, context in spans]
        for _ in range(2)
    )
    for row, ((_, context), count) in enumerate(zip(spans, counts, strict=True)):
        tables[row, :count] = torch.tensor([next(blocks) for _ in range(count)], dtype=torch.int32)
        position = torch.arange(context)
        slots = tables[row].long()[position // block_size] * block_size + position % block_size
        unused = torch.zeros(context, num_heads, head_dim, dtype=dtype)
        packed = torch.cat((unused, keys[row], values[row]), dim=1).flatten(1)
        kernels.rotate_and_write(packed, None, position, slots, cache)
    starts = torch.tensor([0, *(queries for queries, _ in spans)]).cumsum(0).to(torch.int32)
    qkv = torch.randn(int(starts[-1]), (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    rows = RaggedRows(
        starts,
        torch.tensor([context for _, context in spans], dtype=torch.int32),
        tables,
        max(queries for queries, _ in spans),
        max(context for _, context in spans),
    )
    return Case(qkv, keys, values, spans, cache, rows)
