"""Buffers for rows of numbers that are kept from pass to pass and grow to the largest pass seen."""

import torch
from torch import Tensor


class RowBuffers:
    """One buffer for each purpose. Who asks again gets the same memory: nothing is kept there across that."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def of(self, purpose: str, num_rows: int, size: int) -> Tensor:
        """[num_rows, size], contiguous, its contents undefined. A purpose always has the same size."""
        buffer = self._buffers.get(purpose)
        if buffer is None or len(buffer) < num_rows:
            with torch.inference_mode():
                buffer = self._buffers[purpose] = torch.empty((num_rows, size), dtype=self._dtype)
        return buffer[:num_rows]
