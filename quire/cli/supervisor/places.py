"""Addresses: the port to serve on, how to dial it, and whether a store at a URL is there. Plain sockets only."""

import asyncio
import socket
from urllib.parse import urlsplit

from quire.redaction import without_passwords

PROBE_S = 3.0
REDIS_PORT = 6379
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}


class PlaceError(Exception):
    """An address cannot be used; the message says what to do."""


def settle_listen(listen: str) -> str:
    """The address with a port that was free a moment ago; port 0 becomes a real one. Raises PlaceError.

    The scheduler binds it again at each start, so it has to be known before.
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
        raise PlaceError(
            f"cannot listen on {listen}: {error}; stop what uses it, or choose another with --listen host:port"
        ) from error
    return f"{host}:{bound}"


def settle_next(listen: str) -> str:
    """An address for one more server beside one that listens: the next port, or any if that is taken.

    The next one where it can be, so that whoever knows both knows them after a restart as well. Raises PlaceError.
    """
    host, _, port = listen.rpartition(":")
    try:
        return settle_listen(f"{host}:{int(port) + 1}")
    except PlaceError:
        return settle_listen(f"{host}:0")


def dialled(listen: str) -> str:
    """The address at which this machine reaches what listens there."""
    host, _, port = listen.rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"


async def probe_store(url: str) -> None:
    """Raises PlaceError if nothing listens at a store's URL, or something that is no store.

    An answer in the protocol is enough: what a store says against us, it says better to the scheduler.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or REDIS_PORT
    except ValueError:  # its message has a part of what may be a password
        why = "it has no valid port; write / ? # and @ of a password as %2F %3F %23 %40"
        raise _no_store(url, "cannot be used", why) from None
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
        raise _no_store(url, "cannot be reached", str(error) or "no answer") from error
    if not speaks:
        raise _no_store(url, "cannot be used", "what listens there is neither Redis nor Valkey")


async def _speaks_redis(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"PING\r\n")
    return await reader.read(1) in (b"+", b"-")  # +PONG; -NOAUTH, -LOADING and the like


def _no_store(url: str, what: str, why: str) -> PlaceError:
    return PlaceError(
        f"the store at {without_passwords(url)} {what} ({why}); start one there, or leave out the URL to use the "
        "embedded one"
    )
