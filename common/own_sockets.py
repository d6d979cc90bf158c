"""The TCP connections of this process as the kernel has them: bytes received over each, and a way to end one.

gRPC exposes no handle to its connections, so they are found among the open files by their peer's address. A file is
duplicated before it is inspected, so that it stays the same file meanwhile. Without /proc none are found.
"""

import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

_FILES = "/proc/self/fd"
_BYTES_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in Linux's struct tcp_info
_TCP_INFO_BYTES = 256


def bytes_received() -> dict[str, int]:
    """Bytes received over every open TCP connection, by its peer's address and port."""
    found = {}
    for key, each in _connections():
        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) >= _BYTES_RECEIVED.size:
            found[key] = _BYTES_RECEIVED.unpack_from(info)[0]
    return found


def shut_down_connections(keys: Collection[str]) -> int:
    """Ends the connections of these peers, both ways; their owner sees an end of file. Returns how many there were."""
    num_found = 0
    for key, each in _connections():
        if key in keys:
            num_found += 1
            with suppress(OSError):  # its peer has reset it since it was found
                each.shutdown(socket.SHUT_RDWR)
    return num_found


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _connections() -> Iterator[tuple[str, socket.socket]]:
    try:
        names = os.listdir(_FILES)
    except OSError:
        return
    for name in names:
        with _duplicate(int(name)) as each:
            if each is None:
                continue
            try:
                peer = each.getpeername()
                yield f"{peer[0].removeprefix('::ffff:')}:{peer[1]}", each
            except OSError:
                continue  # it listens, or has ended


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    """The file as a socket of its own; None if it is not one of TCP."""
    found = None
    with suppress(OSError):  # closed since it was listed, or no file is left
        copy = os.dup(descriptor)
        try:
            found = socket.socket(fileno=copy)
        except OSError:  # another kind of file
            os.close(copy)
    if found is None:
        yield None
        return
    with found:
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        yield found if is_tcp else None
