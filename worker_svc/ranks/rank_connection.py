"""Connection between rank 0 and another rank of its group: framed messages over a socket, in order.

A frame is its kind and length, two little-endian uint32, and the payload. Knows no payload.
"""

import json
import select
import socket
import struct
import threading
from contextlib import suppress
from enum import IntEnum
from typing import Any

_HEADER = struct.Struct("<II")
_MOST_BYTES = 1 << 30
_MOST_WORDS = 1 << 16  # bytes of a refusal and the frames before it
_RDHUP = getattr(select, "POLLRDHUP", 0)  # Linux
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class FrameKind(IntEnum):
    """Meaning of a frame."""

    HEARTBEAT = 0  # of a rank, every second
    JOIN = 1  # of a rank that has connected: its number
    SET_UP = 2  # of rank 0: settings, and how ranks reduce
    LOADED = 3  # of a rank: its part of the weights is loaded
    REFUSED = 4  # of a rank: why it cannot be loaded
    PLAN = 5  # of rank 0: all ranks are loaded
    OFFER = 6  # of a rank: its number in an agreement, such as the blocks that fit into its memory
    LEAST = 7  # of rank 0: the least number of all ranks
    SWAP_OUT = 8  # of rank 0, as all that follow: block pairs
    SWAP_IN = 9
    COPY = 10
    PASS = 11  # a batch
    LOGITS = 12  # rows of the hidden states of the last pass
    STEP = 13  # for ranks on accelerators, instead of all above: the scheduler's step


class RankLostError(ConnectionError):
    """The process at the other end is gone, or has been silent for too long."""


class RankConnection:
    """One end. Any thread may send; one thread at a time receives."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._sending = threading.Lock()
        stream.settimeout(None)
        if stream.family in (socket.AF_INET, socket.AF_INET6):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_local(self) -> bool:
        """True if the connection can pass file descriptors."""
        return self._socket.family == socket.AF_UNIX

    @property
    def peer_host(self) -> str:
        """Host of the other end; of a local connection this one."""
        return "127.0.0.1" if self.is_local else str(self._socket.getpeername()[0])

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Raises RankLostError."""
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(kind, len(payload)) + payload)
        except OSError as error:
            raise RankLostError(f"the connection broke: {error}") from error

    def send_json(self, kind: FrameKind, **fields: Any) -> None:
        """Raises RankLostError."""
        self.send(kind, json.dumps(fields).encode())

    def send_fd(self, fd: int) -> None:
        """Pass a file descriptor, to be received before any frame that follows."""
        socket.send_fds(self._socket, [b"\0"], [fd])

    def receive_fd(self) -> int:
        """Receive a file descriptor that was sent behind the last received frame. Raises RankLostError."""
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise RankLostError("the connection ended")
        return fds[0]

    def receive(self, timeout_s: float | None = None) -> tuple[FrameKind, bytes]:
        """The next frame but heartbeats. Raises RankLostError, also if nothing comes for `timeout_s`."""
        self._socket.settimeout(timeout_s)
        try:
            while True:
                kind, length = _HEADER.unpack(self._receive_bytes(_HEADER.size))
                if length > _MOST_BYTES:
                    raise RankLostError(f"a frame of {length} bytes came")
                payload = self._receive_bytes(length)
                if kind != FrameKind.HEARTBEAT:
                    return FrameKind(kind), payload
        except RankLostError:
            raise
        except TimeoutError:
            raise RankLostError(f"nothing came for {timeout_s:g} s") from None
        except (OSError, ValueError) as error:
            raise RankLostError(f"the connection broke: {error}") from error

    def receive_json(self, kind: FrameKind, timeout_s: float | None = None) -> dict[str, Any]:
        """The payload of the next frame, which must be of this kind. Raises RankLostError."""
        came, payload = self.receive(timeout_s)
        if came is not kind:
            raise RankLostError(f"a frame {came.name} came instead of {kind.name}")
        fields: dict[str, Any] = json.loads(payload)
        return fields

    def last_words(self) -> str | None:
        """Reason of a refusal by the other end, if that has come; received frames are left."""
        try:
            came = self._socket.recv(_MOST_WORDS, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except OSError:
            return None
        while len(came) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(came)
            payload, came = came[_HEADER.size : _HEADER.size + length], came[_HEADER.size + length :]
            if kind == FrameKind.REFUSED and len(payload) == length:
                return str(json.loads(payload)["reason"])
        return None

    def drain_heartbeats(self) -> bool:
        """Drop what has come. False if the connection has ended."""
        try:
            return bool(self._socket.recv(4096, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def wait_for_end(self, timeout_s: float) -> bool:
        """True if the other end closes within the time; received frames are left."""
        poll = select.poll()
        poll.register(self._socket, _RDHUP)
        return bool(poll.poll(timeout_s * 1000))

    def end(self) -> None:
        """End the connection for both sides; a thread that waits for it sees the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket, which no thread may be using."""
        self._socket.close()

    def _receive_bytes(self, length: int) -> bytes:
        received = bytearray(length)
        view = memoryview(received)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise RankLostError("the connection ended")
            view = view[count:]
        return bytes(received)
