"""Attacks of hostile clients on a server of ours: each a blocking function, to be run in a thread of its own.

An attack goes on until its end or until its connection is cut, and returns what it achieved.
"""

import contextlib
import gzip
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from tests.hostile.raw_connection import ConnectionCutError, Headers, RawConnection, message
from tests.patience import patient

GENERATE = "/quire.v1.Inference/Generate"
GET_REQUEST = "/quire.v1.Inference/GetRequest"
SESSION = "/quire.v1.Inference/Session"

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and no settings


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an attack over one connection."""

    num_calls: int  # that went out
    num_bytes: int  # of messages
    was_cut: bool


def compressed_bomb(address: str, method: str, *, num_bytes: int) -> Headers:
    """One small message that grows to `num_bytes` when it is unpacked. Returns the trailers of the answer."""
    bomb = message(gzip.compress(bytes(num_bytes)), is_compressed=True)
    with RawConnection(address) as connection:
        call = connection.open_call(method, grpc_encoding="gzip")
        connection.send(call, bomb, ends=True)
        return connection.until_ended(call)


def unfinished_bodies(address: str, method: str, *, num_calls: int, num_bytes: int, hold_s: float = 0.0) -> Outcome:
    """Calls whose message of 16 MB never comes whole: of each `num_bytes` are sent, and then it is held."""
    body = message(b"", length=16 * 1024 * 1024 - 1) + b"x" * num_bytes
    num_sent = num_begun = 0
    with RawConnection(address) as connection:
        try:
            for _ in range(num_calls):
                call = connection.open_call(method)
                num_begun += 1
                num_sent += connection.send(call, body)
            return Outcome(num_begun, num_sent, connection.until_cut(hold_s))
        except ConnectionCutError:
            return Outcome(num_begun, num_sent, was_cut=True)


def rapid_reset(address: str, method: str, *, num_calls: int, body: bytes | None = None) -> Outcome:
    """Calls opened and taken back in the same write, with a message (`body`) or without."""
    num_begun = 0
    with RawConnection(address) as connection:
        try:
            for _ in range(num_calls):
                with connection.in_one_write():
                    call = connection.open_call(method)
                    num_begun += 1
                    if body is not None:
                        connection.send(call, message(body))
                    connection.reset(call)
                connection.receive(0.0)
        except ConnectionCutError:
            pass
        return Outcome(num_begun, 0, connection.is_cut)


def idle_calls(address: str, method: str, *, num_calls: int) -> tuple[RawConnection, list[int]]:
    """Calls that are opened and then say nothing. The connection stays open: close it."""
    connection = RawConnection(address)
    calls = []
    for _ in range(num_calls):
        calls.append(connection.open_call(method))
        connection.receive(0.0)
    return connection, calls


@contextlib.contextmanager
def connection_flood(address: str, *, num_connections: int) -> Iterator[list[socket.socket]]:
    """Open connections that send only a greeting; yield those that could be opened, until the end of the context."""
    host, _, port = address.rpartition(":")
    opened: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for _ in range(num_connections):
            with contextlib.suppress(OSError):
                opened.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=patient(5.0))))
                opened[-1].sendall(_GREETING)
        yield opened
