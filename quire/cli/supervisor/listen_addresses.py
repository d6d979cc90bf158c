"""Addresses: chooses the ports to serve on, and tells how to dial them. Plain sockets only."""

import errno
import socket
from contextlib import suppress

from quire.listening import listening_socket

_NEXT_PORTS = 8
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}


class AddressError(Exception):
    """An address cannot be used; the message has the reason and what to do."""


class ListenAddresses:
    """Addresses of one deployment, all with ports of their own: they are held until `close`, so that none is two.

    A port must be known before its service starts, which binds it again at each restart.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, socket.socket]] = []  # with the option that chose it

    def choose(self, listen: str, *, option: str = "--listen") -> str:
        """The address with a free port; port 0 becomes a real one. `option` sets the address. Raises AddressError."""
        host, _, port = listen.rpartition(":")
        try:
            probe = listening_socket(host, int(port), backlog=1)
        except OSError as error:
            remedy = f"choose another with {option} host:port"
            taking = [other for other, held in self._held if held.getsockname()[1] == int(port)]
            if taking and error.errno == errno.EADDRINUSE:
                raise AddressError(f"{taking[0]} takes the port of {listen}: {remedy}") from error
            remedy = f"stop what uses it, or {remedy}" if error.errno == errno.EADDRINUSE else remedy
            raise AddressError(f"cannot listen on {listen}: {error}; {remedy}") from error
        bound: int = probe.getsockname()[1]
        self._held.append((option, probe))
        return f"{host}:{bound}"

    def choose_next(self, listen: str) -> str:
        """An address for one more server: one of the next ports, or any free one if they are taken.

        The same ports keep addresses the same after a restart. Raises AddressError.
        """
        host, _, port = listen.rpartition(":")
        for following in range(int(port) + 1, int(port) + 1 + _NEXT_PORTS):
            with suppress(AddressError):
                return self.choose(f"{host}:{following}")
        return self.choose(f"{host}:0")

    def close(self) -> None:
        """Leaves the ports to the services."""
        for _, probe in self._held:
            probe.close()

    def __enter__(self) -> "ListenAddresses":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dial_address(listen: str) -> str:
    """The address to dial from this machine for a server that listens there."""
    host, _, port = listen.rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"
