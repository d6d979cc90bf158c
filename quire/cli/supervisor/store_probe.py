"""Probe of a store's URL before anything is started: whether Redis or Valkey is there, and takes password and database.

Speaks just enough of the protocol. The messages show no password.
"""

import asyncio
import ssl
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from quire.cli.supervisor.listen_addresses import AddressError
from quire.redaction import without_passwords
from quire.store_url import ClusterUrl, is_cluster

PROBE_S = 3.0
REDIS_PORT = 6379
_TO_START = "start one there, or leave out --redis-url to use the embedded one"
# Refusals that a server takes back by itself.
_PASSING = (b"-LOADING", b"-BUSY", b"-MASTERDOWN", b"-ERR max number of clients")
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")  # reasons of OpenSSL


class _Fault(NamedTuple):
    """Fault of the URL of one server, its reason, and what to do."""

    what: str
    why: str
    remedy: str = _TO_START


async def probe_store(url: str) -> None:
    """Raises AddressError if no store serves us at the URL; of a cluster it is enough that one of its nodes does."""
    nodes = [url]
    if is_cluster(url):
        try:
            cluster = ClusterUrl.parse(url)
        except ValueError as error:
            raise _refused(url, _Fault("cannot be used", str(error))) from None
        nodes = [cluster.of(seed) for seed in cluster.seeds]
    faults = [fault for node in nodes if (fault := await _fault_of(node)) is not None]
    if len(faults) == len(nodes):
        raise _refused(url, faults[0])


async def _fault_of(url: str) -> _Fault | None:
    """The fault of the URL of one server; None if a store serves us there."""
    try:
        parts = urlsplit(url)
        port = parts.port or REDIS_PORT
    except ValueError:  # its message may contain a part of a password
        why = "it has no valid port; write / ? # and @ of a password as %2F %3F %23 %40"
        return _Fault("cannot be used", why)
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await _connected(parts, port)
            try:
                return await _greeted(parts, reader, writer)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        why = "no answer" if isinstance(error, ssl.SSLError) else str(error) or "no answer"
        if parts.scheme == "rediss":
            if _is_broken_off(error):  # the scheduler shows it what it may want, such as a certificate
                return None
            return _Fault("cannot be reached", f"{why} by TLS", f"write redis:// if it has none, or {_TO_START}")
        return _Fault("cannot be reached", why)


def _is_broken_off(error: Exception) -> bool:
    """True if a server that may speak TLS ended the handshake."""
    is_tls = isinstance(error, ssl.SSLError) and error.reason not in _NO_TLS
    return is_tls or isinstance(error, ConnectionResetError)


async def _connected(parts: SplitResult, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the server. By TLS its certificate is not looked at: the scheduler does that."""
    if parts.scheme == "unix":
        return await asyncio.open_unix_connection(unquote(parts.path))
    tls = None
    if parts.scheme == "rediss":
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        options = dict(parse_qsl(parts.query))
        if "ssl_certfile" in options:
            tls.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"), options.get("ssl_password"))
    return await asyncio.open_connection(parts.hostname or "localhost", port, ssl=tls)


async def _greeted(parts: SplitResult, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Fault | None:
    """The fault that the first commands of a client find."""
    if parts.scheme == "rediss":  # the password is for whom the certificate names
        return None
    commands = _commands(parts)
    writer.write(b"".join(_packed(*command) for command in commands))
    for name, *_ in commands:
        reply = await reader.readline()
        if reply[:1] not in (b"+", b"-"):
            why = "what listens there is neither Redis nor Valkey, unless it wants TLS, which rediss:// stands for"
            return _Fault("cannot be used", why)
        if reply.startswith(b"-NOAUTH"):
            return _Fault("refuses us", "it asks for a password", "write :PASSWORD@ before the host in its URL")
        if name != "PING" and reply.startswith(b"-") and not reply.startswith(_PASSING):
            why = reply[1:].decode(errors="replace").strip()
            return _Fault("refuses us", why, f"check the {'password' if name == 'AUTH' else 'number of the database'}")
    return None


def _commands(parts: SplitResult) -> list[tuple[str, ...]]:
    """Commands with which the scheduler's client begins, as a server sees them."""
    options = dict(parse_qsl(parts.query))
    user = unquote(parts.username or "") or options.get("username") or "default"
    password = unquote(parts.password or "") or options.get("password")
    path = "" if parts.scheme == "unix" else unquote(parts.path).strip("/")
    database = options.get("db") or path
    commands: list[tuple[str, ...]] = []
    if password:
        commands.append(("AUTH", user, password))
    if database.isascii() and database.isdigit() and int(database):  # each connection begins with database 0
        commands.append(("SELECT", database))
    return [*commands, ("PING",)]


def _packed(*words: str) -> bytes:
    packed = b"*%d\r\n" % len(words)
    for word in words:
        data = word.encode()
        packed += b"$%d\r\n%b\r\n" % (len(data), data)
    return packed


def _refused(url: str, fault: _Fault) -> AddressError:
    return AddressError(f"the store at {without_passwords(url)} {fault.what} ({fault.why}); {fault.remedy}")
