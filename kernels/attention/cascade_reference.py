"""Attention of rows that begin with the same blocks, and the split of its work: the torch references.

They define the results of `cascade_attention` and `cascade_plan`, with the same signatures, on any device. The result
equals that of `decode_reference.decode_attention` for the same rows. `cascade_groups` finds the groups.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.attention import decode_reference
from kernels.attention.cascade_config import CascadeConfig
from kernels.attention.cascade_groups import GROUP_FIELDS, GROUP_OF_ROW, GROUPS, MEMBERS, max_groups
from kernels.attention.decode_reference import (
    COSTS,
    SHARES,
    DecodePlan,
    DecodeRows,
    RowPrefixes,
    empty_plan,
    part_of_decode_plan,
)
from kernels.attention.shape import Attended, AttentionShape, ScoreRule
from kernels.attention.split_sizes import SHARE_UNIT, best_size, even_splits

WORK_FIELDS = 6
# Splits of a prefix are no finer than a fair share, since every split leaves a result to merge for each member.
PREFIX_SHARES = tuple(share for share in SHARES if share >= SHARE_UNIT)


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Groups of rows that begin with the same blocks, on the device. A row is in at most one group."""

    groups: Tensor  # [max_groups, 3] int32: first member, number of members (0 where there is no group), shared keys
    members: Tensor  # [R] int32: rows, group by group
    group_of_row: Tensor  # [R] int32; -1 for a row that shares nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadePlan:
    """The plan that all layers of one shape without sliding window share, and its memory.

    A prefix is split like the keys of decode attention, once for each tile of its members' queries:

        row 0  |===== prefix of group 0 =====|-- suffix --|      prefix kernel: = and ~, a tile's queries at a time
        row 1  |                             |--|                decode kernel: -, then the merge of all results
        row 2  |~ prefix of group 1 ~|-------|                   of a row, where it has several
        row 3  |                     |---|
        row 4  |-----------------------------------------|

    Planning fills `work`, `num_work` and the plan of the suffixes; launches write the rest, all on one stream.
    """

    groups: PrefixGroups
    suffixes: DecodePlan  # its prefixes are those of the groups; its partial results include those of the prefixes
    config: CascadeConfig
    num_programs: int  # of the prefix kernel that run at once on the device
    # [max_work, 6] int32: the group's first member, its number of members, the tile's first query, first key, end of
    # keys, split. Query i of a group is of member i // G and of head i % G of each key-value head.
    work: Tensor
    num_work: Tensor  # [1] int32: number of filled rows of `work`


def prefix_groups(arrays: Mapping[str, Tensor], num_rows: int) -> PrefixGroups:
    """Views of the arrays of `cascade_groups.fill_cascade_arrays`, on the device, for a batch of `num_rows`."""
    groups = arrays[GROUPS].view(-1, GROUP_FIELDS)
    return PrefixGroups(groups[: max_groups(num_rows)], arrays[MEMBERS][:num_rows], arrays[GROUP_OF_ROW][:num_rows])


def empty_cascade_plan(
    rows: DecodeRows,
    groups: PrefixGroups,
    shape: AttentionShape,
    config: CascadeConfig,
    block_size: int,
    num_processors: int,
) -> CascadePlan:
    """The memory of a plan, for the most work that any groups and context lengths can make."""
    device = rows.context_lens.device
    num_rows, max_blocks = rows.block_tables.shape
    num_programs = num_processors * config.prefix.programs_per_sm
    max_tiles = max(1, -(-max_blocks * block_size // config.prefix.tile))
    # A split is at least a fair share, or a whole prefix.
    max_extra = -(-num_programs * SHARE_UNIT // (PREFIX_SHARES[-1] * shape.num_kv_heads))
    max_query_tiles = num_rows * shape.group // config.rows + len(groups.groups)
    max_work = min(max_query_tiles * max_tiles, max_query_tiles + max_extra)
    prefixes = RowPrefixes(
        lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
        num_partials=torch.zeros(num_rows, dtype=torch.int32, device=device),
        first_partials=torch.zeros(num_rows, dtype=torch.int32, device=device),
        max_partials=min(num_rows * max_tiles, num_rows + -(-max_extra * config.rows // shape.group)),
    )
    programs = num_processors * config.suffix.programs_per_sm
    return CascadePlan(
        groups=groups,
        suffixes=empty_plan(rows, shape, config.suffix, block_size, programs, prefixes=prefixes),
        config=config,
        num_programs=num_programs,
        work=torch.zeros((max_work, WORK_FIELDS), dtype=torch.int32, device=device),
        num_work=torch.zeros(1, dtype=torch.int32, device=device),
    )


def part_of_plan(plan: CascadePlan, rows: DecodeRows, groups: PrefixGroups) -> CascadePlan:
    """A plan of at most as many rows and blocks, in the memory of `plan`: only one of both may be in use at a time."""
    num_rows, num_blocks = rows.block_tables.shape
    lens = torch.empty(num_rows, dtype=torch.int32, device="meta")
    tables = torch.empty((num_rows, num_blocks), dtype=torch.int32, device="meta")
    whole = plan.suffixes
    processors = plan.num_programs // plan.config.prefix.programs_per_sm
    size = empty_cascade_plan(DecodeRows(lens, tables), groups, whole.shape, plan.config, whole.block_size, processors)
    fits = len(size.work) <= len(plan.work) and len(size.suffixes.partial_out) <= len(whole.partial_out)
    assert fits and num_rows <= len(whole.num_arrived), "more rows or more blocks than the memory is for"
    assert whole.prefixes is not None and size.suffixes.prefixes is not None
    prefixes = RowPrefixes(
        lens=whole.prefixes.lens[:num_rows],
        num_partials=whole.prefixes.num_partials[:num_rows],
        first_partials=whole.prefixes.first_partials[:num_rows],
        max_partials=size.suffixes.prefixes.max_partials,
    )
    suffixes = part_of_decode_plan(whole, rows, size.suffixes, prefixes)
    return replace(plan, groups=groups, suffixes=suffixes, work=plan.work[: len(size.work)])


def fill_cascade_plan(plan: CascadePlan) -> None:
    """Split the groups' prefixes into work of nearly equal size, then the rows' other keys."""
    prefixes, shape, tile = plan.suffixes.prefixes, plan.suffixes.shape, plan.config.prefix.tile
    assert prefixes is not None
    groups = [fields for fields in plan.groups.groups.tolist() if fields[1]]
    tiles = np.array([-(-shared // tile) for *_, shared in groups], dtype=np.int64)
    query_tiles = [-(-count * shape.group // plan.config.rows) for _, count, _ in groups]
    each = tiles.repeat(query_tiles)
    size = best_size(each, shape.num_kv_heads, plan.num_programs, PREFIX_SHARES, COSTS) if groups else 1
    evens, counts = even_splits(tiles, size)
    work = []
    prefixes.lens.zero_()
    prefixes.num_partials.zero_()
    splits = zip(evens.tolist(), counts.tolist(), strict=True)
    for (first_member, count, shared), (even, num_splits), copies in zip(groups, splits, query_tiles, strict=True):
        members = plan.groups.members[first_member : first_member + count].long()
        prefixes.lens[members] = shared
        prefixes.num_partials[members] = num_splits
        for split in range(num_splits):
            start, end = split * even * tile, min((split + 1) * even * tile, shared)
            work += [(first_member, count, i * plan.config.rows, start, end, split) for i in range(copies)]
    plan.work[: len(work)] = torch.tensor(work, dtype=torch.int32).view(-1, WORK_FIELDS)
    plan.num_work[0] = len(work)
    decode_reference.fill_plan(plan.suffixes)


def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: CascadePlan,
    rule: ScoreRule,
    out: Tensor | None = None,
) -> Attended:
    """softmax(score(Q K^T)) V for each row. The keys of a prefix are read once for all rows that share it, and results
    are merged with those of a row's other keys by log-sum-exp.

    query:                  [R, num_heads, head_dim]
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]
    out:                    output, contiguous, else like query; allocated if None
    """
    attend_prefixes(query, key_cache, value_cache, plan, rule)
    return decode_reference.decode_attention(query, key_cache, value_cache, plan.suffixes, rule, out=out)


def attend_prefixes(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: CascadePlan, rule: ScoreRule) -> None:
    """Writes each member's result for each split of its group's prefix to the partial results of the suffixes' plan."""
    suffixes = plan.suffixes
    assert suffixes.prefixes is not None
    num_kv_heads, group = suffixes.shape.num_kv_heads, suffixes.shape.group
    heads = query.unflatten(1, (num_kv_heads, group))
    partial_out = suffixes.partial_out.unflatten(1, (num_kv_heads, group))
    partial_lse = suffixes.partial_lse.unflatten(1, (num_kv_heads, group))
    for first_member, count, first_query, *keys, split in plan.work[: int(plan.num_work)].tolist():
        last_query = min(first_query + plan.config.rows, count * group)
        queries = torch.arange(first_query, last_query, device=query.device)
        rows = plan.groups.members[first_member + queries // group].long()
        positions = torch.arange(*keys, device=query.device)
        blocks = suffixes.rows.block_tables[rows[0], positions // suffixes.block_size].long()
        slots = (blocks, positions % suffixes.block_size)
        wide_keys, wide_values = key_cache[slots].float(), value_cache[slots].float()
        scores = rule.scores(torch.einsum("mkd,ckd->mkc", heads[rows, :, queries % group].float(), wide_keys))
        partials = suffixes.prefixes.first_partials[rows].long() + split
        partial_out[partials, :, queries % group] = torch.einsum("mkc,ckd->mkd", scores.softmax(2), wide_values)
        partial_lse[partials, :, queries % group] = scores.logsumexp(2) / math.log(2.0)
