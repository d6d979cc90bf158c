"""Rows of a pass as lists of blocks, one behind the other: what FlashInfer calls indptr, indices and last_page_len.

The host makes them from its own block tables, so nothing waits for the device. Pure arithmetic.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from worker_svc.steps.step_check import IntArray

Int32Array = npt.NDArray[np.int32]
_PADDING_BLOCK = 0  # that a row of padding reads one key of


@dataclass(frozen=True, slots=True)
class BlockLists:
    """Rows of a pass. Each has at least one key, since a library need not take a row without."""

    query_start: Int32Array  # [R + 1] cumulative, from 0
    block_start: Int32Array  # [R + 1] cumulative, from 0
    last_lens: Int32Array  # [R] keys in the row's last block, 1 to block_size
    blocks: Int32Array  # [block_start[-1]] row by row

    @property
    def num_rows(self) -> int:
        return len(self.last_lens)


@dataclass(frozen=True, slots=True)
class SentBlockLists:
    """Block lists whose blocks are, or will be in the order of the stream, on the device."""

    lists: BlockLists
    blocks: Tensor  # int32 [block_start[-1]]


def block_lists(
    query_lens: IntArray,
    context_lens: IntArray,
    block_tables: Int32Array,
    block_size: int,
    num_rows: int,
    padding_queries: int,
) -> BlockLists:
    """Lists of rows, padded to `num_rows` with rows of so many queries (0 or 1) and one key.

    query_lens, context_lens: [R], queries of each row and its keys, the queries' own included
    block_tables:             [R, at least the most blocks of a row]; what lies behind a row's blocks is not read
    """
    padding = num_rows - len(context_lens)
    counts = -(-context_lens // block_size)
    width = int(counts.max(initial=0))
    own = block_tables[:, :width][np.arange(width) < counts[:, None]]
    return BlockLists(
        query_start=_starts(np.concatenate((query_lens, np.full(padding, padding_queries)))),
        block_start=_starts(np.concatenate((counts, np.ones(padding, dtype=np.int64)))),
        last_lens=np.concatenate((context_lens - (counts - 1) * block_size, np.ones(padding))).astype(np.int32),
        blocks=np.concatenate((own, np.full(padding, _PADDING_BLOCK))).astype(np.int32),
    )


def padding_lists(num_tokens: int, num_rows: int, block_size: int) -> BlockLists:
    """Lists of as many queries as a pass can have, all in the first row: the plan with which a pass is captured."""
    first = np.array([num_tokens], dtype=np.int64)
    table = np.full((1, -(-num_tokens // block_size)), _PADDING_BLOCK, dtype=np.int32)
    return block_lists(first, first, table, block_size, num_rows, 0)


def _starts(lens: IntArray) -> Int32Array:
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=starts[1:])
    return starts
