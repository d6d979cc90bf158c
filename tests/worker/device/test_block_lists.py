"""Rows of a pass as lists of blocks: what a library reads through them is what the block tables say."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.gpu.libraries.block_lists import block_lists, padding_lists

BAD_BLOCK = 2**31 - 1
ROWS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=9)


@given(rows=ROWS, block_size=st.sampled_from([1, 4, 16]), padding=st.integers(0, 5), queries=st.integers(0, 1))
def test_every_row_has_its_blocks_and_lengths(
    rows: list[tuple[int, int]], block_size: int, padding: int, queries: int
) -> None:
    """Rows of any number of queries behind any number of keys; what lies behind a row's blocks is not read."""
    query_lens = np.array([own for own, _ in rows])
    contexts = query_lens + np.array([before for _, before in rows])
    counts = [-(-int(context) // block_size) for context in contexts]
    tables = np.full((len(rows), max(counts) + 2), BAD_BLOCK, dtype=np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = np.arange(count) * 10 + row
    num_rows = len(rows) + padding
    lists = block_lists(query_lens, contexts, tables, block_size, num_rows, queries)
    assert lists.num_rows == num_rows
    for row, (start, end) in enumerate(pairwise(lists.block_start.tolist())):
        own = lists.blocks[start:end].tolist()
        num_keys = (len(own) - 1) * block_size + int(lists.last_lens[row])
        assert 1 <= lists.last_lens[row] <= block_size
        expected = (tables[row, : counts[row]].tolist(), contexts[row]) if row < len(rows) else ([0], 1)
        assert (own, num_keys) == expected
    assert np.diff(lists.query_start).tolist() == [*query_lens.tolist(), *[queries] * padding]
    assert lists.query_start[0] == lists.block_start[0] == 0 and lists.block_start[-1] == len(lists.blocks)
    for array in (lists.query_start, lists.block_start, lists.last_lens, lists.blocks):
        assert array.dtype == np.int32


@given(num_tokens=st.integers(1, 300), num_rows=st.integers(1, 40), block_size=st.sampled_from([1, 16]))
def test_padding_has_all_queries_that_a_pass_may_have(num_tokens: int, num_rows: int, block_size: int) -> None:
    lists = padding_lists(num_tokens, num_rows, block_size)
    assert lists.query_start.tolist() == [0, *[num_tokens] * num_rows]
    assert not lists.blocks.any()
    num_keys = (int(lists.block_start[1]) - 1) * block_size + int(lists.last_lens[0])
    assert num_keys == num_tokens
