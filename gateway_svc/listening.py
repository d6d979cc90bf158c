"""The listening socket of the gateway."""

import socket


class ListenError(Exception):
    """The address cannot be used; the message has the reason and what to do."""


def listening_socket(listen: str, *, shares_port: bool) -> socket.socket:
    """A socket bound to host:port, which listens once it is served. Raises ListenError.

    With `shares_port` other processes may bind the same port, and the kernel spreads connections over them.
    """
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
            sock.listen(2048)
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        raise ListenError(f"cannot listen on {listen}: {error}; choose another address with --listen") from error
    return sock
