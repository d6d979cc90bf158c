"""Buffers for rows of numbers that are kept from pass to pass and hold as many rows as the largest pass seen."""

import torch
from torch import Tensor

from kernels.native.host_memory import take_memory, zeros_as_used


class RowBuffers:
    """One buffer for each purpose. Who asks again gets the same memory: nothing is kept there across that."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}
        self._num_rows = 0  # of every buffer
        self.num_moves = 0  # how often all of them were given up for larger ones

    def reserve(self, num_rows: int) -> None:
        """Until more are reserved or asked for, no buffer of up to so many rows moves."""
        if num_rows > self._num_rows:
            self._num_rows, self._buffers = num_rows, {}
            self.num_moves += 1

    def of(self, purpose: str, num_rows: int, size: int) -> Tensor:
        """[num_rows, size], contiguous, its contents undefined. A purpose always has the same size."""
        self.reserve(num_rows)
        buffer = self._buffers.get(purpose)
        if buffer is None:
            with torch.inference_mode():
                buffer = self._buffers[purpose] = zeros_as_used((self._num_rows, size), self._dtype)
        return buffer[:num_rows]

    @property
    def num_bytes(self) -> int:
        """Of all buffers that there are."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take_memory(self) -> None:
        """Of all buffers that there are, for all of their rows."""
        for buffer in list(self._buffers.values()):
            take_memory(buffer, buffer.nbytes)
