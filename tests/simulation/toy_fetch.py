"""Fetch of blocks between two simulated workers, with the interface of the call that a scheduler has of one.

Blocks come some at a time in virtual time. What comes is kept by the destination's device until a step has placed
the last of it, or the call ends. An end that happens to a worker which is cut off is not heard of.
"""

import asyncio
from collections.abc import Callable
from random import Random

import grpc

from common.arrays import unpack_int32
from common.block_reads import has_read_key
from quire.v1 import worker_pb2
from tests.simulation.toy_device import ToyDevice
from tests.simulation.virtual_loop import Process

_BLOCKS_AT_ONCE = 3
_BLOCKS_S = (0.0005, 0.01)  # for so many to come
_CLOSED = grpc.StatusCode.CANCELLED


class ToyFetch:
    """Call of a fetch. Made in the scheduler's process; it goes on in that of the destination."""

    def __init__(
        self,
        request: worker_pb2.FetchBlocksRequest,
        device: ToyDevice,
        process: Process,
        owner: Process,
        random: Random,
        *,
        is_cut_off: Callable[[], bool],
        find_source: Callable[[worker_pb2.FetchBlocksRequest], "ToyDevice | str"],
    ) -> None:
        """Take the destination's device and process, and the scheduler's process.

        Args:
            request: what is fetched.
            device: of the destination.
            process: of the destination.
            owner: process that reads the progress.
            random: delays are drawn from it.
            is_cut_off: asks whether what the destination sends gets lost.
            find_source: the source's device as the destination reaches it now, or the reason why it does not.
        """
        self._request = request
        self._device = device
        self._owner = owner
        self._random = random
        self._is_cut_off = is_cut_off
        self._find_source = find_source
        self._heard: asyncio.Queue[worker_pb2.FetchBlocksResponse | grpc.StatusCode] = asyncio.Queue()
        self._end: grpc.StatusCode | None = None
        process.spawn(self._run())

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    async def read(self) -> "worker_pb2.FetchBlocksResponse | object":
        """Read the next progress. Returns EOF after the last one, and raises AioRpcError if it ended badly."""
        news = await self._heard.get()
        if isinstance(news, worker_pb2.FetchBlocksResponse):
            return news
        self._heard.put_nowait(news)
        if news is grpc.StatusCode.OK:
            return grpc.aio.EOF
        raise grpc.aio.AioRpcError(news, grpc.aio.Metadata(), grpc.aio.Metadata(), "the fetch has ended")

    def cancel(self) -> None:
        """End the call, in the scheduler's process."""
        self._heard.put_nowait(_CLOSED)
        self.end(_CLOSED)

    def end(self, code: grpc.StatusCode) -> None:
        """End the call: nothing of it is kept any more."""
        if self._end is None:
            self._end = code
            self._device.forget_fetch(self._request.epoch, self._request.fetch_id)
            self._tell(code)

    def _tell(self, news: "worker_pb2.FetchBlocksResponse | grpc.StatusCode") -> None:
        if not self._is_cut_off():
            self._owner.call_later(self._random.uniform(0.0001, 0.001), self._heard.put_nowait, news)

    async def _run(self) -> None:
        request = self._request
        wanted = list(unpack_int32(request.source.block_ids))
        come: list[list[int] | None] = []
        while len(come) < len(wanted) and not self.has_ended:
            await asyncio.sleep(self._random.uniform(*_BLOCKS_S))
            source = self._find_source(request)
            if isinstance(source, str) or self._device.epoch > request.epoch:
                self.end(grpc.StatusCode.FAILED_PRECONDITION)
                return
            come += [source.content(block) for block in wanted[len(come) :][:_BLOCKS_AT_ONCE]]
            if not self.has_ended:
                self._device.keep_fetched(request.epoch, request.fetch_id, come, len(wanted), self._placed)
                self._tell(worker_pb2.FetchBlocksResponse(num_blocks=len(come), duration_ns=1))

    def _placed(self) -> None:
        self.end(grpc.StatusCode.OK)


def check_read(request: worker_pb2.ReadBlocksRequest, incarnation: str, epoch: int, step_key: str) -> str | None:
    """The reason why a source refuses; None if it does not."""
    if request.incarnation != incarnation:
        return "another incarnation"
    if request.epoch != epoch:
        return "another epoch"
    return None if has_read_key(request, step_key) else "another read_key"
