"""Copies from the device that the host does not wait for.

Copies are in pinned memory, which the allocator keeps until the copy is done. Knows nothing of who waits, or when.
"""

import torch
from torch import Tensor

from kernels.sampling.sampling import TokenLogprobs


def to_host(tensor: Tensor) -> Tensor:
    """Queue a copy on the current stream; it is filled once an event recorded after it is reached.

    On a CPU the copy is done at once.
    """
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def logprobs_to_host(logprobs: TokenLogprobs) -> TokenLogprobs:
    """Apply `to_host` to each tensor."""
    return TokenLogprobs(*map(to_host, logprobs))
