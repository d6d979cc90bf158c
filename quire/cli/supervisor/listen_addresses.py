"""Addresses: chooses the port to serve on, tells how to dial it, and probes a store's URL. Plain sockets only."""

import asyncio
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from quire.redaction import without_passwords
from quire.store_url import ClusterUrl, is_cluster

PROBE_S = 3.0
REDIS_PORT = 6379
_NEXT_PORTS = 8
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}


class AddressError(Exception):
    """An address cannot be used; the message has the reason and what to do."""


class ListenAddresses:
    """Addresses of one deployment, all with ports of their own: they are held until `close`, so that none is two.

    A port must be known before its service starts, which binds it again at each restart.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[str, socket.socket]] = {}  # by port: the option that chose it

    def choose(self, listen: str, *, option: str = "--listen") -> str:
        """The address with a free port; port 0 becomes a real one. `option` sets the address. Raises AddressError."""
        host, _, port = listen.rpartition(":")
        try:
            probe = _listening(host, int(port))
        except (OSError, OverflowError) as error:
            remedy = f"choose another with {option} host:port"
            if int(port) in self._held and not isinstance(error, socket.gaierror):
                other, _ = self._held[int(port)]
                raise AddressError(f"{other} takes the port of {listen}: {remedy}") from error
            raise AddressError(f"cannot listen on {listen}: {error}; stop what uses it, or {remedy}") from error
        bound: int = probe.getsockname()[1]
        self._held[bound] = (option, probe)
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
        for _, probe in self._held.values():
            probe.close()

    def __enter__(self) -> "ListenAddresses":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dial_address(listen: str) -> str:
    """The address to dial from this machine for a server that listens there."""
    host, _, port = listen.rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OSError or OverflowError."""
    if port > 65535:
        raise OverflowError("a port is at most 65535")
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    probe = socket.socket(family, kind, protocol)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
    except BaseException:
        probe.close()
        raise
    return probe


async def probe_store(url: str) -> None:
    """Raises AddressError if no store listens at the URL; of a cluster it is enough that one of its nodes does.

    Any answer in the Redis protocol is enough: the scheduler reports errors such as a wrong password better.
    """
    nodes = [url]
    if is_cluster(url):
        try:
            cluster = ClusterUrl.parse(url)
        except ValueError as error:
            raise _no_store(url, "cannot be used", str(error)) from None
        nodes = [cluster.of(seed) for seed in cluster.seeds]
    faults = [fault for node in nodes if (fault := await _fault_of(node)) is not None]
    if len(faults) == len(nodes):
        raise _no_store(url, *faults[0])


async def _fault_of(url: str) -> tuple[str, str] | None:
    """Fault of the URL of one server, and its reason; None if a store listens there."""
    try:
        parts = urlsplit(url)
        port = parts.port or REDIS_PORT
    except ValueError:  # its message may contain a part of a password
        return "cannot be used", "it has no valid port; write / ? # and @ of a password as %2F %3F %23 %40"
    try:
        async with asyncio.timeout(PROBE_S):
            if parts.scheme == "unix":
                reader, writer = await asyncio.open_unix_connection(parts.path)
            else:
                reader, writer = await asyncio.open_connection(parts.hostname or "localhost", port)
            try:
                speaks = parts.scheme == "rediss" or await _speaks_redis(reader, writer)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        return "cannot be reached", str(error) or "no answer"
    return None if speaks else ("cannot be used", "what listens there is neither Redis nor Valkey")


async def _speaks_redis(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"PING\r\n")
    return await reader.read(1) in (b"+", b"-")  # +PONG; -NOAUTH, -LOADING and the like


def _no_store(url: str, what: str, why: str) -> AddressError:
    return AddressError(
        f"the store at {without_passwords(url)} {what} ({why}); start one there, or leave the URL out to use the "
        "embedded one"
    )
