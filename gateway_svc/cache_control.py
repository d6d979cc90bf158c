"""Answers to GET that no cache may keep: they belong to whoever asked, and are another a moment later.

Without a word on it a cache may keep an answer for a time of its own choice, Varnish for two minutes, and hand it to
callers without a key: of keys it knows `Authorization`, not Anthropic's `x-api-key`. Other methods are not kept anyway.
"""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class NeverCached:
    """Middleware that forbids to keep an answer to GET or HEAD, unless the answer says itself what a cache may do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_uncached(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("cache-control", "no-store")
            await send(message)

        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        await self._app(scope, receive, send_uncached if is_read else send)
