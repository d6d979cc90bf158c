"""The check of API keys on a gRPC port. Health and reflection are open to everybody, as usual.

A stream of requests ends at the first message after its key has been revoked. Knows no service beyond those two.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from common.peer_limits import OPEN_METHODS
from common.rpc import Context, behaviour_of
from quire.api_keys import AcceptedKeys
from quire.errors import UnauthenticatedError


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without an accepted key by UNAUTHENTICATED. Must be behind `EdgeInterceptor`.

    `keys`: the present ones; the same object as long as they have not changed.
    """

    def __init__(self, keys: Callable[[], AcceptedKeys]) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_METHODS):
            return handler
        pass_ = _Pass(self._keys, handler_call_details)
        if not pass_.is_valid():
            return grpc.stream_stream_rpc_method_handler(_refuse)  # a refusal has the same form for every method
        return _guarded(handler, pass_) if handler.request_streaming else handler


class _Pass:
    """The keys that one caller has sent, and whether they are accepted now."""

    def __init__(self, keys: Callable[[], AcceptedKeys], details: grpc.HandlerCallDetails) -> None:
        self._keys = keys
        self._sent = [_as_bytes(value) for name, value in details.invocation_metadata or () if name == "authorization"]
        self._accepted_by: AcceptedKeys | None = None

    def is_valid(self) -> bool:
        keys = self._keys()
        if keys is not self._accepted_by:
            self._accepted_by = keys if any(map(keys.accept_header, self._sent)) else None
        return self._accepted_by is not None


class _GuardedRequests:
    """The requests of a stream, as long as the caller's pass is valid; then UnauthenticatedError.

    No generator, which a refused request would end: see `CheckedRequests`.
    """

    def __init__(self, requests: AsyncIterator[Any], pass_: _Pass) -> None:
        self._requests = requests
        self._pass = pass_

    def __aiter__(self) -> "_GuardedRequests":
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        if not self._pass.is_valid():
            raise UnauthenticatedError("the API key of this stream is accepted no longer")
        return request


def _guarded(handler: Any, pass_: _Pass) -> "grpc.RpcMethodHandler[Any, Any]":
    inner = behaviour_of(handler)
    make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.stream_unary_rpc_method_handler
    return make(
        lambda requests, context: inner(_GuardedRequests(requests, pass_), context),
        handler.request_deserializer,
        handler.response_serializer,
    )


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


async def _refuse(requests: AsyncIterator[bytes], context: Context) -> None:
    raise UnauthenticatedError(
        "the server asks for an API key, and got none that it knows: give api_key, or set QUIRE_API_KEY"
    )
