"""Memory of the host for large tensors: given when it is first written, in huge pages where the system has them.

It knows sizes, not what lies there.
"""

import math
from contextlib import suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor


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
