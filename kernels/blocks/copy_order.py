"""Orders copies of blocks inside one pool, where a block may be a source and a destination at once.

Pure: knows block ids only.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pair = tuple[int, int]  # (source, destination)


class CopyTable(NamedTuple):
    """Groups of pairs as one array, which `copy_by_table` reads on the device."""

    array: npt.NDArray[np.int64]  # [num_groups + 1 + 2 * num_pairs]: first pair of each group, then the pairs
    num_groups: int


def copy_table(pairs: npt.NDArray[np.int64]) -> CopyTable:
    """Lay out the copies of pairs [P, 2] inside a pool, in the order of `copy_groups`."""
    if not np.isin(pairs[:, 0], pairs[:, 1]).any():
        return apart(pairs)
    return grouped(copy_groups([(source, destination) for source, destination in pairs.tolist()]))


def apart(pairs: npt.NDArray[np.int64]) -> CopyTable:
    """Lay out pairs [P, 2] that need no order, each as a group of its own."""
    assert len(np.unique(pairs[:, 1])) == len(pairs), "two copies into one block"
    return CopyTable(np.concatenate([np.arange(len(pairs) + 1), pairs.reshape(-1)]), len(pairs))


def grouped(groups: Sequence[Sequence[Pair]]) -> CopyTable:
    """Lay out groups that can be copied at the same time; none may be empty."""
    starts = [0]
    for group in groups:
        starts.append(starts[-1] + len(group))
    blocks = [block for group in groups for pair in group for block in pair]
    return CopyTable(np.array(starts + blocks, dtype=np.int64), len(groups))


def copy_groups(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Split pairs into groups that can be copied at the same time, each in the order of its list.

    Inside a group the first source is read before all other copies and written after them; the other pairs are copied
    one by one in between. So every source is read before it is overwritten, also in a cycle. No destination may occur
    twice.
    """
    into = {destination: source for source, destination in pairs}
    assert len(into) == len(pairs), "two copies into one block"
    copies_of: defaultdict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        copies_of[pair[0]].append(pair)
    groups: list[list[Pair]] = []
    done: set[int] = set()  # destinations
    for pair in pairs:
        if pair[1] not in done:
            group = _group_below(_top(pair, into), copies_of)
            done.update(destination for _, destination in group)
            groups += _by_source_alone(group, into)
    return groups


def _top(pair: Pair, into: dict[int, int]) -> int:
    """The block from which `pair`'s group descends and that no pair writes; on a cycle, any of its blocks."""
    block, seen = pair[1], set()
    while block in into and block not in seen:
        seen.add(block)
        block = into[block]
    return block


def _group_below(top: int, copies_of: dict[int, list[Pair]]) -> list[Pair]:
    """Copies that descend from `top`, those from a block before the one that overwrites it.

    On a cycle the pair that overwrites `top` comes first.
    """
    closing: list[Pair] = []
    falling: list[Pair] = []
    blocks = [top]
    while blocks:
        for pair in copies_of.get(blocks.pop(), ()):
            if pair[1] == top:
                closing.append(pair)
            else:
                falling.append(pair)
                blocks.append(pair[1])
    return closing + falling[::-1]


def _by_source_alone(group: list[Pair], into: dict[int, int]) -> Iterable[list[Pair]]:
    """The group itself, or, if no source is overwritten, one group for each pair, since these need no order."""
    if any(source in into for source, _ in group):
        return [group]
    return [[pair] for pair in group]
