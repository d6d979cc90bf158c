"""Server-sent events: an answer that is written event by event, and ends when its reader has gone.

Knows no API: an event is bytes, as `data_event` makes them.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.waits import end_tasks
from gateway_svc.departure import unless_departed

SILENCE_S = 15.0  # after which proxies and clients are told that the answer goes on
_COMMENT = b": waiting\n\n"  # no event
DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy must not collect events


def data_event(data: bytes) -> bytes:
    """One event with JSON data, which has no line breaks."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """One event of a type."""
    return b"event: " + name.encode() + b"\n" + data_event(data)


def with_id(event_id: str, event: bytes) -> bytes:
    """The event with the id by which a client may resume behind it."""
    return b"id: " + event_id.encode() + b"\n" + event


class EventStream(Response):
    """Sends the events of a generator, and closes it when the client disconnects.

    While it has none, a comment is sent now and then: a proxy would take the connection for dead, and its end cancels
    a request that only waits for its turn.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`silence_s`: without an event, after which a comment is sent."""
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._silence_s = silence_s
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_departed(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        commenting = asyncio.create_task(self._send_comments(send))
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    self._num_sent += 1
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            await end_tasks(commenting)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(self._silence_s)
            if num_sent == self._num_sent:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
