"""The listening socket of the gateway."""

import socket

import quire.listening
from quire.listening import ListenError

_BACKLOG = 2048


def listening_socket(listen: str, *, shares_port: bool) -> socket.socket:
    """A socket that listens at host:port. Raises ListenError. `shares_port`: see `quire.listening`."""
    host, _, port = listen.rpartition(":")
    try:
        return quire.listening.listening_socket(host, int(port), backlog=_BACKLOG, shares_port=shares_port)
    except OSError as error:
        raise ListenError(f"cannot listen on {listen}: {error}; choose another address with --listen") from error
