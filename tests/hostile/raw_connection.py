"""One HTTP/2 connection of a client that says what it likes: calls opened, half sent, reset, compressed, abandoned.

Frames are made by `h2`. It keeps to the windows that the server grants, since what is beyond them ends the
connection at once, and to nothing else.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

Headers = dict[str, str]

_CHUNK_BYTES = 1 << 20
_OUTER_TIMEOUT_S = 60.0


class ConnectionCutError(ConnectionError):
    """The server has ended the connection."""


class RawConnection:
    """A connection to host:port. Every method may raise ConnectionCutError.

    `window_bytes`: of each call's answer, until `open_window`; None: as HTTP/2 has it.
    """

    def __init__(self, address: str, *, window_bytes: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.is_cut = False
        self.answered: set[int] = set()  # calls whose answer has begun, by stream
        self.trailers: dict[int, Headers] = {}  # of the calls that the server has ended, by stream
        self.resets: dict[int, int] = {}  # error codes of streams that the server has reset
        self.max_streams: int | None = None  # that the server allows at once
        self._is_holding = False
        self._socket = socket.create_connection((host, int(port)), timeout=_OUTER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        if window_bytes is not None:
            values = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window_bytes}
            self._h2.local_settings = h2.settings.Settings(client=True, initial_values=values)
        self._h2.initiate_connection()
        self._flush()

    def open_call(self, method: str, **headers: str) -> int:
        """Begins a call of `/package.Service/Method`; underscores of header names become hyphens."""
        stream = self._h2.get_next_available_stream_id()
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "hostile"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *((name.replace("_", "-"), value) for name, value in headers.items()),
        ]
        self._h2.send_headers(stream, fields)
        self._flush()
        return stream

    def send(self, stream: int, data: bytes, *, ends: bool = False, timeout_s: float = _OUTER_TIMEOUT_S) -> int:
        """Sends data as the windows allow. Returns how much of it went out before `timeout_s` had passed."""
        sent = 0
        deadline_s = time.monotonic() + timeout_s
        while sent < len(data):
            if stream in self.trailers or stream in self.resets:
                return sent
            room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if room <= 0:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return sent
                self.receive(left_s)
                continue
            chunk = data[sent : sent + room]
            sent += len(chunk)
            self._h2.send_data(stream, chunk, end_stream=ends and sent == len(data))
            self._flush()
            self.receive(0.0)
        return sent

    def open_window(self, stream: int) -> None:
        """Lets the server send what a call's answer has."""
        self._h2.increment_flow_control_window(_CHUNK_BYTES, stream)
        self._flush()

    def until_answered(self, stream: int) -> None:
        """Waits until the server has begun to answer a call. Raises TimeoutError."""
        while stream not in self.answered:
            if not self.receive(_OUTER_TIMEOUT_S):
                raise TimeoutError(f"call {stream} has no answer")

    def reset(self, stream: int) -> None:
        """Takes back a call."""
        with contextlib.suppress(h2.exceptions.StreamClosedError):
            self._h2.reset_stream(stream, error_code=8)
        self._flush()

    @contextlib.contextmanager
    def in_one_write(self) -> Iterator[None]:
        """Send the frames of the context all at once, at its end: the server has them all when it reads the first."""
        self._is_holding = True
        try:
            yield
        finally:
            self._is_holding = False
        self._flush()

    def receive(self, timeout_s: float) -> bool:
        """Takes what the server has sent, waiting for the first byte of it. False: nothing came."""
        self._socket.settimeout(timeout_s or 1e-6)
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except TimeoutError:
            return False
        except OSError as error:
            self._cut(error)
        finally:
            self._socket.settimeout(_OUTER_TIMEOUT_S)
        if not data:
            self._cut(None)
        try:
            events = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            self._cut(error)
        for event in events:
            self._note(event)
        self._flush()
        return True

    def until_ended(self, stream: int, timeout_s: float = _OUTER_TIMEOUT_S) -> Headers:
        """Waits until the server has ended a call. Returns its trailers. Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while stream not in self.trailers:
            if stream in self.resets:
                return {"rst": str(self.resets[stream])}
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"call {stream} has no answer")
            self.receive(left_s)
        return self.trailers[stream]

    def until_cut(self, timeout_s: float = _OUTER_TIMEOUT_S) -> bool:
        """Waits until the server ends the connection. False: it has not."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                self.receive(left_s)
        except ConnectionCutError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
            fields = {str(name): str(value) for name, value in event.headers or ()}
            if event.stream_id is not None:
                self.answered.add(event.stream_id)
                if "grpc-status" in fields:
                    self.trailers[event.stream_id] = fields
        elif isinstance(event, h2.events.StreamReset) and event.stream_id is not None:
            self.resets[event.stream_id] = int(event.error_code or 0)
        elif isinstance(event, h2.events.DataReceived) and event.stream_id is not None:
            self._h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            self.max_streams = self._h2.remote_settings.max_concurrent_streams
        elif isinstance(event, h2.events.ConnectionTerminated):
            self._cut(None)

    def _flush(self) -> None:
        if self._is_holding:
            return
        data = self._h2.data_to_send()
        if data:
            try:
                self._socket.sendall(data)
            except OSError as error:
                self._cut(error)

    def _cut(self, cause: Exception | None) -> None:
        self.is_cut = True
        raise ConnectionCutError("the server has ended the connection") from cause


def message(data: bytes, *, length: int | None = None, is_compressed: bool = False) -> bytes:
    """A gRPC message on the wire; `length` may lie about it."""
    return struct.pack(">BI", int(is_compressed), len(data) if length is None else length) + data
