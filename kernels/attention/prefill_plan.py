"""Cuts ragged query rows into the tiles of prefill attention's programs, on the host.

The host knows all lengths of a step with prompts, since such steps are not captured in graphs. Knows neither torch's
devices nor Triton.
"""

import numpy as np
import numpy.typing as npt

from kernels.attention.prefill_config import PrefillConfig
from kernels.attention.shape import AttentionShape

IntArray = npt.NDArray[np.integer]


def prefill_tiles(
    query_lens: IntArray, context_lens: IntArray, shape: AttentionShape, config: PrefillConfig
) -> npt.NDArray[np.int32]:
    """Tiles of all rows as [num_tiles, 2]: row, and the tile's first query within its row.

    query_lens, context_lens: [R], queries of each row and its keys, the queries' own included

    The tiles with most keys come first, so that the last programs to end are short. A row without queries has no tile.
    """
    assert (query_lens <= context_lens).all(), "a row's queries are part of its context"
    queries = config.queries(shape)
    counts = -(-query_lens // queries)
    row = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the row
    first = index * queries
    num_keys = (context_lens - query_lens)[row] + np.minimum(first + queries, query_lens[row])
    return np.stack((row, first), axis=1).astype(np.int32)[np.argsort(-num_keys, kind="stable")]
