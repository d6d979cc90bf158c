"""Cuts ragged query rows into the work of prefill attention's programs, on the host: tiles of queries, and their keys.

Where few tiles leave processors idle while their keys are many, the keys of a tile are split between programs. The host
knows all lengths of a step with prompts. A graph has room for an amount of work; what lies beyond a batch's own has no
row. Knows neither torch's devices nor Triton.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.attention.prefill_config import PrefillConfig
from kernels.attention.shape import AttentionShape
from kernels.attention.split_sizes import SHARE_UNIT, IntArray, SplitCosts, best_size, even_splits

NO_ROW = -1  # the row of work that is padding
WORK_FIELDS = 6
# Of a plan, in eighths of the time that a program takes for a tile of keys: 1 us with 128 rows and 64 keys on Hopper.
# The results of a split are 64 KiB, which one processor writes, and another reads, in about the same time.
COSTS = SplitCosts(tile=8, start=16, merge=8)
# Sizes of splits that are tried, none finer than a fair share: each split leaves a result to merge. The tiles of a
# chunk have about equally many keys, so a size just above a fair share often makes one wave.
SHARES = (192, 96, 48, 36, 24, 18, 16, 15, 14, 13, SHARE_UNIT)
_CHUNK_TOKENS = 16  # of a chunk that a graph has room for at its most chunks
_FEWEST_CHUNKS = 8


class _Tiles(NamedTuple):
    """Tiles of queries, those with most keys first; all arrays are [num_tiles]."""

    row: IntArray
    query: IntArray  # first of the tile within its row
    first: IntArray  # tile of keys with the key that the tile's first query sees first
    end: IntArray  # of keys


def prefill_work(
    query_lens: IntArray,
    context_lens: IntArray,
    shape: AttentionShape,
    config: PrefillConfig,
    num_programs: int,
    *,
    window: int | None = None,
    first_row: int = 0,
    costs: SplitCosts = COSTS,
) -> npt.NDArray[np.int32]:
    """Work of all rows as [num_work, 6]: row, a tile's first query within its row, first tile of keys, end of keys, the
    tile's first work, its number of splits.

    query_lens, context_lens: [R], queries of each row and its keys, the queries' own included
    num_programs:             that run at once on the device
    window:                   most keys that a query sees; None: all before it
    first_row:                number of the first of these rows

    The tiles with most keys come first, so that the last programs to end are short, and those that are split come
    before all others. A row without queries has no work.
    """
    tiles = _tiles(query_lens, context_lens, config.queries(shape), config.tile, window)
    if not len(tiles.row):
        return np.zeros((0, WORK_FIELDS), dtype=np.int32)
    num_keys = -(-tiles.end // config.tile) - tiles.first
    size = best_size(num_keys, num_heads(shape, config), num_programs, SHARES, costs)
    even, counts = even_splits(num_keys, size)
    tile = np.repeat(np.arange(len(counts)), counts)
    first_work = np.cumsum(counts) - counts
    split = np.arange(len(tile)) - first_work[tile]
    first = tiles.first[tile] + split * even[tile]
    end = np.minimum((first + even[tile]) * config.tile, tiles.end[tile])
    fields = (first_row + tiles.row[tile], tiles.query[tile], first, end, first_work[tile], counts[tile])
    return np.stack(fields, axis=1).astype(np.int32)


def _tiles(query_lens: IntArray, context_lens: IntArray, queries: int, tile: int, window: int | None) -> _Tiles:
    assert (query_lens <= context_lens).all(), "a row's queries are part of its context"
    counts = -(-query_lens // queries)
    row = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the row
    query = index * queries
    before = (context_lens - query_lens)[row]
    end = before + np.minimum(query + queries, query_lens[row])
    first = np.zeros_like(end) if window is None else np.maximum(0, before + query - window + 1) // tile
    order = np.argsort(first * tile - end, kind="stable")
    return _Tiles(row[order], query[order], first[order], end[order])


def num_heads(shape: AttentionShape, config: PrefillConfig) -> int:
    """Programs of one piece of work: key-value heads, times the tiles that hold all heads of a group."""
    return shape.num_kv_heads * -(-shape.group // config.heads(shape))


def most_splits(shape: AttentionShape, config: PrefillConfig, num_programs: int) -> int:
    """The most splits that all split tiles together can have.

    A split is at least a fair share, so a tile of t shares has less than t + 1 splits, and is split only if t > 1.
    """
    return 2 * num_programs // num_heads(shape, config)


def work_room(num_tokens: int, max_rows: int, shape: AttentionShape, config: PrefillConfig, num_programs: int) -> int:
    """Work that a graph of so many tokens has room for: chunks of 16 tokens on average, or 8 chunks of any length."""
    most_chunks = min(max_rows, max(_FEWEST_CHUNKS, num_tokens // _CHUNK_TOKENS))
    return most_work(num_tokens, most_chunks, shape, config, num_programs)


def most_work(num_tokens: int, num_rows: int, shape: AttentionShape, config: PrefillConfig, num_programs: int) -> int:
    """The most work that so many tokens in so many rows can have: a split tile of t shares adds less than t."""
    num_tiles = num_tokens // config.queries(shape) + num_rows
    return num_tiles + num_programs // num_heads(shape, config)
