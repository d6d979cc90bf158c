"""Attention of one query per row over its blocks, and the split of its work: the torch references.

They define the results of `decode_attention` and `decode_plan`, with the same signatures, on any device. A row of
context 0 (padding of a batch) gives zeros and a log-sum-exp of -inf.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kernels.attention.decode_config import DecodeConfig
from kernels.attention.shape import Attended, AttentionShape, ScoreRule
from kernels.attention.split_sizes import SHARE_UNIT, SplitCosts, best_size, even_splits

COSTS = SplitCosts(tile=8, start=8, merge=2)  # of a plan, in eighths of the time that a program takes for a tile
SHARES = (192, 96, 48, 24, 18, 12, 9, 6, 4, 3)  # sizes of splits that are tried


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one query each. The query is the last token of its context."""

    context_lens: Tensor  # [R] int32, keys of each row, the query's own included; 0 for padding
    block_tables: Tensor  # [R, max_blocks] int32; entries beyond a row's context are never read


@dataclass(frozen=True, slots=True)
class RowPrefixes:
    """Keys at the start of each row that another kernel attends, whose results are merged with the row's own.

    That kernel's plan fills `lens` and `num_partials`; then decode's plan fills `first_partials`. The kernel writes its
    results there before decode attention is launched.
    """

    lens: Tensor  # [R] int32: keys that decode attention leaves out
    num_partials: Tensor  # [R] int32: partial results for these keys
    first_partials: Tensor  # [R] int32: their first index in `partial_out`, right after those of the row's own splits
    max_partials: int  # of all rows together


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """The plan that all layers with the same shape and sliding window share, and its memory.

    Planning fills `work` and `num_work`; a launch owns the rest while it runs, so launches with one plan must follow
    each other on one stream. `num_arrived` is zero between launches.
    """

    rows: DecodeRows
    shape: AttentionShape
    config: DecodeConfig
    block_size: int
    sliding_window: int | None
    num_programs: int  # that run at once on the device
    work: Tensor  # [max_work, 5] int32: row, first key, end of keys, the row's first work, its number of splits
    num_work: Tensor  # [1] int32: number of filled rows of `work`
    partial_out: Tensor  # [max_work + max_partials, num_heads, head_dim] float32
    partial_lse: Tensor  # [max_work + max_partials, num_heads] float32, in units of log2
    num_arrived: Tensor  # [R, num_kv_heads] int32: splits that are finished
    prefixes: RowPrefixes | None = None


def empty_plan(
    rows: DecodeRows,
    shape: AttentionShape,
    config: DecodeConfig,
    block_size: int,
    num_programs: int,
    sliding_window: int | None = None,
    prefixes: RowPrefixes | None = None,
) -> DecodePlan:
    """The memory of a plan, for the most work that any context lengths can make."""
    device = rows.context_lens.device
    num_rows, max_blocks = rows.block_tables.shape
    assert num_rows == len(rows.context_lens) > 0, "a plan needs at least one row, and a block table for each"
    assert prefixes is None or sliding_window is None, "queries at different positions see different parts of a prefix"
    max_tiles = -(-max_blocks * block_size // config.tile) + 1  # a window may begin inside a tile
    # A row has at most one split more than its tiles fill, and a share is at least SHARES[-1] twelfths.
    max_extra = -(-num_programs * SHARE_UNIT // (SHARES[-1] * shape.num_kv_heads))
    max_work = min(num_rows * max_tiles, num_rows + max_extra)
    num_partials = max_work + (prefixes.max_partials if prefixes is not None else 0)
    return DecodePlan(
        rows=rows,
        shape=shape,
        config=config,
        block_size=block_size,
        sliding_window=sliding_window,
        num_programs=num_programs,
        work=torch.zeros((max_work, 5), dtype=torch.int32, device=device),
        num_work=torch.zeros(1, dtype=torch.int32, device=device),
        partial_out=torch.empty((num_partials, shape.num_heads, shape.head_dim), dtype=torch.float32, device=device),
        partial_lse=torch.empty((num_partials, shape.num_heads), dtype=torch.float32, device=device),
        num_arrived=torch.zeros((num_rows, shape.num_kv_heads), dtype=torch.int32, device=device),
        prefixes=prefixes,
    )


def part_of_decode_plan(
    plan: DecodePlan, rows: DecodeRows, size: DecodePlan, prefixes: RowPrefixes | None = None
) -> DecodePlan:
    """A plan of `rows` in the memory of `plan`, as much of it as `size` has: only one may be in use at a time."""
    return replace(
        plan,
        rows=rows,
        work=plan.work[: len(size.work)],
        partial_out=plan.partial_out[: len(size.partial_out)],
        partial_lse=plan.partial_lse[: len(size.partial_lse)],
        num_arrived=plan.num_arrived[: len(size.num_arrived)],
        prefixes=prefixes,
    )


def fill_plan(plan: DecodePlan) -> None:
    """Split the rows' keys into work of nearly equal size, row by row."""
    tile = plan.config.tile
    contexts: list[int] = plan.rows.context_lens.tolist()
    firsts = _first_keys(plan, contexts)
    tiles = np.array([-(-context // tile) - first // tile for context, first in zip(contexts, firsts, strict=True)])
    size = best_size(tiles, plan.shape.num_kv_heads, plan.num_programs, SHARES, COSTS)
    evens, counts = even_splits(tiles, size)
    work: list[tuple[int, ...]] = []
    for row, (context, first) in enumerate(zip(contexts, firsts, strict=True)):
        even, num_splits = int(evens[row]), int(counts[row])
        starts = [first, *((first // tile + split * even) * tile for split in range(1, num_splits)), context]
        first_work = len(work)
        work += [(row, *keys, first_work, num_splits) for keys in pairwise(starts)]
    plan.work[: len(work)] = torch.tensor(work, dtype=torch.int32)
    plan.num_work[0] = len(work)
    if plan.prefixes is not None:
        splits = torch.from_numpy(counts).to(plan.prefixes.num_partials)
        own_and_before = splits + plan.prefixes.num_partials
        plan.prefixes.first_partials.copy_(own_and_before.cumsum(0) - plan.prefixes.num_partials)


def _first_keys(plan: DecodePlan, contexts: list[int]) -> list[int]:
    """The first key that each row attends itself."""
    if plan.prefixes is not None:
        lens: list[int] = plan.prefixes.lens.tolist()
        return lens
    window = plan.sliding_window
    return [0 if window is None else max(0, context - window) for context in contexts]


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: DecodePlan,
    rule: ScoreRule,
    with_lse: bool = False,
    out: Tensor | None = None,
) -> Attended:
    """softmax(score(Q K^T)) V for each row, K and V read through its block table (paper, eq. 4), in float32 or better.

    query:                  [R, num_heads, head_dim]
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]
    out:                    output, contiguous, else like query; allocated if None
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros_like(query) if out is None else out.zero_()
    lse = torch.full(query.shape[:2], -math.inf, dtype=dtype, device=query.device)
    contexts: list[int] = plan.rows.context_lens.tolist()
    for row, (context, first) in enumerate(zip(contexts, _first_keys(plan, contexts), strict=True)):
        if context:
            positions = torch.arange(first, context, device=query.device)
            blocks = plan.rows.block_tables[row, positions // plan.block_size].long()
            keys = key_cache[blocks, positions % plan.block_size].to(dtype)
            values = value_cache[blocks, positions % plan.block_size].to(dtype)
            own = _attend(query[row].to(dtype), keys, values, rule)
            out[row], lse[row] = own if plan.prefixes is None else _merged(*own, plan, row, plan.prefixes)
    return Attended(out, lse if with_lse else None)


def _merged(out: Tensor, lse: Tensor, plan: DecodePlan, row: int, prefixes: RowPrefixes) -> tuple[Tensor, Tensor]:
    """A row's own result merged with those of its prefix: sum(out_s * exp(lse_s)) / sum(exp(lse_s))."""
    first = int(prefixes.first_partials[row])
    partials = slice(first, first + int(prefixes.num_partials[row]))
    outs = torch.cat((out[None], plan.partial_out[partials].to(out.dtype)))
    lses = torch.cat((lse[None], plan.partial_lse[partials].to(lse.dtype) * math.log(2.0)))
    return torch.einsum("sh,shd->hd", lses.softmax(0), outs), lses.logsumexp(0)


def _attend(query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """One row: query [num_heads, head_dim]; keys, values [context, num_kv_heads, head_dim]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = rule.scores(torch.einsum("hd,chd->hc", query, keys))
    return torch.einsum("hc,chd->hd", scores.softmax(1), values), scores.logsumexp(1)
