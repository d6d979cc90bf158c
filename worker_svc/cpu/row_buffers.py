"""Buffers for rows of numbers, reused from pass to pass, with as many rows as the largest pass so far.

Knows how rows lie in memory, not what they contain.
"""

import torch
from torch import Tensor

from kernels.native.host_memory import take_memory, zeros_as_used

_LINE = 64  # bytes of a cache line


class RowBuffers:
    """One buffer per purpose. Asking again returns the same memory, whose content may be overwritten."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}  # with the padding between rows
        self._num_rows = 0  # in every buffer
        self.num_moves = 0  # how often all buffers were replaced by larger ones

    def reserve(self, num_rows: int) -> None:
        """Keep buffers of up to `num_rows` rows in place until more rows are reserved or asked for."""
        if num_rows > self._num_rows:
            self._num_rows, self._buffers = num_rows, {}
            self.num_moves += 1

    def of(self, purpose: str, num_rows: int, size: int) -> Tensor:
        """[num_rows, size], rows apart from one another, contents undefined. A purpose always has the same size."""
        self.reserve(num_rows)
        buffer = self._buffers.get(purpose)
        if buffer is None:
            shape = self._num_rows, row_stride(size, self._dtype)
            with torch.inference_mode():
                buffer = self._buffers[purpose] = zeros_as_used(shape, self._dtype)
        return buffer[:num_rows, :size]

    def take_memory(self) -> None:
        """Have the system back all memory of the existing buffers."""
        for buffer in list(self._buffers.values()):
            take_memory(buffer, buffer.nbytes)


def row_stride(size: int, dtype: torch.dtype) -> int:
    """Stride between rows, in elements: an odd number of cache lines.

    A product reads the same inputs of a dozen rows at a time. Rows that are a power of two apart share a few sets of
    the L1 cache, which then holds fewer of them: with 4,096 inputs in bfloat16, products took 1.4 times as long.
    """
    lines = -(-size * dtype.itemsize // _LINE)
    return (lines | 1) * _LINE // dtype.itemsize
