"""Carrier of blocks between workers: has the destination read them from the source, and reports what has come.

A fetch is a call of the destination, which holds what has come until a step has placed it. Every fetch comes to an end,
whatever happens to the two workers. Does not decide what is fetched: see `core/fetching.py`.
"""

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import grpc
import structlog

from common.arrays import pack_int32
from common.block_reads import read_key
from common.native_faults import CONTROL_FLOW
from common.waits import end_tasks
from quire.rpc import error_of
from quire.v1 import worker_pb2
from scheduler_svc.core.fetching import BlockFetches, Fetch
from scheduler_svc.workers.worker_link import FetchCall, WorkerLink

log = structlog.get_logger()

STALLED_AFTER_S = 3.0  # without another block: computing them is quicker
KEPT_FOR_S = 30.0  # at most, without a step that places a block
_LOOK_S = 0.1  # whether what is kept is needed still


class Peer(NamedTuple):
    """A worker at one end of a fetch."""

    link: WorkerLink
    address: str
    incarnation: str
    step_key: str


class BlockCarrier:
    """Carrier of all fetches of a scheduler."""

    def __init__(
        self,
        fetches: BlockFetches,
        *,
        find_peer: Callable[[str], Peer | None],
        current_epoch: Callable[[], int],
        on_end: Callable[[str, int, int], None],
        wake_workers: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the fetches of the core.

        Args:
            fetches: the core's.
            find_peer: the worker with this id; None if it is not driven any more.
            current_epoch: of the steps.
            on_end: called with the destination, the blocks that have come and the nanoseconds that they took.
            wake_workers: called when a group waits no longer for steps that place what has come.
        """
        self._fetches = fetches
        self._find_peer = find_peer
        self._current_epoch = current_epoch
        self._on_end = on_end
        self._wake_workers = wake_workers
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_started(self) -> None:
        """Carry what the core has begun to fetch. Call it after each plan."""
        for fetch in self._fetches.take_started():
            task = asyncio.create_task(self._carry(fetch), name=f"fetch {fetch.fetch_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all fetches."""
        await end_tasks(*self._tasks)

    async def _carry(self, fetch: Fetch) -> None:
        began_ns = time.monotonic_ns()
        num_come = num_placed = 0
        call: FetchCall | None = None
        reading: asyncio.Task[object] | None = None  # of the next answer
        try:
            call = self._open(fetch)
            while call is not None and num_come < len(fetch.blocks):
                reading = asyncio.create_task(_read(call))
                response = await _in_time(reading)
                if not isinstance(response, worker_pb2.FetchBlocksResponse):
                    num_come = 0
                    break
                num_come = min(max(num_come, response.num_blocks), len(fetch.blocks))
        except grpc.RpcError as error:
            self._log_trouble(fetch, num_come, error)
            num_come = 0  # a worker keeps nothing of a call that has ended
        except TimeoutError as error:
            self._log_trouble(fetch, num_come, error)
        except CONTROL_FLOW:
            num_come = 0
            raise
        except BaseException:  # a fault of our own: its group must not wait for ever
            log.exception("fetch failed", fetch_id=fetch.fetch_id)
        finally:
            num_placed = self._fetches.end(fetch, num_come)
            self._on_end(fetch.destination.worker_id, num_come, time.monotonic_ns() - began_ns)
            for each in (call, reading):
                if each is not None and not num_placed:
                    each.cancel()
        if call is not None and reading is not None and num_placed:
            await self._keep_until_placed(fetch, call, reading)

    def _open(self, fetch: Fetch) -> FetchCall | None:
        source = self._find_peer(fetch.source.worker_id)
        destination = self._find_peer(fetch.destination.worker_id)
        if source is None or destination is None:
            return None
        epoch, block_ids = self._current_epoch(), pack_int32(fetch.blocks)
        request = worker_pb2.FetchBlocksRequest(
            fetch_id=fetch.fetch_id,
            source_address=source.address,
            epoch=epoch,
            source=worker_pb2.ReadBlocksRequest(
                epoch=epoch,
                incarnation=source.incarnation,
                block_ids=block_ids,
                read_key=read_key(source.step_key, epoch, source.incarnation, block_ids),
            ),
        )
        return destination.link.fetch_blocks(request, destination.step_key)

    async def _keep_until_placed(self, fetch: Fetch, call: FetchCall, last: "asyncio.Task[object]") -> None:
        """Keep the call open until the worker ends it, with the last block, or no step is to place any.

        It is not ended while a step in flight places blocks of it, which the worker would refuse. `last`: the last
        reading of an answer, done or not.
        """
        reading = asyncio.create_task(_read_to_end(call, last))
        try:
            clock = asyncio.get_running_loop().time
            num_placed, until_s = fetch.num_placed, clock() + KEPT_FOR_S
            while not reading.done() and self._fetches.is_needed(fetch):
                await asyncio.wait({reading}, timeout=_LOOK_S)
                if fetch.num_placed > num_placed:
                    num_placed, until_s = fetch.num_placed, clock() + KEPT_FOR_S
                elif clock() > until_s:
                    self._log_trouble(fetch, fetch.num_come, TimeoutError())
                    self._drop(fetch)
                    until_s = inf
            if reading.done() and isinstance(error := reading.exception(), grpc.RpcError):
                self._log_trouble(fetch, len(fetch.blocks), error)
        finally:
            self._drop(fetch)
            call.cancel()
            await end_tasks(reading)

    def _drop(self, fetch: Fetch) -> None:
        if self._fetches.drop(fetch):
            self._wake_workers()

    def _log_trouble(self, fetch: Fetch, num_come: int, error: Exception) -> None:
        reason = error_of(error).message if isinstance(error, grpc.RpcError) else "no block came for too long"
        log.warning(
            "fetch broke off: its blocks are computed",
            source=fetch.source.worker_id,
            destination=fetch.destination.worker_id,
            num_blocks=len(fetch.blocks),
            num_come=num_come,
            reason=reason,
        )


async def _read(call: FetchCall) -> object:
    """Read the next answer of a call. Raises RpcError if it ended badly."""
    return await call.read()


async def _in_time(reading: "asyncio.Task[object]") -> object:
    """Result of a reading. Raises TimeoutError if it stalls.

    It goes on then: gRPC would end the call with its reading, and the worker keeps nothing of an ended call.
    """
    await asyncio.wait({reading}, timeout=STALLED_AFTER_S)
    if not reading.done():
        raise TimeoutError
    return reading.result()


async def _read_to_end(call: FetchCall, last: "asyncio.Task[object]") -> None:
    """Read what a call of a fetch says behind `last`, until it has ended. Raises RpcError if it ended badly."""
    response = await last
    while isinstance(response, worker_pb2.FetchBlocksResponse):
        response = await call.read()
