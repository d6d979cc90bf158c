"""Memory of the host for large tensors: given when it is first written, in huge pages where the system has them.

It knows sizes, not what lies there.
"""

import ctypes
import math
from contextlib import suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

_MADV_POPULATE_WRITE = 23  # Linux 5.14; elsewhere nothing happens
_PIECE_BYTES = 2 << 20


def zeros_as_used(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no time at a start and no memory until they are written; page-aligned.

    Huge pages spare what reads from all over it, such as attention, most address translations, and the system most of
    its work when a process that is killed leaves them.
    """
    numel = math.prod(shape)
    if not numel:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap(-1, numel * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):  # the system has none
        memory.madvise(MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def take_memory(tensor: Tensor, num_bytes: int) -> None:
    """Takes the memory of a tensor's first bytes, with what is in them, before anybody writes there.

    A system gives 10 GB/s of what it has at hand, and a virtual machine whose host has to find it first some 0.4. Meant
    for a thread beside the others.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    end = min(num_bytes, tensor.nbytes)
    for begin in range(0, end, _PIECE_BYTES):
        if madvise(tensor.data_ptr() + begin, min(_PIECE_BYTES, end - begin), _MADV_POPULATE_WRITE):
            return
