"""One copy per step for all arrays from the host to the device.

Arrays are packed one after the other in pinned memory and sent together; each is a view of one buffer on the device.
A captured graph reads the fixed arrays, which always have the same address. Knows nothing of the arrays' meaning.
"""

from collections.abc import Mapping
from itertools import cycle
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.steps.streams import DeviceEvent, DeviceStreams

_ALIGNMENT = 16  # bytes, so that kernels read whole vectors
_NUM_STAGES = 4  # steps in flight or being packed at once; the scheduler has two in flight
_TORCH = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Upload(Protocol):
    """A way to the device for arrays of the host."""

    def add(self, values: npt.NDArray[np.generic]) -> Tensor:
        """An array of any shape, as a contiguous tensor on the device; its content is there once all is sent."""


class DirectUpload:
    """Each array sent by itself, at once; on a CPU the tensor shares its memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def add(self, values: npt.NDArray[np.generic]) -> Tensor:
        """See Upload.add."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


class StepUpload:
    """Packs one step at a time: `begin`, then `put` and `add` in any order, then `send`.

    From `send` on, in the order of the current stream, a view has the content of the step, until the next `send`.
    """

    def __init__(
        self,
        device: torch.device,
        fixed: Mapping[str, tuple[int, torch.dtype]],
        capacity_bytes: int,
        streams: DeviceStreams | None = None,
    ) -> None:
        """`fixed`: length and dtype of one-dimensional arrays, by name; `capacity_bytes`: room for all other arrays.

        `streams` are those of the device unless given.
        """
        starts, end = {}, 0
        for name, (length, dtype) in fixed.items():
            starts[name] = end
            end = _aligned(end + length * dtype.itemsize)
        self._first_free = end
        capacity = end + _aligned(capacity_bytes)
        self._on_device = torch.zeros(capacity, dtype=torch.uint8, device=device)
        self._typed = {dtype: self._on_device.view(dtype) for dtype in _TORCH.values()}
        streams = streams or DeviceStreams(device)
        self._stages = cycle([_Stage(capacity, device, streams.event()) for _ in range(_NUM_STAGES)])
        self._stage: _Stage  # of the step that was begun
        self._end: int  # of what was packed in it
        self._starts = starts
        self.fixed = {  # views on the device
            name: self._view(starts[name], length, dtype) for name, (length, dtype) in fixed.items()
        }

    def begin(self) -> None:
        """Drops the arrays of the last step. Waits only if four steps are in flight."""
        self._stage = next(self._stages)
        self._stage.wait_until_free()
        self._end = self._first_free

    def put(self, name: str, values: npt.NDArray[np.generic]) -> None:
        """Sets the first len(values) elements of a fixed array; the rest of it is undefined."""
        assert values.ndim == 1 and _TORCH[values.dtype] == self.fixed[name].dtype
        assert len(values) <= len(self.fixed[name]), f"{name} has {len(self.fixed[name])} elements"
        self._stage.write(self._starts[name], values)

    def add(self, values: npt.NDArray[np.generic]) -> Tensor:
        """Adds an array of any shape, and returns its view; an array that does not fit in the buffer is sent alone."""
        dtype = _TORCH[values.dtype]
        start, end = self._end, self._end + values.nbytes
        if end > len(self._on_device):
            apart = torch.from_numpy(np.ascontiguousarray(values))
            return (apart.pin_memory() if self._on_device.is_cuda else apart.clone()).to(
                self._on_device.device, non_blocking=True
            )
        self._stage.write(start, values)
        self._end = _aligned(end)
        view = self._view(start, values.size, dtype)
        return view if values.ndim == 1 else view.view(values.shape)

    def send(self) -> None:
        """Queues the copy on the current stream."""
        self._on_device[: self._end].copy_(self._stage.memory[: self._end], non_blocking=True)
        self._stage.sent()

    def _view(self, start: int, length: int, dtype: torch.dtype) -> Tensor:
        first = start // dtype.itemsize
        return self._typed[dtype][first : first + length]


class _Stage:
    """Pinned memory in which one step is packed."""

    def __init__(self, capacity: int, device: torch.device, event: DeviceEvent) -> None:
        self.memory = torch.zeros(capacity, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self.memory.numpy()
        self._event = event

    def write(self, start: int, values: npt.NDArray[np.generic]) -> None:
        flat = np.ascontiguousarray(values).ravel().view(np.uint8)
        self._bytes[start : start + len(flat)] = flat

    def sent(self) -> None:
        self._event.record()

    def wait_until_free(self) -> None:
        self._event.synchronize()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
