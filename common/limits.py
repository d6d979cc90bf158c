"""The interceptor in front of a server's edge: admits or refuses calls by their connection and host.

Its answers have the same form as those of the edge behind it. A call with a single request message is read here, so
that its peer is known before its bytes arrive.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from common.peer_limits import EdgeLimits, PeerConnection, PeerLimits
from common.rpc import Context, abort_call, behaviour_of
from quire.errors import InvalidRequestError, QuireError, UnavailableError
from quire.rpc import Option

_CANCEL_GRACE_S = 0.1  # for a cancellation to arrive, of which the end of the messages may come first
_HEADER_TIMEOUT_MS = 10_000  # for a new connection to speak HTTP/2


def limit_options(limits: EdgeLimits) -> list[Option]:
    """Server options for the limits that only gRPC itself can enforce."""
    options: list[Option] = [("grpc.server_handshake_timeout_ms", _HEADER_TIMEOUT_MS)]
    if limits.max_connections:
        options.append(("grpc.max_allowed_incoming_connections", limits.max_connections))
    if limits.max_calls_per_connection:
        options.append(("grpc.max_concurrent_streams", limits.max_calls_per_connection))
    return options


class LimitsInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls beyond the limits with RESOURCE_EXHAUSTED and a retry delay. Must be the server's first one."""

    def __init__(self, peers: PeerLimits) -> None:
        self._peers = peers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        call = _Call(self._peers, handler, handler_call_details.method)
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(call.handle, call.decode, handler.response_serializer)


class _Call:
    """One call, from its headers to its end."""

    __slots__ = ("_connection", "_handler", "_inner", "_method", "_peers")

    def __init__(self, peers: PeerLimits, handler: Any, method: str) -> None:
        self._peers = peers
        self._handler = handler
        self._method = method
        self._inner = behaviour_of(handler)
        self._connection: PeerConnection | None = None

    def decode(self, data: bytes) -> Any:
        """A message, counted."""
        assert self._connection is not None
        self._connection.record_message(len(data))
        deserialize = self._handler.request_deserializer
        return data if deserialize is None else deserialize(data)

    async def handle(self, requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            self._connection = connection = self._peers.begin_call(context.peer(), self._method)
        except QuireError as error:
            return await _refuse(context, error)
        is_cancelled = False
        try:
            if self._handler.request_streaming:
                return await self._inner(requests, context)
            try:
                request = await self._read(context)
            except QuireError as error:
                return await _refuse(context, error)
            return await self._inner(request, context)
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            self._peers.end_call(connection, self._method, is_cancelled=is_cancelled)

    async def _read(self, context: Context) -> Any:
        """The one message of the call. Raises QuireError where none comes."""
        timeout_s = self._peers.limits.body_timeout_s or None
        try:
            async with asyncio.timeout(timeout_s):
                request = await context.read()
        except TimeoutError:
            error = f"the request did not arrive completely within {timeout_s:g} s; send it again"
            raise UnavailableError(error) from None
        if request is not grpc.aio.EOF:
            return request
        await asyncio.sleep(_CANCEL_GRACE_S)
        raise InvalidRequestError("the call carried no message; send one")


async def _refuse(context: Context, error: QuireError) -> None:
    try:
        await abort_call(context, error)
    except Exception as failure:  # the client has gone; gRPC has no public name for it
        raise asyncio.CancelledError from failure
