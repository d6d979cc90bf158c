"""The check of API keys on a gRPC port. Health and reflection are open to everybody, as usual.

Knows no service beyond those two.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from common.rpc import Context
from quire.api_keys import AcceptedKeys
from quire.errors import UnauthenticatedError

_OPEN = ("/grpc.health.", "/grpc.reflection.")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without an accepted key by UNAUTHENTICATED. Must be behind `EdgeInterceptor`."""

    def __init__(self, keys: AcceptedKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN) or self._is_known(handler_call_details):
            return handler
        return grpc.stream_stream_rpc_method_handler(_refuse)  # a refusal has the same form for every method

    def _is_known(self, details: grpc.HandlerCallDetails) -> bool:
        sent = [value for name, value in details.invocation_metadata or () if name == "authorization"]
        return any(self._keys.accept_header(_as_bytes(value)) for value in sent)


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


async def _refuse(requests: AsyncIterator[bytes], context: Context) -> None:
    raise UnauthenticatedError(
        "the server asks for an API key, and got none that it knows: give api_key, or set QUIRE_API_KEY"
    )
