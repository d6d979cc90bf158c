"""Writer of the body of an answer that comes in pieces, to its connection, without waiting.

ASGI's `send` is a call of a coroutine in every middleware for each piece, which costs more than making the piece. So
the head of such an answer and its end go by `send`, and the pieces between them by the writer of the answer's scope.
"""

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "quire.body"


class TurnWrites:
    """Writers with pieces of this turn of the event loop, which are written at its end, connection after connection.

    A write wakes a client, and takes the processor's caches from what makes the pieces: in a row they cost less.
    """

    def __init__(self) -> None:
        self._writers: list[BodyWriter] = []

    def add(self, writer: "BodyWriter") -> None:
        """Let the writer flush at the end of the turn."""
        if not self._writers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._writers.append(writer)

    def _flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.flush()
            except Exception as error:  # is of one connection
                told = {"message": "a connection cannot be written to", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)


class BodyWriter:
    """Writes pieces of one answer that has no length, from `begin` on."""

    __slots__ = ("_cycle", "_flow", "_has_body", "_is_chunked", "_num_bytes", "_pieces", "_transport", "_turn")

    def __init__(self, cycle: RequestResponseCycle, turn: TurnWrites) -> None:
        """Write the answer of this cycle: its connection knows HTTP's version, and whether the client has gone."""
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._turn = turn
        self._is_chunked = True
        self._has_body = True
        self._pieces: list[bytes] = []  # of this turn
        self._num_bytes = 0  # of them

    def begin(self) -> None:
        """Begin to write: the head was sent, and tells how the body goes."""
        self._is_chunked = bool(self._cycle.chunked_encoding)
        self._has_body = self._cycle.scope["method"] != "HEAD"

    @property
    def is_paused(self) -> bool:
        """True while the client reads too slowly, or there is enough to write: then wait until it is `drained`."""
        return self._flow.write_paused or self._num_bytes > HIGH_WATER_LIMIT

    async def drained(self) -> None:
        """Wait until the client has read most of what was written, or has gone."""
        self.flush()
        await self._flow.drain()

    def write(self, piece: bytes) -> None:
        """Write a piece, at the end of this turn at the latest. An empty one is left out: it would end the body."""
        if not piece or not self._has_body:
            return
        if not self._pieces:
            self._turn.add(self)
        self._pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece)
        self._num_bytes += len(piece)

    def flush(self) -> None:
        """Write at once what is left, unless the client has gone."""
        pieces = self._pieces
        if pieces:
            self._pieces, self._num_bytes = [], 0
            if not self._transport.is_closing():
                self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def offer_body_writer(cycle: RequestResponseCycle, turn: TurnWrites) -> None:
    """Give the scope of a cycle its writer."""
    cycle.scope["extensions"] = {_EXTENSION: {"writer": BodyWriter(cycle, turn)}}


def body_writer(scope: Scope) -> BodyWriter:
    """The writer of the answer to the call with this scope, which our own server has given it."""
    writer: BodyWriter = scope["extensions"][_EXTENSION]["writer"]
    return writer
