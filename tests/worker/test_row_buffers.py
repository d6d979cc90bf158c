"""Buffers of a pass: where their rows lie."""

import pytest
import torch

from worker_svc.cpu.row_buffers import RowBuffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 31, 33, 768, 1024, 2048, 4096, 150_016])
def test_a_dozen_rows_share_no_set_of_the_first_cache(size: int, dtype: torch.dtype) -> None:
    """The cache has 64 sets of lines of 64 bytes."""
    rows = RowBuffers(dtype).of("inner", 12, size)
    assert rows.shape == (12, size)
    sets = {row.data_ptr() // 64 % 64 for row in rows}
    assert len(sets) == 12
    assert all(row.data_ptr() % 64 == rows.data_ptr() % 64 for row in rows)


def test_who_asks_again_gets_the_same_memory_until_there_are_more_rows() -> None:
    buffers = RowBuffers(torch.bfloat16)
    first = buffers.of("inner", 5, 40)
    assert buffers.of("inner", 3, 40).data_ptr() == first.data_ptr()
    assert buffers.of("out", 5, 40).data_ptr() != first.data_ptr()
    buffers.of("inner", 6, 40)
    assert buffers.num_moves == 2
