"""The listening socket of the gateway."""

import socket

import quire.listening
from quire.listening import ListenError

_BACKLOG = 2048


def listening_socket(listen: str, *, shares_port: bool, slow_reader_timeout_s: float) -> socket.socket:
    """A socket that listens at host:port. Raises ListenError.

    `shares_port`: see `quire.listening`. `slow_reader_timeout_s`: the kernel cuts a connection whose peer takes nothing
    for so long of what was sent, whether it does not read or is gone.
    """
    host, _, port = listen.rpartition(":")
    try:
        sock = quire.listening.listening_socket(host, int(port), backlog=_BACKLOG, shares_port=shares_port)
    except OSError as error:
        raise ListenError(f"cannot listen on {listen}: {error}; choose another address with --listen") from error
    # Connections inherit it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(slow_reader_timeout_s * 1000))
    return sock
