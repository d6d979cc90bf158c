"""Rows of many queries over scattered, poisoned blocks, with what attention must make of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kernels.attention.prefill_config import PrefillConfig
from kernels.attention.prefill_plan import COSTS, prefill_work
from kernels.attention.prefill_reference import PrefillPlan, PrefillRows, empty_partials
from kernels.attention.shape import AttentionShape, ScoreRule
from kernels.attention.split_sizes import SplitCosts
from tests.kernels.decode_cases import decode_case

FREE_SPLITS = SplitCosts(tile=8, start=0, merge=0)  # so that keys are split wherever programs would idle
SMALL = PrefillConfig(rows=16, tile=16, num_warps=4, num_stages=3)  # so that short rows have many tiles


@dataclass(frozen=True)
class PrefillCase:
    """Keys and values per row, and the same in blocks of a pool that is NaN wherever no row has written."""

    query: Tensor  # [T, num_heads, head_dim], a view of packed queries, keys and values
    query_lens: tuple[int, ...]
    keys: list[Tensor]  # [context, num_kv_heads, head_dim]
    values: list[Tensor]
    key_cache: Tensor
    value_cache: Tensor
    rows: PrefillRows
    shape: AttentionShape
    block_size: int

    def plan(
        self,
        window: int | None = None,
        config: PrefillConfig = SMALL,
        num_programs: int = 1,
        costs: SplitCosts = COSTS,
    ) -> PrefillPlan:
        """Plan for so many programs at once; for one no keys are split."""
        contexts = self.rows.context_lens.cpu().numpy()
        lens = np.array(self.query_lens)
        work = prefill_work(lens, contexts, self.shape, config, num_programs, window=window, costs=costs)
        return PrefillPlan(
            rows=self.rows,
            shape=self.shape,
            config=config,
            block_size=self.block_size,
            sliding_window=window,
            work=torch.from_numpy(work).to(self.query.device),
            partials=empty_partials(self.shape, config, num_programs, self.query.device),
        )

    def by_formula(self, rule: ScoreRule, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Results and log-sum-exps, computed plainly in one dtype, head by head."""
        out = torch.empty(self.query.shape, dtype=dtype, device=self.query.device)
        lse = torch.empty(self.query.shape[:2], dtype=dtype, device=self.query.device)
        for row, (start, end) in enumerate(pairwise(self.rows.query_start.tolist())):
            mask = seen_keys(end - start, len(self.keys[row]), window).to(self.query.device)
            for head in range(self.shape.num_heads):
                kv_head = head // self.shape.group
                scores = self.query[start:end, head].to(dtype) @ self.keys[row][:, kv_head].to(dtype).T * rule.scale
                if rule.soft_cap is not None:
                    scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
                scores = scores.masked_fill(~mask, -math.inf)
                out[start:end, head] = scores.softmax(1) @ self.values[row][:, kv_head].to(dtype)
                lse[start:end, head] = scores.logsumexp(1)
        return out, lse

    def to(self, device: torch.device) -> "PrefillCase":
        rows = (self.rows.query_start, self.rows.context_lens, self.rows.block_tables)
        return replace(
            self,
            query=self.query.to(device),
            keys=[keys.to(device) for keys in self.keys],
            values=[values.to(device) for values in self.values],
            key_cache=self.key_cache.to(device),
            value_cache=self.value_cache.to(device),
            rows=PrefillRows(*(tensor.to(device) for tensor in rows)),
        )


@cache
def seen_keys(query_len: int, context: int, window: int | None) -> Tensor:
    """[query_len, context], true where a query sees a key: position by position."""
    return torch.tensor(
        [
            [key <= position and (window is None or position - key < window) for key in range(context)]
            for position in range(context - query_len, context)
        ],
        dtype=torch.bool,
    ).view(query_len, context)


def prefill_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> PrefillCase:
    """Rows of these numbers of queries and keys, in shuffled blocks."""
    contexts = [context for _, context in lengths]
    base = decode_case(
        contexts, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype, seed=seed
    )
    query_lens = tuple(query_len for query_len, _ in lengths)
    generator = torch.Generator().manual_seed(seed + 1)
    num_heads, num_kv_heads = heads
    packed = torch.randn(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    query_start = torch.tensor(np.cumsum((0, *query_lens)), dtype=torch.int32)
    return PrefillCase(
        query=packed[:, :num_heads],
        query_lens=query_lens,
        keys=base.keys,
        values=base.values,
        key_cache=base.key_cache,
        value_cache=base.value_cache,
        rows=PrefillRows(query_start, base.rows.context_lens, base.rows.block_tables),
        shape=base.shape,
        block_size=block_size,
    )
