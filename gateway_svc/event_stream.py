"""Server-sent events: an answer that is written event by event, and ends when its reader has gone.

Knows no API: an event is bytes, as `data_event` makes them.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway_svc.departure import unless_departed

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
    """Sends the events of a generator, and closes it when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_departed(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
