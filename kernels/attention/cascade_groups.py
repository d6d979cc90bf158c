"""Finds rows that begin with the same blocks, from block tables on the host, if sharing their keys saves time.

Pure numpy, without any device. A row is in at most one group (one level of sharing). For rows that share few blocks
with many rows and more blocks with few, the larger saving is chosen, by estimates from the leaves of the tree of
prefixes upwards; this is not always optimal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention.shape import AttentionShape

IntArray = npt.NDArray[np.int32]

MIN_SHARERS = 2
GROUPS, MEMBERS, GROUP_OF_ROW = "cascade_groups", "cascade_members", "cascade_group_of_row"
GROUP_FIELDS = 3  # first member, number of members, keys of the prefix

# Estimates, not measured. With 32/8/128 heads in two bytes a key is 4 KiB, and sharing saves time from some 8 rows with
# 500 common keys on.
_PASS_BYTES = 12 * 2**20  # that a device reads while one more kernel starts and ends (4 us of 3 TB/s)
_GROUP_KEYS = 128  # two tiles: start and end of a group's programs
_FIRST_WIDTH, _WIDENING = 64, 8  # blocks of each row that are compared at first, and how many times more then
_PARTIALS_PER_ROW = 5  # written and read again, which a row without sharing does not need


class SharedPrefix(NamedTuple):
    """Rows whose first blocks are the same."""

    rows: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingCost:
    """Cost of sharing, as the number of keys that could be read in the same time."""

    per_step: int
    per_group: int
    per_row: int

    def gain(self, num_rows: int, num_keys: int) -> int:
        """Key reads that a group saves in a step that has other groups."""
        return (num_rows - 1) * num_keys - num_rows * self.per_row - self.per_group


def sharing_cost(shape: AttentionShape) -> SharingCost:
    """The cost for a model's shape on a data-center GPU."""
    key_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.kv_dtype.itemsize
    partial_bytes = 2 * shape.num_heads * shape.head_dim * torch.float32.itemsize
    return SharingCost(
        per_step=_PASS_BYTES // key_bytes,
        per_group=_GROUP_KEYS,
        per_row=_PARTIALS_PER_ROW * partial_bytes // key_bytes,
    )


def num_shareable_blocks(context_lens: IntArray, block_size: int) -> IntArray:
    """Number of blocks of each row [R] before that of its last token, which the row itself writes."""
    return np.maximum(context_lens - 1, 0) // block_size


def find_shared_prefixes(
    block_tables: IntArray,
    num_shareable: IntArray,
    block_size: int,
    cost: SharingCost,
    seats: npt.NDArray[np.integer] | None = None,
) -> list[SharedPrefix]:
    """The groups that save most key reads in a step; none if sharing costs more than it saves.

    block_tables:  [num_seats, max_blocks], entries beyond a row's blocks are ignored
    num_shareable: [R], number of first blocks of each row that are already computed, so that other rows may read them
    seats:         [R], of the rows; None: row i has table i
    """
    seats = np.arange(len(num_shareable)) if seats is None else seats
    candidates = _rows_with_equal_starts(block_tables, num_shareable, seats)
    if len(candidates) == 0 or int(num_shareable[candidates].sum()) * block_size < cost.per_step:
        return []
    order, depths = _sorted_by_table(block_tables, num_shareable[candidates], seats[candidates])
    rows = candidates[order]
    groups = _best_groups(depths, block_size, cost)
    if sum(group.gain for group in groups) < cost.per_step:
        return []
    groups.sort()  # deeper groups, which lie within others, come last
    owners = np.full(len(rows), len(groups))
    for i, group in enumerate(groups):
        owners[group.first : group.end] = i
    members: list[list[int]] = [[] for _ in (*groups, "none")]
    for row, owner in zip(rows.tolist(), owners.tolist(), strict=True):
        members[owner].append(row)
    return sorted(
        SharedPrefix(tuple(sorted(own)), group.depth) for own, group in zip(members[:-1], groups, strict=True)
    )


def _rows_with_equal_starts(
    block_tables: IntArray, num_shareable: IntArray, seats: npt.NDArray[np.integer]
) -> npt.NDArray[np.intp]:
    """Rows whose first block is also another row's. Reads one column, so that steps without sharing cost little."""
    if block_tables.shape[1] == 0:
        return np.empty(0, dtype=np.intp)
    rows = np.flatnonzero(num_shareable)
    starts = block_tables[seats[rows], 0]
    order = starts.argsort()
    equal = starts[order[1:]] == starts[order[:-1]]
    if not equal.any():
        return np.empty(0, dtype=np.intp)
    shared = np.zeros(len(rows), dtype=np.bool_)
    shared[:-1] |= equal
    shared[1:] |= equal
    sharing: npt.NDArray[np.intp] = rows[order[shared]]
    return sharing


def _sorted_by_table(
    block_tables: IntArray, lens: IntArray, seats: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Order in which equal beginnings are neighbours, and the number of blocks that each row shares with the next.

    Reads little more of the tables than is shared: contexts are long, and most share a short prefix.
    """
    most = int(np.partition(lens, -2)[-2])  # no two rows share more than the second longest has
    width = min(most, _FIRST_WIDTH)
    while True:
        starts = np.ascontiguousarray(block_tables[seats, :width])
        order, depths = _sorted_by_start(starts, np.minimum(lens, width))
        if width == most or depths.max() < width:
            return order, depths
        width = min(most, width * _WIDENING)


def _sorted_by_start(tables: IntArray, lens: IntArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """`_sorted_by_table` for the first blocks alone.

    tables: [R, width], contiguous, overwritten; lens: blocks of each row that it can share, at most the width
    """
    width = tables.shape[1]
    # A number that is unique to the row ends the part that it can share.
    late = np.arange(min(int(lens.min()), width), width)
    own = -1 - np.arange(len(tables), dtype=np.int32)
    tables[:, late] = np.where(late < lens[:, None], tables[:, late], own[:, None])
    order = tables.view(f"V{tables.itemsize * width}").ravel().argsort()  # as strings of bytes
    tables = tables[order]
    differs = tables[1:] != tables[:-1]
    depths = differs.argmax(1)
    depths[~differs[np.arange(len(depths)), depths]] = width
    return order, depths


class _Group(NamedTuple):
    """Rows of sorted order `first` to `end` - 1, without those of deeper groups among them."""

    depth: int
    first: int
    end: int
    num_rows: int
    gain: int


@dataclass(slots=True)
class _Node:
    """Neighbouring rows that share `depth` blocks, with the best groups within them so far."""

    first: int
    depth: int
    groups: list[_Group]


def _best_groups(depths: npt.NDArray[np.intp], block_size: int, cost: SharingCost) -> list[_Group]:
    """Rows that share a depth are the nodes of a tree, which are closed from the leaves upwards. A node becomes a group
    of its rows, except those for which inner groups save more, unless the inner groups alone save more.
    """
    padded = np.append(depths, 0)
    changes = np.flatnonzero(np.diff(padded, prepend=-1))
    stack = [_Node(0, 0, [])]
    for row, depth in zip(changes.tolist(), padded[changes].tolist(), strict=True):
        first = row
        groups: list[_Group] = []
        while stack[-1].depth > depth:
            node = stack.pop()
            first = node.first
            groups = _closed(node, groups, row + 1, block_size, cost)
        if stack[-1].depth == depth:
            stack[-1].groups += groups
        else:
            stack.append(_Node(first, depth, groups))
    return stack[0].groups


def _closed(node: _Node, last: list[_Group], end: int, block_size: int, cost: SharingCost) -> list[_Group]:
    """The best groups of a node whose rows end here; `last` are those of its last child."""
    inner = node.groups + last
    keys = node.depth * block_size
    kept = [group for group in inner if group.gain >= group.num_rows * (keys - cost.per_row)]
    num_rows = end - node.first - sum(group.num_rows for group in kept)
    gain = cost.gain(num_rows, keys)
    if num_rows < MIN_SHARERS or gain + sum(group.gain for group in kept) < max(1, sum(group.gain for group in inner)):
        return inner
    return [*kept, _Group(node.depth, node.first, end, num_rows, gain)]


def max_groups(num_rows: int) -> int:
    """The most groups that a batch can have, at least 1."""
    return max(1, num_rows // MIN_SHARERS)


def cascade_arrays(max_rows: int) -> dict[str, tuple[int, torch.dtype]]:
    """Names, lengths and types of the fixed arrays that describe groups to the device."""
    lengths = {GROUPS: GROUP_FIELDS * max_groups(max_rows), MEMBERS: max_rows, GROUP_OF_ROW: max_rows}
    return {name: (length, torch.int32) for name, length in lengths.items()}


def fill_cascade_arrays(prefixes: Sequence[SharedPrefix], max_rows: int, block_size: int) -> dict[str, IntArray]:
    """Full arrays for these groups, with empty entries behind them, for batches of any size that fits."""
    arrays = {name: np.zeros(length, dtype=np.int32) for name, (length, _) in cascade_arrays(max_rows).items()}
    arrays[GROUP_OF_ROW][:] = -1
    if prefixes:
        counts = np.array([len(rows) for rows, _ in prefixes])
        members = np.concatenate([rows for rows, _ in prefixes])
        groups = arrays[GROUPS].reshape(-1, GROUP_FIELDS)[: len(prefixes)]
        groups[:, 0] = counts.cumsum() - counts
        groups[:, 1] = counts
        groups[:, 2] = [num_blocks * block_size for _, num_blocks in prefixes]
        arrays[MEMBERS][: len(members)] = members
        arrays[GROUP_OF_ROW][members] = np.repeat(np.arange(len(prefixes)), counts)
    return arrays
