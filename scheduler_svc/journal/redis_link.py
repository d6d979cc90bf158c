"""Connection to Redis or Valkey, opened when it is used, with a time limit on every wait.

Sends commands packed by the caller, which is the cheapest way through the client library, and turns the library's
exceptions into the store's. Repeats a command only if the caller says that this is harmless.
"""

import asyncio
import math
import re
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from common.waits import limit_in_turns
from scheduler_svc.journal.store import (
    StaleEntryError,
    StoreConfigurationError,
    StoreTimeoutError,
    StoreUnavailableError,
)

Packed = bytes
_BYTES_PER_S = 8 << 20  # that even a slow way takes
# The library's own time limits start a task per command; ours, in call_many, does not.
_OPTIONS = {"protocol": 3, "socket_timeout": None, "socket_connect_timeout": None}
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")  # that a URL may name
_DATABASE = re.compile(r"/?|/[0-9]{1,9}", re.ASCII)  # path of a URL
_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")
_UNKNOWN = re.compile(r"(?:ERR )?unknown command [`'\"]?([^`'\", ]+)")
_SCRIPT = re.compile(r" script: \S+, on @user_script:\d+\.$| script: on @user_script:\d+\.$")
NEEDED = "Quire needs Redis 7.0 or Valkey 8, or later, with every command under its own name"
_REFUSED = (AuthenticationError, AuthorizationError, NoPermissionError)


class StoreOptionError(ValueError):
    """An option of a store's URL cannot be used; the message shows nothing that stands before the options."""


class _Address:
    """Address of a server, as the links to it know it together: `left_s` is when it was last found to be a replica's.

    Behind one address (of a balancer, a name, a service of Kubernetes) another server may lead by now, while open
    connections stay at the one that led before. Only who writes is told; who reads there would go on for ever.
    """

    def __init__(self) -> None:
        self.left_s = -math.inf


_addresses: WeakValueDictionary[str, _Address] = WeakValueDictionary()  # of the links of this process, by URL


class RedisLink:
    """Commands of concurrent callers follow one another; each gets its own reply.

    After any failure but a reply that says no, the connection is dropped: a late reply can never be taken for the
    next command's. So are those of all links to this URL once one of them finds a replica there.
    """

    def __init__(self, url: str, *, timeout_s: float, repeatable: bool, reports_moves: bool = False) -> None:
        """Take the address. Raises ValueError if it is malformed; the message may show a part of it.

        Args:
            url: redis://, rediss:// or unix://.
            timeout_s: for connecting, sending and the reply together; what is long has longer.
            repeatable: a command whose connection turns out to be lost is sent once more on a new one.
            reports_moves: a call fails, too, if its connection was lost before anything was sent. For who writes in
                order: another server may answer by now, which lacks what this one had acknowledged.
        """
        self._url = url
        self._connection = _connection_to(url)
        self._address = _addresses.setdefault(url, _Address())
        self._connected_s = -math.inf
        self._timeout_s = timeout_s
        self._attempts = 2 if repeatable else 1
        self._reports_moves = reports_moves
        self._lock = asyncio.Lock()
        self._num_calls = 0  # under way, or waiting for their turn

    async def call(self, command: Packed, *, answer_bytes: int = 0) -> Any:
        """Sends one command and returns its reply, which may have so many bytes."""
        return (await self.call_many([command], answer_bytes=answer_bytes))[0]

    async def call_many(
        self, commands: Sequence[Packed], *, then: Sequence[Packed] = (), answer_bytes: int = 0
    ) -> list[Any]:
        """Sends all at once, `then` behind the commands, and returns the replies in this order.

        Raises the first refusal after reading every reply.
        """
        return refusing(await self.exchange([*commands, *then], answer_bytes=answer_bytes))

    async def call_each(self, batches: Sequence[Sequence[Packed]]) -> list[list[Any] | StoreUnavailableError]:
        """Sends several batches at once; returns the replies of each, or why it was refused."""
        replies = iter(await self.exchange([command for batch in batches for command in batch]))
        return [replies_or_refusal([next(replies) for _ in batch]) for batch in batches]

    async def call_nodes(self, commands: Sequence[Packed]) -> dict[str, list[Any] | StoreUnavailableError]:
        """Sends commands to every node that keeps the keys: to this one, which has no address of its own here."""
        return {"": replies_or_refusal(await self.exchange(commands))}

    async def confirm_owner(self) -> None:
        """Return: one server has every key."""

    async def exchange(self, commands: Sequence[Packed], *, answer_bytes: int = 0) -> list[Any]:
        """Sends all at once and returns their replies, with a refusal as a ResponseError among them."""
        timeout_s = self._timeout_s + (sum(map(len, commands)) + answer_bytes) / _BYTES_PER_S
        self._num_calls += 1
        try:
            async with self._lock:
                return await self._exchange_within(timeout_s, commands)
        finally:
            self._num_calls -= 1

    async def _exchange_within(self, timeout_s: float, commands: Sequence[Packed]) -> list[Any]:
        for attempt in range(self._attempts):
            try:
                async with limit_in_turns(timeout_s):  # a reply that lies unread while our loop is blocked counts
                    return await self._exchange(commands)
            except TimeoutError as error:
                raise StoreTimeoutError(f"no answer within {timeout_s:.3g} s") from error
            except (RedisError, OSError) as error:
                # The library may wrap what the server said while connecting.
                if _is_refusal(error) or _is_refusal(error.__cause__):
                    raise StoreConfigurationError(_reason(error)) from error
                if isinstance(error.__context__, ssl.SSLCertVerificationError):
                    raise StoreConfigurationError(_distrust(error.__context__)) from error
                if attempt + 1 == self._attempts:
                    raise StoreUnavailableError(str(error)) from error
        raise AssertionError("there is one attempt at least")

    async def _exchange(self, commands: Sequence[Packed]) -> list[Any]:
        try:
            return await self._send(commands)
        except BaseException:  # the library leaves a unix socket open, at database 0, if a greeting was refused
            await self._connection.disconnect(nowait=True)
            raise

    async def _send(self, commands: Sequence[Packed]) -> list[Any]:
        connection = self._connection
        if connection.is_connected and self._connected_s <= self._address.left_s:
            if self._reports_moves:
                raise ConnectionResetError("another server may answer there by now")
            await connection.disconnect(nowait=True)
        if _is_closing(connection):
            if self._reports_moves:
                raise ConnectionResetError("the connection was lost while it was idle")
            await connection.disconnect(nowait=True)
        if not connection.is_connected:
            connection = self._renew_connection()
        try:
            await connection.send_packed_command(commands, check_health=False)  # connects first if it must
        except RuntimeError as error:  # of uvloop, whose transport was closed meanwhile
            raise ConnectionResetError(str(error)) from error
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(await connection.read_response())
            except ResponseError as error:
                replies.append(error)
        if any(map(_is_of_replica, replies)):
            self._address.left_s = time.monotonic()
        return replies

    def _renew_connection(self) -> AbstractConnection:
        """Make a connection that reads the files of the URL anew; the library keeps what it has read once."""
        try:
            self._connection = _connection_to(self._url)
        except ValueError as error:  # a file is being replaced just now
            raise StoreUnavailableError(str(error)) from error
        self._connected_s = time.monotonic()
        return self._connection

    @property
    def is_busy(self) -> bool:
        """True while a call is under way, or waits for its turn."""
        return self._num_calls > 0

    async def close(self) -> None:
        """Drops the connection; a later command connects again."""
        await self._connection.disconnect(nowait=True)


def pack(*words: bytes | str | int) -> Packed:
    """One command in the protocol's form."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def _connection_to(url: str) -> AbstractConnection:
    options: dict[str, Any] = dict(parse_url(url))
    parts = urlsplit(url)
    if parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path):  # the library would take database 0, or another
        raise ValueError("its database is no number: write redis://host:port/0")
    for name in _FILES:
        if (file := options.get(name)) is not None and not Path(file).is_file():
            raise StoreOptionError(f"{name} is {file}: there is no such file")
    kind = options.pop("connection_class", Connection)
    try:
        connection: AbstractConnection = kind(**{**options, **_OPTIONS})
    except TypeError as error:
        unknown = _UNKNOWN_OPTION.search(str(error))
        if unknown is None:
            raise
        raise StoreOptionError(f"{url.partition(':')[0]}:// has no option {unknown[1]!r}") from error
    except RedisError as error:  # the value of an option
        raise StoreOptionError(str(error)) from error
    return connection


def _is_closing(connection: AbstractConnection) -> bool:
    """True if the transport was closed, as a reset does it; the library takes it for connected."""
    writer: asyncio.StreamWriter | None = getattr(connection, "_writer", None)  # no public name leads to it
    return writer is not None and writer.is_closing()


def refusing(replies: list[Any]) -> list[Any]:
    """The replies. Raises the first refusal among them."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise _refusal(reply) from reply
    return replies


def replies_or_refusal(replies: list[Any]) -> list[Any] | StoreUnavailableError:
    """The replies, or the first refusal among them."""
    try:
        return refusing(replies)
    except StoreUnavailableError as error:
        return error


def _is_of_replica(reply: Any) -> bool:
    """True if this is what a replica answers, or a server that becomes one or ceases to be one."""
    return isinstance(reply, ReadOnlyError | MasterDownError) or (
        isinstance(reply, ResponseError) and "UNBLOCKED" in str(reply)
    )


def _is_refusal(error: BaseException | None) -> bool:
    """True if the server will not take this client, however often it connects."""
    said = str(error)
    is_lasting = "DB index" in said or "NOPROTO" in said or _UNKNOWN.match(said) is not None
    return isinstance(error, _REFUSED) or (isinstance(error, RedisError) and is_lasting)


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    advice = "write ?ssl_ca_certs=FILE behind the address, with the certificate of its authority"
    return f"its certificate is not trusted ({error.verify_message}): {advice}"


def _reason(error: Exception) -> str:
    if "HELLO must be called with the client already authenticated" in str(error):
        return "it asks for a password; write :PASSWORD@ before the host in its URL"
    return _said(error)


def _refusal(error: ResponseError) -> StaleEntryError | StoreUnavailableError:
    if "equal or smaller" in str(error):
        return StaleEntryError(str(error))
    if isinstance(error, MovedError):
        return StoreConfigurationError("it is a node of a cluster; write redis+cluster:// instead of redis://")
    if isinstance(error, _REFUSED) or _UNKNOWN.match(str(error)):
        return StoreConfigurationError(_said(error))
    return StoreUnavailableError(_said(error))


def _said(error: Exception) -> str:
    """Tell what the server said and what to do; never the words of a command, such as a password or a prompt."""
    said = _SCRIPT.sub("", str(error))
    if unknown := _UNKNOWN.match(said):
        name = unknown[1].upper()
        return f"it does not know the command {name}; {NEEDED}, or it is a Sentinel: give the address of the primary"
    if "NOPROTO" in said:
        return f"it does not speak RESP3 ({said}); {NEEDED}"
    if isinstance(error, ReadOnlyError):
        return "it is a read-only replica; give the address of the primary"
    if isinstance(error, OutOfMemoryError):
        return "it is full (used memory > maxmemory); raise maxmemory"
    if said.startswith("NOREPLICAS"):
        return "it has fewer replicas than its min-replicas-to-write; start them, or lower that"
    if said.startswith("WRONGTYPE") or "not an integer" in said:
        return f"a key that begins with {{quire: has a value that Quire did not write ({said}); delete that key"
    has_code = isinstance(error, ResponseError) and type(error) not in (ResponseError, *_REFUSED)  # left out of `said`
    return f"{type(error).__name__}: {said}" if has_code else said
