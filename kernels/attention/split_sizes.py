"""Chooses how finely the keys of attention's work are split between programs, by an estimate of the time that it takes.

Pure numpy. Decode attention chooses on the device by the same estimate (`decode_plan`), prefill attention on the host.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]
SHARE_UNIT = 12  # shares of a program's fair part of all work are in twelfths


class SplitCosts(NamedTuple):
    """Estimated times of a program, in one unit."""

    tile: int  # of keys
    start: int  # until it has its first keys, or the first results to merge
    merge: int  # of one split


def best_size(tiles: IntArray, num_heads: int, num_programs: int, shares: tuple[int, ...], costs: SplitCosts) -> int:
    """The size of splits, in tiles, with the least estimated time; the larger of equals.

    tiles:  [N] of keys of each item, which every one of `num_heads` has
    shares: sizes that are tried after whole items, descending, in twelfths of a fair part for each of `num_programs`,
            which run at once
    """
    total = int(tiles.sum()) * num_heads
    fair = -(-total * np.array(shares) // (num_programs * SHARE_UNIT))
    sizes = np.maximum(1, np.append(tiles.max(), fair))
    return int(sizes[_times(tiles, sizes, num_heads, num_programs, costs).argmin()])


def even_splits(tiles: IntArray, size: IntArray | int) -> tuple[IntArray, IntArray]:
    """Tiles per split and number of splits, for equal splits of at most `size` tiles; an item without tiles has one."""
    wanted = np.maximum(1, -(-tiles // size))
    even = np.maximum(1, -(-tiles // wanted))
    return even, np.maximum(1, -(-tiles // even))


def _times(tiles: IntArray, sizes: IntArray, num_heads: int, num_programs: int, costs: SplitCosts) -> IntArray:
    """Estimated time with splits of each size [S].

    Programs start in order as others end. Their time is at most the lesser of: whole waves of the longest, and the
    longest after a fair share of the others (Graham). The merge of the item with the most splits follows.
    """
    even, splits = even_splits(tiles, sizes[:, None])
    longest = even.max(1) * costs.tile + costs.start
    num_items = splits.sum(1) * num_heads
    waves = -(-num_items // num_programs) * longest
    others = int(tiles.sum()) * num_heads * costs.tile + num_items * costs.start - longest
    most = splits.max(1)
    merging = np.where(most > 1, costs.start + costs.merge * most, 0)
    times: IntArray = np.minimum(waves, -(-others // num_programs) + longest) + merging
    return times
