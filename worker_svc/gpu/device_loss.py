"""Tells errors that leave the process without its device from others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker_svc.steps.step_runner import DeviceLostError


@contextmanager
def device_lost_if_it_says_so(device: torch.device | None = None) -> Iterator[None]:
    """Raise DeviceLostError for a device error, which leaves this process without the device; not if memory is short.

    Triton and torch's libraries raise any RuntimeError in both cases. So on a RuntimeError `device`, if given,
    is synchronized: that fails if the device is lost.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) and not is_short_of_memory(error):
            raise DeviceLostError(str(error)) from error
        if device is not None:
            raise_if_lost(device, error)
        raise


def raise_if_lost(device: torch.device, error: Exception) -> None:
    """Raise DeviceLostError if the device does not come to the end of its work any more, behind this error."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except torch.AcceleratorError as lost:
        raise DeviceLostError(f"{error}: {lost}") from error


def is_short_of_memory(error: RuntimeError) -> bool:
    """True if memory of the device, or main memory that it pins, was refused; the device goes on.

    Torch's allocator has an error of its own for that. The runtime, where it makes graphs or pins memory, Triton where
    it loads a kernel, and cuBLAS only say so.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED"))
