"""Streams of a device that is not there: what is queued on them happens later, in an order that their events allow."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random

import torch
from torch import Tensor

from kernels.blocks import kv_blocks
from tests.worker.device.two_streams import Operation, TwoStreams
from worker_svc.steps.streams import DeviceEvent, DeviceStreams, SideStream

_CPU = torch.device("cpu")


class SimulatedStreams(DeviceStreams):
    """A main stream and a side stream, and block moves that are queued on the current one."""

    def __init__(self, random: Random) -> None:
        super().__init__(_CPU)
        self.both = TwoStreams(random)
        self.current = "main"
        self.numbers = count(1)  # of records
        self._random = random

    def event(self, *, timed: bool = False) -> DeviceEvent:
        return _Event(self)

    def side_stream(self) -> SideStream:
        return _Side(self)

    def queue(self, operation: Operation) -> None:
        self.both.do(self.current, operation)
        self.both.run(self._random.choice([0, 0, 1, 3]))  # the device is at work meanwhile

    def copy_by_table(self, source: Tensor, destination: Tensor, table: Tensor, num_groups: int) -> None:
        table = table.clone()  # the next step's upload, which is not simulated, overwrites it
        self.queue(lambda: kv_blocks.copy_by_table(source, destination, table, num_groups))

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        for pair in pairs.split(1):
            self.queue(partial(kv_blocks.swap_blocks, source, destination, pair))


class _Event(DeviceEvent):
    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__(_CPU)
        self._streams = streams
        self._number: int | None = None  # of the last record; who waits, waits for that one

    def record(self) -> None:
        self._number = next(self._streams.numbers)
        self._streams.both.record(self._streams.current, ("event", self._number))

    def hold_stream(self) -> None:
        if self._number is not None:
            self._streams.both.wait(self._streams.current, ("event", self._number))

    def is_reached(self) -> bool:
        return self._number is None or self._streams.both.is_reached(("event", self._number))

    def synchronize(self) -> None:
        while not self.is_reached():
            self._streams.both.run(1)


class _Side(SideStream):
    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__(_CPU)
        self._streams = streams

    @contextmanager
    def current(self) -> Iterator[None]:
        self._streams.current = "side"
        try:
            yield
        finally:
            self._streams.current = "main"
