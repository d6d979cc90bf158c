"""Causal attention of many queries per row over the row's blocks: the torch reference.

It defines the result of `prefill_attention`, with the same signature, on any device. The queries of a row are the last
tokens of its context, all of it or a chunk; a slot outside the context is never read.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.prefill_config import PrefillConfig
from kernels.attention.prefill_plan import NO_ROW, most_splits, num_heads
from kernels.attention.shape import Attended, AttentionShape, ScoreRule


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Query rows of different lengths, concatenated, each with its own context.

    The queries of row r are tokens query_start[r] up to query_start[r + 1]; they are the last ones of its context. Rows
    without work are not read.
    """

    query_start: Tensor  # [R + 1] int32, cumulative; the first need not be 0
    context_lens: Tensor  # [R] int32, keys of each row, the queries' own included
    block_tables: Tensor  # [R, max_blocks] int32; entries that no query of the row sees are never read


@dataclass(frozen=True, slots=True)
class PrefillPartials:
    """Memory for the results of tiles whose keys are split. A launch owns it while it runs, so launches with one memory
    must follow each other on one stream. `num_arrived` is zero between launches.
    """

    out: Tensor  # [most_splits, programs of one piece of work, rows, head_dim] float32
    lse: Tensor  # [most_splits, programs of one piece of work, rows] float32, in units of log2
    num_arrived: Tensor  # [most_splits, programs of one piece of work] int32: finished splits, by the tile's first work


def empty_partials(
    shape: AttentionShape, config: PrefillConfig, num_programs: int, device: torch.device
) -> PrefillPartials:
    """Memory for work that was planned for so many programs at once; 17 MB for 132 of 128 rows."""
    size = (most_splits(shape, config, num_programs), num_heads(shape, config), config.rows)
    return PrefillPartials(
        out=torch.empty((*size, shape.head_dim), dtype=torch.float32, device=device),
        lse=torch.empty(size, dtype=torch.float32, device=device),
        num_arrived=torch.zeros(size[:2], dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """The plan of one step that all layers with the same shape and sliding window share."""

    rows: PrefillRows
    shape: AttentionShape
    config: PrefillConfig
    block_size: int
    sliding_window: int | None  # a query at position p sees keys p - sliding_window + 1 to p
    work: (
        Tensor  # [num_work, 6] int32 on the device, as `prefill_work` makes it for this window, then padding of NO_ROW
    )
    partials: PrefillPartials


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: PrefillPlan,
    rule: ScoreRule,
    with_lse: bool = False,
    out: Tensor | None = None,
) -> Attended:
    """softmax(score(Q K^T) + mask) V for each row, K and V read through its block table (paper, eq. 4).

    In float32 or better. On a CUDA device this waits for the device.

    query:                  [T, num_heads, head_dim]
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]
    out:                    output, contiguous, else like query; tokens of rows without work keep what they have.
                            Allocated if None; such tokens then get zeros here, and are undefined in general
    """
    rows = plan.rows
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.full(query.shape[:2], -math.inf, dtype=dtype, device=query.device)
    starts: list[int] = rows.query_start.tolist()
    contexts: list[int] = rows.context_lens.tolist()
    for row in sorted(set(plan.work[:, 0].tolist()) - {NO_ROW}):
        start, end, context = starts[row], starts[row + 1], contexts[row]
        positions = torch.arange(context - (end - start), context, device=query.device)
        first = 0 if plan.sliding_window is None else max(0, context - (end - start) - plan.sliding_window + 1)
        keys_at = torch.arange(first, context, device=query.device)
        mask = keys_at <= positions[:, None]
        if plan.sliding_window is not None:
            mask &= keys_at > positions[:, None] - plan.sliding_window
        blocks = rows.block_tables[row, keys_at // plan.block_size].long()
        keys = key_cache[blocks, keys_at % plan.block_size].to(dtype)
        values = value_cache[blocks, keys_at % plan.block_size].to(dtype)
        out[start:end], lse[start:end] = _attend(query[start:end].to(dtype), keys, values, mask, rule)
    return Attended(out, lse if with_lse else None)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """One row: query [Q, num_heads, head_dim]; keys, values [K, num_kv_heads, head_dim]; mask [Q, K], true if seen."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = rule.scores(torch.einsum("qhd,khd->qhk", query, keys))
    scores = scores.masked_fill(~mask[:, None, :], -math.inf)
    return torch.einsum("qhk,khd->qhd", scores.softmax(2), values), scores.logsumexp(2)
