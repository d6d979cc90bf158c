"""One HTTP connection: uvicorn's, with bounds of what a client may leave unfinished, and for clients of HTTP/1.0 and 2.

Knows no route, and no shape of an API: `busy` answers beyond the bound of connections, but for the paths of probes.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from common.open_files import RESERVE
from common.rare_warning import RareWarning
from gateway_svc.body_writer import TurnWrites, offer_body_writer

MAX_HEAD_BYTES = 64 << 10  # of the URL, and the names and values of the fields, of a request
_MAX_PENDING_BYTES = 2 * MAX_HEAD_BYTES  # received without the end of a field, or a piece of a body
_FIELD_BYTES = len(b": \r\n")  # beside its name and its value
MAX_QUEUED = 64  # requests of a connection that wait while one is answered
MOST_BEYOND = RESERVE // 2  # connections beyond the bound: the other files are for the scheduler and the logs
LINGER_S = 30.0  # for the rest of a body that nobody reads, behind the last answer of a connection
_INVALID = b"Invalid HTTP request received."
_TOO_LARGE = b"The head of the request is too large."


class ConnectionRules:
    """Rules and counters that all connections of a server share."""

    def __init__(self, *, max_connections: int, busy: ASGIApp, open_paths: Collection[str], silence_s: float) -> None:
        """Set the rules.

        Args:
            max_connections: how many may be open at once, and some beyond, of which the longest idle is closed.
            busy: answers in place of the application on those beyond, where as many have a request.
            open_paths: those of probes, which the application answers there, too: else they would call it dead.
            silence_s: how long a request may stop before it has come whole.
        """
        self.max_connections = max_connections
        self.busy = busy
        self.open_paths = open_paths
        self.silence_s = silence_s
        self.idle: dict[HttpConnection, None] = {}  # those without a request, first the one that has been so longest
        self.turn = TurnWrites()
        self.refused = RareWarning("requests refused: too many connections are open", most=max_connections)
        self.invalid = RareWarning("invalid HTTP received")


class HttpConnection(HttpToolsProtocol):
    """A connection that is closed if a request stops for too long, has too long a head, or has too many behind it.

    The offer to go on in another protocol, such as HTTP/2, is ignored, as HTTP/1.1 wants it: uvicorn would take what
    follows for that protocol's, and the request's body would be lost.
    """

    def __init__(self, *arguments: Any, rules: ConnectionRules, **keywords: Any) -> None:
        """Make a connection; the other arguments are uvicorn's."""
        super().__init__(*arguments, **keywords)
        self._rules = rules
        self._answering: RequestResponseCycle | None = None  # the one before it if none is answered now
        self._is_beyond = False  # it came when as many as may be were open
        self._silence: asyncio.TimerHandle | None = None
        self._is_arriving = True  # a request has not come whole, or the first has not begun
        self._has_advanced = False
        self._num_head_bytes = 0
        self._num_pending_bytes = 0
        self._is_offering = False  # another protocol
        self._is_lingering = False  # its last answer was sent, and what comes is dropped
        self._is_ending = False  # with the server, which waits until it is closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._is_beyond = self._are_too_many
        self._expect_more()
        self._rules.idle[self] = None
        if len(self.connections) > self._rules.max_connections + MOST_BEYOND:
            self._close_an_idle_one()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._expect_no_more()
        self._rules.idle.pop(self, None)
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True  # uvicorn tells the request that came last, which may wait behind it
            self._answering.message_event.set()

    def shutdown(self) -> None:
        """Close the connection, if need be behind its answer."""
        self._is_ending = True
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Read a piece of a request, or some requests."""
        if self._is_lingering:
            return
        self._unset_keepalive_if_required()
        self._expect_no_more()
        self._has_advanced = False
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, _TOO_LARGE)
            else:
                self._rules.invalid.record()
                self._refuse(400, _INVALID)
            return
        self._num_pending_bytes = 0 if self._has_advanced else self._num_pending_bytes + len(data)
        if self._num_pending_bytes > _MAX_PENDING_BYTES:
            self._refuse(431, _TOO_LARGE)
        elif self._is_arriving and not self.transport.is_closing():
            self._expect_more()
        elif self._is_answered and not self.transport.is_closing():  # without the body that came now
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._is_arriving = True
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Add a piece of the URL."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field, of the head or behind a body in chunks."""
        self._count_head(len(name) + len(value) + _FIELD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, unless the request is read again without its offer."""
        self._has_advanced = True
        if self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("a tunnel is asked for")
        self._is_offering = any(name == b"upgrade" for name, _ in self.headers) and self.parser.should_upgrade()
        if not self._is_offering:
            super().on_headers_complete()
        if len(self.pipeline) > MAX_QUEUED:
            raise httptools.HttpParserError("too many requests wait for their answers")

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of a body."""
        self._has_advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._has_advanced = True
        if not self._is_offering:
            self._is_arriving = False
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request, which has its whole time from here: it was not read before, or did not matter.

        The rest of an answered request's body may never come, so that only the time of a kept connection counts.
        """
        if not self.transport.is_closing():
            self._rules.idle[self] = None
        super().on_response_complete()
        self._expect_no_more()
        if self._is_lingering:
            self._linger()
            return
        is_next = not self._is_answered or not self.cycle.more_body
        if self._is_arriving and is_next and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._expect_more()

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offered:
                rest = rest[offered.args[0] :]
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            with suppress(AttributeError):  # as uvicorn
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)

    def _count_head(self, num_bytes: int) -> None:
        self._has_advanced = True
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise httptools.HttpParserError("the head is too large")

    def _head_without_offer(self) -> bytes:
        kept = b"".join(name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade")
        version = self.parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, kept)

    @property
    def _are_too_many(self) -> bool:
        """True if more connections are open than may be, or as many calls still run, those of ended ones included."""
        most = self._rules.max_connections
        return len(self.connections) > most or len(self.tasks) >= most

    @property
    def _has_room(self) -> bool:
        """True if no more connections have a request, this one included, than may be open, and fewer calls run."""
        most = self._rules.max_connections
        return len(self.connections) - len(self._rules.idle) <= most and len(self.tasks) < most

    def _close_an_idle_one(self) -> None:
        """Close the connection that has been idle longest, and whose last answer is on its way: perhaps this one."""
        idle = next((each for each in self._rules.idle if not each.transport.get_write_buffer_size()), self)
        del self._rules.idle[idle]
        self.connections.discard(idle)
        idle.transport.abort()  # another one needs its file, and does not wait until its client has heard of it

    @property
    def _is_answered(self) -> bool:
        """True if no answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._rules.idle.pop(self, None)
        offer_body_writer(cycle, self._rules.turn)
        if self._is_beyond and not self._has_room:
            if cycle.scope["path"] in self._rules.open_paths:
                cycle.keep_alive = False
            else:
                self._rules.refused.record()
                app = self._rules.busy
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # such a client would take it for the answer
            app = _until_close(cycle, app)
        if cycle.waiting_for_100_continue:
            app = _close_unless_continued(cycle, app)
        app = self._lingering_unless_read(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _lingering_unless_read(self, cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
        """The application for a client that may still send its body when the last answer of the connection is sent.

        If the connection was closed then, the client would be cut off while it writes, and lose the answer.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_last(message: Message) -> None:
                is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
                is_last = not (cycle.keep_alive or cycle.disconnected or self._is_ending)
                if is_end and is_last and cycle.more_body:
                    self._is_lingering = cycle.keep_alive = True  # uvicorn closes it otherwise; the head was sent
                await send(message)

            await app(scope, receive, send_last)

        return answer

    def _linger(self) -> None:
        """Tell the client that nothing more comes, and drop what it sends until it closes, or has had its time."""
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._silence = self.loop.call_later(LINGER_S, self.transport.close)

    def _expect_more(self) -> None:
        self._silence = self.loop.call_later(self._rules.silence_s, self._end_silence)

    def _expect_no_more(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _end_silence(self) -> None:
        is_answering = not self._is_answered and not self.cycle.more_body
        if self.pipeline or is_answering or self.flow.read_paused:  # what follows is not read, or does not matter yet
            self._expect_more()
        else:
            self.transport.close()

    def _refuse(self, status: int, reason: bytes) -> None:
        # Within an answer the words would be part of it. Before it they say why it does not come: what follows a
        # request is most often its body, whose length was not declared.
        if self._is_answered or not (self.cycle.response_started or self.pipeline):
            head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(reason) + reason)
        self.transport.close()


def _close_unless_continued(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The application for a client that waits to be told to send its body.

    If the answer comes before that, nobody knows whether what comes next is the body or another request.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if cycle.waiting_for_100_continue:
                cycle.keep_alive = False
            await send(message)

        await app(scope, receive, send_last)

    return answer


def _until_close(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The application for HTTP/1.0, which has no chunks: an answer without a length ends with the connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
