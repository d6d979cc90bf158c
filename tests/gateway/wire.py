"""The server's side of one call, as uvicorn has it, on a connection that keeps what is written."""

import asyncio
import logging

from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway_svc.body_writer import TurnWrites, offer_body_writer
from gateway_svc.event_stream import Steps
from gateway_svc.generation import Generation

_LOG = logging.getLogger("test")


class Wire(asyncio.Transport):
    """The end of a connection that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.fills_at = b""  # the piece that fills the connection
        self.flow = FlowControl(self)
        self.is_gone = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))
        if data == self.fills_at:
            self.flow.pause_writing()

    def close(self) -> None:
        """The answer does not keep the connection."""

    def is_closing(self) -> bool:
        return self.is_gone

    @property
    def body(self) -> bytes:
        """Frames that were written behind the head."""
        return b"".join(self.pieces[1:])


class WiredCall:
    """A call whose request has come whole; without a body it has been read."""

    def __init__(self, *, method: str = "POST", path: str = "/", body: bytes = b"", **more_headers: str) -> None:
        self.wire = Wire()
        self.flow = self.wire.flow
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(name.replace("_", "-").encode(), value.encode()) for name, value in more_headers.items()]
        self.cycle = RequestResponseCycle(
            {
                "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
                "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers,
                "root_path": "", "scheme": "http", "server": None, "client": None, "state": {},
            },
            self.wire, self.flow, _LOG, _LOG, False, [], asyncio.Event(), False, True, lambda: None,
        )  # fmt: skip
        self.cycle.body += body
        self.cycle.more_body = False
        if body:
            self.cycle.message_event.set()
        offer_body_writer(self.cycle, TurnWrites())

    async def answer(self, app: ASGIApp) -> None:
        """Let the application answer."""
        await app(self.cycle.scope, self.cycle.receive, self.cycle.send)  # type: ignore[arg-type]

    def leave(self) -> None:
        """The client goes, as the connection tells it."""
        self.wire.is_gone = self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.flow.resume_writing()


def frames(*pieces: bytes) -> bytes:
    """Pieces as chunks of HTTP/1.1."""
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces)


def unframed(data: bytes) -> bytes:
    """The body that chunks of HTTP/1.1 carry."""
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        end = int(size, 16)
        assert rest[end : end + 2] == b"\r\n", data
        body, data = body + rest[:end], rest[end + 2 :]
    return body


def texts(generation: Generation) -> Steps:
    """Each chunk's text as its event."""
    while (found := generation.take()) is not None or not generation.is_at_end:
        yield None if found is None else found[1].text.encode()
