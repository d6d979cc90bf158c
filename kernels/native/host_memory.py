"""Host memory for large tensors: allocated by the system at the first write, in huge pages where it has them.

Knows sizes, no contents.
"""

import ctypes
import math
from contextlib import suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; elsewhere without effect
_PIECE_BYTES = 2 << 20


def zeros_as_used(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no time at the start and no memory until they are written; page-aligned.

    Huge pages save most address translations of scattered reads, such as attention's, and most of the system's work
    to free the memory of a killed process. Raises MemoryError if the system refuses it, as under `ulimit -v`.
    """
    numel = math.prod(shape)
    if not numel:
        return torch.zeros(shape, dtype=dtype)
    num_bytes = numel * dtype.itemsize
    try:
        memory = mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {num_bytes} bytes of memory: {error}") from error
    with suppress(OSError):  # the system has no huge pages
        memory.madvise(MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def take_memory(tensor: Tensor, num_bytes: int) -> None:
    """Have the system back a tensor's first bytes with memory before the first write; contents do not change.

    A system allocates 10 GB/s from free memory; a virtual machine whose host must find the memory first, about 0.4.
    Meant for a separate thread.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    end = min(num_bytes, tensor.nbytes)
    for begin in range(0, end, _PIECE_BYTES):
        if madvise(tensor.data_ptr() + begin, min(_PIECE_BYTES, end - begin), _MADV_POPULATE_WRITE):
            return
