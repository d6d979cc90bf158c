"""The bound of a request's body, declared or sent."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.api_error import ApiError


class BodyLimit:
    """Middleware that answers 413 to a body that is too large; it reads no more of it than the bound."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, respond: Callable[[Scope, ApiError], Response]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        num_bytes = int(declared) if declared.isdigit() else 0
        if num_bytes > self._max_bytes:
            await self._respond(scope, self._refusal())(scope, receive, send)
            return
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._refusal()
            return message

        async def unless_too_large(message: Message) -> None:
            if num_bytes <= self._max_bytes:
                await send(message)

        await self._app(scope, bounded, unless_too_large)
        if num_bytes > self._max_bytes:  # what the application made of the error is replaced
            await self._respond(scope, self._refusal())(scope, receive, send)

    def _refusal(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes:,} bytes", code="body_too_large")
