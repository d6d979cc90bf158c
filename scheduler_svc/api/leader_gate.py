"""Gate in front of the services that only a leader serves: other processes answer with NOT_LEADER and its address.

Knows services by their names alone.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from common.generated_handlers import GeneratedHandlers
from quire.errors import NotLeaderError


class LeaderGate(grpc.GenericRpcHandler):
    """Closed until `open`. Add it to a server once; add the services behind it to `services`."""

    def __init__(self, services: Sequence[str]) -> None:
        """`services`: full names of the services behind the gate."""
        self.services: Any = GeneratedHandlers()  # generated code takes it for a server
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._is_open = False
        self._leader: str | None = None
        # Tasks of calls that stream their answer, while they last; True while gRPC takes a message of one.
        self._streams: dict[asyncio.Task[Any], bool] = {}
        self._has_ended = False

    @property
    def is_open(self) -> bool:
        """True while this process leads."""
        return self._is_open

    def open(self) -> None:
        """Let calls through: this process leads."""
        self._is_open, self._has_ended, self._leader = True, False, None

    def close(self, leader: str | None) -> None:
        """Refuse calls: this process leads no more. Open streams go on until `end_streams`."""
        self._is_open = False
        self._leader = leader

    def end_streams(self) -> None:
        """End the open streams with NOT_LEADER and the leader's address.

        One whose message gRPC is taking ends behind that message: cancelled there, it would end with CANCELLED.
        """
        self._is_open, self._has_ended = False, True
        for task, is_giving in self._streams.items():
            if not is_giving:
                task.cancel()

    def set_leader(self, leader: str | None) -> None:
        """Set the leader's address for refused calls; None: no leader is known."""
        self._leader = leader

    def service(self, handler_call_details: Any) -> Any:
        """Handler of a call; None if its service is not behind the gate."""
        if not handler_call_details.method.startswith(self._prefixes):
            return None
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
            self._streams[task] = False
            try:
                async for response in inner(request, context):
                    self._streams[task] = True
                    yield response
                    self._streams[task] = False
                    if self._has_ended:
                        raise self._not_leader()
            except asyncio.CancelledError:
                if self._is_open:
                    raise
                raise self._not_leader() from None
            finally:
                del self._streams[task]

        return behaviour

    async def _refuse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        raise self._not_leader()

    def _not_leader(self) -> NotLeaderError:
        where = f"; {self._leader} does" if self._leader is not None else ", and no leader is known at the moment"
        return NotLeaderError(f"this scheduler does not lead{where}", self._leader)
