"""Events and streams of a CUDA device; on a CPU, where every call has finished when it returns, events are reached.

Code that queues and waits is so the same for both. Knows nothing of the queued work.
"""

import time
from contextlib import AbstractContextManager, nullcontext

import torch


class DeviceEvent:
    """A point in a stream. Any thread may use it, whatever its current device: on another one it opens no context."""

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self._device = device
        # A thread that waits for it sleeps; otherwise it would keep a core busy.
        self._event = torch.cuda.Event(enable_timing=timed, blocking=True) if device.type == "cuda" else None
        self._reached_ns = 0  # on a CPU

    def record(self) -> None:
        """Place the event behind the work that is queued on the current stream so far."""
        if self._event is None:
            self._reached_ns = time.perf_counter_ns()
        else:
            self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait on the host, without the interpreter's lock. An event never recorded counts as reached."""
        if self._event is not None:
            with torch.cuda.device(self._device):
                self._event.synchronize()

    def is_reached(self) -> bool:
        """True if the work before the event is done, without waiting. An event never recorded counts as reached."""
        if self._event is None:
            return True
        with torch.cuda.device(self._device):
            return bool(self._event.query())

    def hold_stream(self) -> None:
        """Make later work on the current stream wait for the event; the host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def nanoseconds_since(self, earlier: "DeviceEvent") -> int:
        """Time between two timed events, both reached."""
        if self._event is None or earlier._event is None:
            return self._reached_ns - earlier._reached_ns
        with torch.cuda.device(self._device):
            return int(earlier._event.elapsed_time(self._event) * 1e6)


class SideStream:
    """A stream beside the default one; on a CPU there is only one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def current(self) -> AbstractContextManager[object]:
        """Context within which this stream is the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class DeviceStreams:
    """Creates events and side streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def event(self, *, timed: bool = False) -> DeviceEvent:
        return DeviceEvent(self._device, timed=timed)

    def side_stream(self) -> SideStream:
        return SideStream(self._device)
