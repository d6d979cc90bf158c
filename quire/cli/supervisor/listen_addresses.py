"""Addresses: chooses the port to serve on, tells how to dial it, and probes a store's URL. Plain sockets only."""

import asyncio
import socket
from urllib.parse import urlsplit

from quire.redaction import without_passwords
from quire.store_url import ClusterUrl, is_cluster

PROBE_S = 3.0
REDIS_PORT = 6379
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}


class AddressError(Exception):
    """An address cannot be used; the message has the reason and what to do."""


def choose_listen_address(listen: str, *, option: str = "--listen") -> str:
    """The address with a free port; port 0 becomes a real one. Raises AddressError.

    The port must be known before the service starts, which binds it again at each restart. `option` sets the address.
    """
    host, _, port = listen.rpartition(":")
    try:
        if int(port) > 65535:
            raise OverflowError("a port is at most 65535")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            bound: int = probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise AddressError(
            f"cannot listen on {listen}: {error}; stop what uses it, or choose another with {option} host:port"
        ) from error
    return f"{host}:{bound}"


def choose_next_address(listen: str) -> str:
    """An address for a second server: the next port, or any free one if that is taken.

    The next port keeps both addresses the same after a restart. Raises AddressError.
    """
    host, _, port = listen.rpartition(":")
    try:
        return choose_listen_address(f"{host}:{int(port) + 1}")
    except AddressError:
        return choose_listen_address(f"{host}:0")


def dial_address(listen: str) -> str:
    """The address to dial from this machine for a server that listens there."""
    host, _, port = listen.rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"


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
