"""Events and streams of a CUDA device; on a CPU, where all is done when a call returns, they are always reached.

So what is queued and waited for reads the same on both. It knows nothing of what is queued.
"""

import time
from contextlib import AbstractContextManager, nullcontext

import torch


class DeviceEvent:
    """A point in a stream."""

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self._event = torch.cuda.Event(enable_timing=timed) if device.type == "cuda" else None
        self._reached_ns = 0  # on a CPU

    def record(self) -> None:
        """Reached once all that was queued on the current stream so far is done."""
        if self._event is None:
            self._reached_ns = time.perf_counter_ns()
        else:
            self._event.record()

    def synchronize(self) -> None:
        """The host waits, without the interpreter's lock. One never recorded is reached."""
        if self._event is not None:
            self._event.synchronize()

    def is_reached(self) -> bool:
        """Without waiting. One never recorded is reached."""
        return self._event is None or self._event.query()

    def hold_stream(self) -> None:
        """What is queued on the current stream from now on waits; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def nanoseconds_since(self, earlier: "DeviceEvent") -> int:
        """Between two timed events, both reached."""
        if self._event is None or earlier._event is None:
            return self._reached_ns - earlier._reached_ns
        return int(earlier._event.elapsed_time(self._event) * 1e6)


class SideStream:
    """A stream beside the default one; on a CPU there is only one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def current(self) -> AbstractContextManager[object]:
        """Within it, this stream is the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class DeviceStreams:
    """Where a device's events and side streams come from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def event(self, *, timed: bool = False) -> DeviceEvent:
        return DeviceEvent(self._device, timed=timed)

    def side_stream(self) -> SideStream:
        return SideStream(self._device)
