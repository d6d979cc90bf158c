"""Gate in front of the services that only a leader serves: other processes answer with NOT_LEADER and its address.

Knows services by their names alone.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc

from quire.errors import NotLeaderError
from quire.rpc import SHARD_KEY

_MOST_DIGITS = 6


class LeaderGate(grpc.GenericRpcHandler):
    """Closed until `open`. Add it to a server once; add the services behind it to `services`."""

    def __init__(self, services: Sequence[str], leader_of: Callable[[int], str | None] = lambda shard: None) -> None:
        """`services`: full names of the services behind the gate. `leader_of`: address of another shard's leader."""
        self.services: Any = _Handlers()  # generated code takes it for a server
        self.shard = 0  # which this process leads or stands by for
        self._leader_of = leader_of
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._is_open = False
        self._leader: str | None = None
        self._streams: set[asyncio.Task[Any]] = set()  # of calls that stream their answer, while they last

    def open(self) -> None:
        """Let calls through: this process leads."""
        self._is_open, self._leader = True, None

    def close(self, leader: str | None) -> None:
        """Refuse calls: this process leads no more. Open streams go on until `end_streams`."""
        self._is_open = False
        self._leader = leader

    def end_streams(self) -> None:
        """End the open streams with NOT_LEADER and the leader's address."""
        self._is_open = False
        for task in self._streams:
            task.cancel()

    def set_leader(self, leader: str | None) -> None:
        """Set the leader's address for refused calls; None: no leader is known."""
        self._leader = leader

    def service(self, handler_call_details: Any) -> Any:
        """Handler of a call; None if its service is not behind the gate."""
        if not handler_call_details.method.startswith(self._prefixes):
            return None
        shard = _shard_wanted(handler_call_details.invocation_metadata)
        if shard is not None and shard != self.shard:
            return grpc.stream_stream_rpc_method_handler(partial(self._refuse_other_shard, shard))
        if not self._is_open:
            return grpc.stream_stream_rpc_method_handler(self._refuse)  # a refusal has the same form for every method
        found = (each.service(handler_call_details) for each in self.services.handlers)
        handler = next((each for each in found if each is not None), None)
        if handler is None or not handler.response_streaming:
            return handler
        make, inner = (
            (grpc.stream_stream_rpc_method_handler, handler.stream_stream)
            if handler.request_streaming
            else (grpc.unary_stream_rpc_method_handler, handler.unary_stream)
        )
        return make(self._ending(inner), handler.request_deserializer, handler.response_serializer)

    def _ending(self, inner: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        """Same stream, ended by `end_streams`."""

        async def behaviour(request: Any, context: Any) -> AsyncIterator[Any]:
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                async for response in inner(request, context):
                    yield response
            except asyncio.CancelledError:
                if self._is_open:
                    raise
                raise self._not_leader() from None
            finally:
                self._streams.discard(task)

        return behaviour

    async def _refuse_other_shard(self, shard: int, requests: AsyncIterator[bytes], context: Any) -> None:
        raise not_leader_of(shard, self._leader_of(shard))

    async def _refuse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        raise self._not_leader()

    def _not_leader(self) -> NotLeaderError:
        where = f"; {self._leader} does" if self._leader is not None else ", and no leader is known at the moment"
        return NotLeaderError(f"this scheduler does not lead{where}", self._leader)


def not_leader_of(shard: int, leader: str | None) -> NotLeaderError:
    """The refusal of a call for a shard that this process does not lead."""
    where = f"; {leader} does" if leader is not None else ", and no leader of it is known at the moment"
    return NotLeaderError(f"this scheduler does not lead shard {shard}{where}", leader)


def _shard_wanted(metadata: Sequence[tuple[str, str | bytes]] | None) -> int | None:
    """The shard that a call is for; None if it does not say, or says nonsense."""
    for name, value in metadata or ():
        if name == SHARD_KEY:
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
    return None


class _Handlers:
    """Handlers that generated code registers."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Add the handlers of one service."""
        self.handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Ignore the same handlers by name, for servers that look them up so."""
