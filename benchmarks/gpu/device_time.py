"""Time that a device takes for queued work: between events of a GPU, by the clock on a CPU.

It knows nothing of what is queued.
"""

from collections.abc import Callable
from statistics import median

import torch

from worker_svc.steps.streams import DeviceEvent

Work = Callable[[], object]


def median_seconds(device: torch.device, work: Work, repeats: int, *, warm_up: int = 1) -> float:
    """Median time of one call, from an idle device until all queued work, on any stream, is done."""
    for _ in range(warm_up):
        work()
    return median(seconds_of(device, work) for _ in range(repeats))


def seconds_of(device: torch.device, work: Work) -> float:
    """Time of one call. The current stream must wait for the other streams that it uses."""
    began, ended = DeviceEvent(device, timed=True), DeviceEvent(device, timed=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return ended.nanoseconds_since(began) / 1e9


def device_name(device: torch.device) -> str:
    """Name of the device, for reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
