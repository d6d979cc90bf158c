"""Cuts ragged query rows into the tiles of prefill attention's programs, on the host.

The host knows all lengths of a step with prompts. A graph has room for a number of tiles; those beyond a batch's own
have no row. Knows neither torch's devices nor Triton.
"""

import numpy as np
import numpy.typing as npt

from kernels.attention.prefill_config import PrefillConfig
from kernels.attention.shape import AttentionShape

IntArray = npt.NDArray[np.integer]
NO_ROW = -1  # the row of a tile that is padding
_CHUNK_TOKENS = 16  # of a chunk that a graph has room for at its most chunks
_FEWEST_CHUNKS = 8


def prefill_tiles(
    query_lens: IntArray, context_lens: IntArray, shape: AttentionShape, config: PrefillConfig, first_row: int = 0
) -> npt.NDArray[np.int32]:
    """Tiles of all rows as [num_tiles, 2]: row, and the tile's first query within its row.

    query_lens, context_lens: [R], queries of each row and its keys, the queries' own included
    first_row:                number of the first of these rows

    The tiles with most keys come first, so that the last programs to end are short. A row without queries has no tile.
    """
    assert (query_lens <= context_lens).all(), "a row's queries are part of its context"
    queries = config.queries(shape)
    counts = -(-query_lens // queries)
    row = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the row
    first = index * queries
    num_keys = (context_lens - query_lens)[row] + np.minimum(first + queries, query_lens[row])
    return np.stack((first_row + row, first), axis=1).astype(np.int32)[np.argsort(-num_keys, kind="stable")]


def tile_room(num_tokens: int, max_rows: int, shape: AttentionShape, config: PrefillConfig) -> int:
    """Tiles that a graph of so many tokens has room for: chunks of 16 tokens on average, or 8 chunks of any length."""
    most_chunks = min(max_rows, max(_FEWEST_CHUNKS, num_tokens // _CHUNK_TOKENS))
    return most_tiles(num_tokens, most_chunks, shape, config)


def most_tiles(num_tokens: int, num_rows: int, shape: AttentionShape, config: PrefillConfig) -> int:
    """The most tiles that so many tokens in so many rows can have."""
    return num_tokens // config.queries(shape) + num_rows
