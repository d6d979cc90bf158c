"""Calls that fetch other workers' blocks: take frames into the memory for them, and tell of progress.

Each fetch ends when its blocks are placed, when its caller leaves, or when the worker follows another epoch.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from common.waits import end_tasks
from quire.address import SCHEMES, check_address
from quire.errors import (
    AlreadyExistsError,
    DataLossError,
    FailedPreconditionError,
    InvalidRequestError,
    OverloadedError,
    QuireError,
)
from quire.v1 import worker_pb2 as pb
from worker_svc.loaded_model import TravellingBlocks
from worker_svc.memory.pool_plan import MOST_BLOCKS
from worker_svc.service.block_reads import parse_block_ids
from worker_svc.service.block_source import BlockSource
from worker_svc.steps.fetched_blocks import FetchEnd, FetchNameTakenError, KeptFetch, NoRoomError
from worker_svc.steps.step_progress import StepProgress
from worker_svc.steps.task_thread import TaskThread

_RETRY_S = 0.1  # until other fetches may have been placed

News = int | FetchEnd | BaseException  # blocks that have come; the end; the failure of the source


class FetchCalls:
    """The fetches of one worker. `thread` writes what comes."""

    def __init__(
        self, travel: TravellingBlocks, progress: StepProgress, thread: TaskThread, source: BlockSource
    ) -> None:
        self._format = travel.format
        self._fetched = travel.fetched
        self._progress = progress
        self._thread = thread
        self._source = source

    async def fetch(self, request: pb.FetchBlocksRequest) -> AsyncGenerator[pb.FetchBlocksResponse]:
        """Fetch blocks, and keep them until they are placed or this generator is closed. Yields the progress.

        Raises QuireError as the proto says.
        """
        began_ns = time.perf_counter_ns()
        news: asyncio.Queue[News] = asyncio.Queue()
        fetch = self._open(request, news)
        source = pb.ReadBlocksRequest()
        source.CopyFrom(request.source)
        source.block_format = self._format
        receiving = asyncio.create_task(self._receive(fetch, request.source_address, source, news))
        try:
            while not isinstance(each := await news.get(), FetchEnd):
                if isinstance(each, BaseException):
                    raise each
                yield pb.FetchBlocksResponse(num_blocks=each, duration_ns=time.perf_counter_ns() - began_ns)
            if each is FetchEnd.OUTDATED:
                raise FailedPreconditionError(f"fetch {fetch.fetch_id} is dropped: {each.value}")
        finally:
            self._fetched.close(fetch)
            await end_tasks(receiving)

    def _open(self, request: pb.FetchBlocksRequest, news: "asyncio.Queue[News]") -> KeptFetch:
        """Reserve memory. Raises QuireError."""
        if request.fetch_id < 1:
            raise InvalidRequestError(f"fetch_id: is {request.fetch_id}: give at least 1")
        _check_source(request.source_address)
        num_blocks = len(parse_block_ids(request.source.block_ids, MOST_BLOCKS))
        followed = self._progress.count.epoch
        if request.epoch < followed:
            raise FailedPreconditionError(f"epoch {request.epoch} has been followed by {followed}")
        loop = asyncio.get_running_loop()

        def on_end(end: FetchEnd) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.put_nowait, end)

        try:
            return self._fetched.open(request.epoch, request.fetch_id, num_blocks, on_end)
        except FetchNameTakenError:
            raise AlreadyExistsError(f"fetch {request.fetch_id} is kept already: give another fetch_id") from None
        except NoRoomError:
            raise OverloadedError(
                f"fetch of {num_blocks} blocks: {self._fetched.num_free} of {self._fetched.max_blocks} are free",
                _RETRY_S,
            ) from None

    async def _receive(
        self, fetch: KeptFetch, address: str, request: pb.ReadBlocksRequest, news: "asyncio.Queue[News]"
    ) -> None:
        """Write all frames; tell of each, and of a failure."""
        try:
            async with aclosing(self._source.frames(address, request)) as frames:
                async for frame in frames:
                    await self._thread.call(partial(self._fetched.write, fetch, frame.first, frame.blocks))
                    if fetch.end is not None:
                        return
                    news.put_nowait(fetch.num_come)
            if fetch.num_come < len(fetch.places):
                raise DataLossError(f"{fetch.num_come} of {len(fetch.places)} blocks came")
        except QuireError as error:
            news.put_nowait(error)
        except ValueError as error:
            news.put_nowait(DataLossError(str(error)))


def _check_source(address: str) -> None:
    """Raises InvalidRequestError unless it is one host and port."""
    try:
        check_address(address)
    except ValueError as error:
        raise InvalidRequestError(f"source_address: {error}") from None
    if "," in address or address.startswith(SCHEMES):
        raise InvalidRequestError("source_address: give one address, host:port")
