"""Search for a server that leads by now, for a client of one that gets nothing done any more.

A leader that alone is cut off from the store cannot know that another one leads, and goes on answering its clients.
"""

import asyncio
from collections.abc import Callable, Iterable

import grpc

from quire.errors import DataLossError, NotLeaderError
from quire.rpc import error_of, readable
from quire.servers import Servers
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc

SEARCH_EVERY_S = 4.0  # between the beginnings of two searches
_ANSWER_S = 2.0  # for one server


class LeaderSearch:
    """At most one search at a time, each a moment after the last. Belongs to one event loop."""

    def __init__(self, servers: Servers, on_found: Callable[[], None]) -> None:
        """`on_found` is called after a server with a later epoch has become the current one."""
        self._servers = servers
        self._on_found = on_found
        self._task: asyncio.Task[None] | None = None
        self._may_begin_s = 0.0

    def begin(self) -> None:
        """Search in the background; no-op if the last search has only just begun."""
        loop = asyncio.get_running_loop()
        is_running = self._task is not None and not self._task.done()
        if is_running or loop.time() < self._may_begin_s:
            return
        self._may_begin_s = loop.time() + SEARCH_EVERY_S
        self._task = loop.create_task(self._search(), name="quire-leader-search")

    async def close(self) -> None:
        """End the search."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _search(self) -> None:
        followed = self._servers.current
        others = set(await self._servers.resolve_again()) - {followed}
        if not others:
            return
        found = await self._ask({followed, *others})
        named = {leader for _, leader in found.values() if leader is not None}
        found |= await self._ask(named - found.keys())
        epochs = {address: epoch for address, (epoch, _) in found.items()}
        latest = max(epochs, key=lambda address: epochs[address])
        if epochs[latest] > epochs[followed]:
            self._servers.follow(latest)
            self._on_found()

    async def _ask(self, addresses: Iterable[str]) -> dict[str, tuple[int, str | None]]:
        """Epoch in which each server leads, 0 if it does not; and the leader that it names then, if any."""
        asked = list(addresses)
        answers = await asyncio.gather(*map(self._ask_one, asked))
        return dict(zip(asked, answers, strict=True))

    async def _ask_one(self, address: str) -> tuple[int, str | None]:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(
            self._servers.channel_to(address)
        )
        try:
            metadata = self._servers.metadata
            stats = readable(await stub.GetStats(pb.GetStatsRequest(), metadata=metadata, timeout=_ANSWER_S))
        except DataLossError:
            return 0, None
        except grpc.aio.AioRpcError as error:
            reason = error_of(error)
            return 0, reason.leader if isinstance(reason, NotLeaderError) else None
        return stats.epoch, None
