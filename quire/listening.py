"""A listening socket at an address, by plain sockets. Does not know who will serve it."""

import errno
import socket


class ListenError(OSError):
    """The address cannot be used; the message has the reason and what to do."""


def listening_socket(host: str, port: int, *, backlog: int, shares_port: bool = False) -> socket.socket:
    """A socket that listens there; port 0 takes a free one. Raises OSError.

    With `shares_port` other processes may bind the same port, and the kernel spreads connections over them.
    """
    if port > 65535:
        raise OSError(errno.EINVAL, "a port is at most 65535")
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock
