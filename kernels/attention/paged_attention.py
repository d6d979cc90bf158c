"""Attention over keys and values in blocks, read through block tables: the torch reference.

One call computes the ragged rows of an iteration: chunks of prompts and single decode tokens together. The plan, which
depends only on the rows, is made once (`plan_attention`) and shared by all layers. Knows nothing of models or pools.
Slots outside a row's context are never read, so their content does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.blocks.kv_blocks import block_row_stride, flat_token_rows

# A decode group is padded to its longest row: at most to twice the shortest, unless all are as short as this.
_SHORT_ROW_KEYS = 64
# On a CPU a group is at most as large as fits the caches (float32 elements of K, and as many of V), which measured
# 2 to 7 times faster than one gather of all rows.
_CPU_GROUP_ELEMENTS = 3 << 17


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Query rows of different lengths, concatenated, each with its own context.

    The queries of row r are tokens query_start[r] up to query_start[r + 1]; they are the last ones of its context.
    """

    query_start: Tensor  # [R + 1] int32, cumulative
    context_lens: Tensor  # [R] int32, keys of each row, the queries' own included
    block_tables: Tensor  # [R, max_blocks] int32
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each, of similar length, padded to the longest."""

    tokens: Tensor  # [D] int64, index in T of each row's query
    key_rows: Tensor  # [D * L] int64, flat token rows; padding repeats the row's own last key
    num_rows: int
    mask: Tensor | None  # [D, 1, 1, L] bool, true for a key, false for padding; None without padding


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several queries."""

    start: int  # first token in T
    end: int
    key_rows: Tensor  # [L] int64, flat token rows
    mask: Tensor | None  # [query_len, L] bool; None is plainly causal, with as many queries as keys


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan of one iteration that all layers with the same sliding window share."""

    rows: RaggedRows
    sliding_window: int | None
    decode_groups: tuple[DecodeGroup, ...]
    prefill_rows: tuple[PrefillRow, ...]


def plan_attention(rows: RaggedRows, key_cache: Tensor, sliding_window: int | None = None) -> AttentionPlan:
    """Turn block tables into rows to gather and masks to apply.

    key_cache may be any layer's: only its shape and strides are read. A query at position p sees keys
    p - sliding_window + 1 to p. On a CUDA device this waits for the device once.
    """
    starts: list[int] = rows.query_start.tolist()
    contexts: list[int] = rows.context_lens.tolist()
    prefill_rows: list[PrefillRow] = []
    decode_rows: list[_DecodeRow] = []
    for row, (start, end, context) in enumerate(zip(starts, starts[1:], contexts, strict=False)):
        assert end - start <= context, "a row's queries are part of its context"
        if end - start == 1:
            num_keys = context if sliding_window is None else min(context, sliding_window)
            decode_rows.append(_DecodeRow(num_keys, start, row))
        elif end > start:
            prefill_rows.append(_plan_prefill(rows, row, (start, end, context), key_cache, sliding_window))
    groups = _group_by_length(decode_rows, key_cache)
    decode_groups = tuple(_plan_decode(rows, group, contexts, key_cache) for group in groups)
    return AttentionPlan(rows, sliding_window, decode_groups, tuple(prefill_rows))


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(scale * Q K^T + mask) V for each row, K and V gathered through its block table (paper, eq. 4).

    Grouped queries: heads h * G to h * G + G - 1 share key-value head h, G = num_heads / num_kv_heads.
    Products accumulate in float32 for every dtype.

    query:                  [T, num_heads, head_dim]
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], strides as planned
    returns                 [T, num_heads, head_dim], the dtype of query; tokens of no row are undefined
    """
    num_kv_heads = key_cache.shape[2]
    keys, values = flat_token_rows(key_cache), flat_token_rows(value_cache)
    out = torch.empty_like(query)
    for group in plan.decode_groups:
        out[group.tokens] = _attend_decode(query, keys, values, group, num_kv_heads, scale)
    for row in plan.prefill_rows:
        out[row.start : row.end] = _attend_prefill(query, keys, values, row, num_kv_heads, scale)
    return out


class _DecodeRow(NamedTuple):
    num_keys: int  # first, since rows are sorted by it
    token: int
    row: int


def _group_by_length(decode_rows: list[_DecodeRow], key_cache: Tensor) -> list[list[_DecodeRow]]:
    """Groups of rows of similar length, within the limits on padding and, on a CPU, on size."""
    on_cpu = key_cache.device.type == "cpu"
    groups: list[list[_DecodeRow]] = []
    for row in sorted(decode_rows):
        group = groups[-1] if groups else []
        similar = bool(group) and row.num_keys <= max(_SHORT_ROW_KEYS, 2 * group[0].num_keys)
        small = (len(group) + 1) * row.num_keys * key_cache.stride(1) <= _CPU_GROUP_ELEMENTS
        if similar and (small or not on_cpu):
            group.append(row)
        else:
            groups.append([row])
    return groups


def _plan_decode(
    rows: RaggedRows, group: Sequence[_DecodeRow], contexts: Sequence[int], key_cache: Tensor
) -> DecodeGroup:
    device = rows.block_tables.device
    members = torch.tensor(group, dtype=torch.int64, device=device)
    num_keys, tokens, row_ids = members.unsqueeze(2).unbind(1)
    last = torch.tensor([contexts[row.row] for row in group], dtype=torch.int64, device=device).unsqueeze(1) - 1
    longest, shortest = group[-1].num_keys, group[0].num_keys
    column = torch.arange(longest, device=device).unsqueeze(0)
    positions = (last + 1 - num_keys + column).minimum(last)
    key_rows = _flat_rows_of(rows.block_tables[row_ids.squeeze(1)], positions, key_cache)
    mask = None if shortest == longest else (column < num_keys)[:, None, None, :]
    return DecodeGroup(tokens.squeeze(1), key_rows.reshape(-1), len(group), mask)


def _plan_prefill(
    rows: RaggedRows, row: int, span: tuple[int, int, int], key_cache: Tensor, window: int | None
) -> PrefillRow:
    start, end, context = span
    first_query = context - (end - start)
    first_key = 0 if window is None else max(0, first_query - window + 1)
    key_positions = torch.arange(first_key, context, device=rows.block_tables.device)
    key_rows = _flat_rows_of(rows.block_tables[row : row + 1], key_positions.unsqueeze(0), key_cache)
    if first_query == 0 and (window is None or context <= window):
        return PrefillRow(start, end, key_rows.reshape(-1), None)
    query_positions = key_positions[first_query - first_key :].unsqueeze(1)
    mask = key_positions <= query_positions
    if window is not None:
        mask &= key_positions > query_positions - window
    return PrefillRow(start, end, key_rows.reshape(-1), mask)


def _flat_rows_of(block_tables: Tensor, positions: Tensor, key_cache: Tensor) -> Tensor:
    """Flat token rows of positions [R, L] through block tables [R, max_blocks], as [R, L] int64."""
    block_size = key_cache.shape[1]
    blocks = block_tables.to(torch.int64).gather(1, positions // block_size)
    return blocks * block_row_stride(key_cache) + positions % block_size


def _attend_decode(
    query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, num_kv_heads: int, scale: float
) -> Tensor:
    """Attention of a group; queries that share a key-value head are the query rows of one small attention."""
    num_heads, head_dim = query.shape[1:]
    q = query[group.tokens].view(group.num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    shape = (group.num_rows, -1, num_kv_heads, head_dim)
    k = keys.index_select(0, group.key_rows).view(shape).transpose(1, 2)
    v = values.index_select(0, group.key_rows).view(shape).transpose(1, 2)
    q, k, v = _in_compute_dtype(q, k, v)
    out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
    return out.reshape(group.num_rows, num_heads, head_dim).to(query.dtype)


def _attend_prefill(
    query: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, num_kv_heads: int, scale: float
) -> Tensor:
    """Attention of one row; key-value heads are the batch, heads that share them an expanded view, not a copy."""
    num_heads, head_dim = query.shape[1:]
    heads_per_kv = num_heads // num_kv_heads
    q = query[row.start : row.end].view(-1, num_kv_heads, heads_per_kv, head_dim).permute(1, 2, 0, 3)
    k = keys.index_select(0, row.key_rows).view(-1, 1, num_kv_heads, head_dim).permute(2, 1, 0, 3)
    v = values.index_select(0, row.key_rows).view(-1, 1, num_kv_heads, head_dim).permute(2, 1, 0, 3)
    q, k, v = _in_compute_dtype(q, k, v)
    k, v = k.expand(-1, heads_per_kv, -1, -1), v.expand(-1, heads_per_kv, -1, -1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=row.mask, is_causal=row.mask is None, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim).to(query.dtype)


def _in_compute_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 on a CPU, whose half-precision attention is several times slower; elsewhere unchanged."""
    if q.device.type == "cpu":
        return q.float(), k.float(), v.float()
    return q, k, v
