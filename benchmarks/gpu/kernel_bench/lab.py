"""Lab in which kernels are measured: device, clock, dtype, size of cases; keys and values in blocks.

`TINY` runs every path on a CPU in Triton's interpreter, where bfloat16 is silently wrong, so it is float16 there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from benchmarks.gpu.kernel_bench.clock import Clock, CudaClock, HostClock
from benchmarks.gpu.kernel_bench.figures import Check
from kernels.attention.decode_config import num_processors
from kernels.attention.shape import AttentionShape, ScoreRule

_FILLED_AT_ONCE = 1 << 27  # elements


class Size(Enum):
    """Size of the cases."""

    TINY = "tiny"
    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Lab:
    """Lab that all measurements share."""

    device: torch.device
    dtype: torch.dtype  # of activations
    clock: Clock
    size: Size

    @property
    def is_tiny(self) -> bool:
        return self.size is Size.TINY

    @property
    def num_processors(self) -> int:
        return num_processors(self.device)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        flat = out.view(-1)
        for start in range(0, flat.numel(), _FILLED_AT_ONCE):  # e4m3 has no generator of its own
            part = flat[start : start + _FILLED_AT_ONCE]
            part.copy_(torch.randn(part.shape, dtype=self.dtype, device=self.device))
        return out


def cuda_lab(size: Size) -> Lab:
    return Lab(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, CudaClock(0.1), size)


def host_lab() -> Lab:
    """Lab for a process with TRITON_INTERPRET=1."""
    return Lab(torch.device("cpu"), torch.float16, HostClock(), Size.TINY)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedInputs:
    """Queries of rows, the last ones of their contexts, and all layers' keys and values in blocks."""

    query: Tensor  # [T, num_heads, head_dim]
    pool: Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], as the worker's
    block_tables: Tensor  # [R, max_blocks] int32
    query_start: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]

    def key_cache(self, layer: int = 0) -> Tensor:
        return self.pool[:, layer, 0]

    def value_cache(self, layer: int = 0) -> Tensor:
        return self.pool[:, layer, 1]

    @property
    def num_layers(self) -> int:
        return self.pool.shape[1]

    @property
    def block_size(self) -> int:
        return self.pool.shape[3]

    @property
    def rule(self) -> ScoreRule:
        return ScoreRule(1 / math.sqrt(self.query.shape[2]))

    @property
    def shape(self) -> AttentionShape:
        num_heads, head_dim = self.query.shape[1:]
        return AttentionShape(
            num_heads=num_heads,
            num_kv_heads=self.pool.shape[4],
            head_dim=head_dim,
            dtype=self.query.dtype,
            kv_dtype=self.pool.dtype,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one layer's attention must read; all else is under 1 % of them."""
        num_kv_heads, head_dim = self.pool.shape[4:]
        return sum(self.contexts) * 2 * num_kv_heads * head_dim * self.pool.dtype.itemsize

    @property
    def causal_flops(self) -> int:
        """Floating-point operations of both products, over the keys that each query sees."""
        seen = (
            queries * (context - queries) + queries * (queries + 1) // 2
            for queries, context in zip(self.query_lens, self.contexts, strict=True)
        )
        return 4 * self.query.shape[1] * self.query.shape[2] * sum(seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    """Case that inputs are made for."""

    name: str
    heads: tuple[int, int, int]  # of queries, of keys and values, and their dimension
    contexts: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None  # one query each if absent
    block_size: int = 16
    kv_dtype: torch.dtype | None = None  # that of queries if absent
    num_layers: int = 1
    shuffled: bool = True  # otherwise blocks lie in the order of rows and positions


def make_inputs(lab: Lab, case: PagedCase) -> PagedInputs:
    """Random queries, keys and values; the same block tables each time."""
    num_heads, num_kv_heads, head_dim = case.heads
    query_lens = case.query_lens or (1,) * len(case.contexts)
    counts = [-(-context // case.block_size) for context in case.contexts]
    num_blocks = sum(counts)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(num_blocks, generator=generator) if case.shuffled else torch.arange(num_blocks)
    tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
    for row, own in enumerate(ids.split(counts)):
        tables[row, : len(own)] = own
    return PagedInputs(
        query=lab.random(sum(query_lens), num_heads, head_dim),
        pool=lab.random(
            num_blocks, case.num_layers, 2, case.block_size, num_kv_heads, head_dim, dtype=case.kv_dtype or lab.dtype
        ),
        block_tables=tables.to(lab.device),
        query_start=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(lab.device),
        context_lens=torch.tensor(case.contexts, dtype=torch.int32, device=lab.device),
        query_lens=query_lens,
        contexts=case.contexts,
    )


def checked(result: Tensor, exact: Tensor) -> Check:
    """Compare with the reference. Rounding of weights and of results is at most one ULP of the largest result each."""
    allowed = 2 * torch.finfo(result.dtype).eps * exact.abs().max()
    return Check((result.float() - exact.float()).abs().max().item(), allowed.item())


def rotated(num_bytes: int, lab: Lab, make: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> int:
    """Copies of the inputs, enough that launches in turn find nothing in the L2 cache."""
    if lab.device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(lab.device).L2_cache_size
    return next((copies for copies in make if copies * num_bytes >= 4 * cache), make[-1])
