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
    except torch.AcceleratorError as error:
        raise DeviceLostError(str(error)) from error
    except RuntimeError as error:
        if device is not None and device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except torch.AcceleratorError as lost:
                raise DeviceLostError(f"{error}: {lost}") from error
        raise
