"""Limits on the calls, cancellations and unread bytes of one connection, of one host, and of all together.

Counts calls, cancellations and bytes by connection, and decides which calls are refused and which connections are cut.
It knows no gRPC and no socket: its caller reports calls and messages.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import unquote

from quire.errors import OverloadedError

Key = TypeVar("Key")

CALL_BURST_S = 2.0  # of the call rate that a connection may use at once
CANCEL_BURST_S = 10.0  # of the rate of cancellations
SHORT_BURST = 8  # part of that burst which a host has left after a cut
REMEMBER_CUT_S = 60.0
RETRY_S = 1.0
# Beginnings of the methods that everybody may call, also without a key. Their calls are counted apart from all others,
# so that they fill no room of those.
OPEN_METHODS = ("/grpc.health.", "/grpc.reflection.")
# Vital calls of one method that a connection may have open and that are not counted: whoever needs them makes one after
# the other.
UNCOUNTED_CALLS = 4
# Bytes that come in over a connection beside those of its messages.
CALL_BYTES = 1024  # headers
MESSAGE_BYTES = 64  # frames and prefixes
BYTES_PER_FRAME_BYTE = 256  # of a long message: its frames, and its records with TLS, have 1 byte for some 700
IDLE_BYTES_PER_S = 4096.0  # pings, acknowledgements, windows


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    """Limits of one server. 0 is none. A connection is an address with its port, a host the address without it.

    Calls of OPEN_METHODS are counted apart, up to the same numbers.
    """

    max_connections: int = 4096
    max_calls: int = 10_000  # open, of all
    max_calls_per_host: int = 5_000
    max_calls_per_connection: int = 2_048
    max_calls_of: Mapping[str, int] = field(default_factory=dict)  # open, per host, by full method name
    vital_methods: frozenset[str] = frozenset()  # full names of short calls that keep a deployment alive
    max_call_rate: float = 1_000.0  # calls per second that a connection may begin
    max_cancel_rate: float = 100.0  # calls per second that it may cancel
    max_unread_bytes_per_connection: int = 64 << 20  # received, and not yet a whole message
    max_unread_bytes: int = 256 << 20  # of all
    body_timeout_s: float = 30.0  # for the one message of a call to arrive


class TokenBucket:
    """Rate limit with a burst: at most `burst` tokens, and `rate` more per second. Its debt is at most `burst`, too.

    Callers pass the time.
    """

    __slots__ = ("_burst", "_num_tokens", "_rate", "_seen_s")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate = rate
        self._burst = burst
        self._num_tokens = burst
        self._seen_s = now_s

    @property
    def is_overdrawn(self) -> bool:
        """True once the debt is at its maximum: the caller goes on although no tokens are left."""
        return self._num_tokens <= -self._burst

    def take_token(self, now_s: float) -> bool:
        """Take a token. False: none was left, and the debt grows by one."""
        self._num_tokens = min(self._burst, self._num_tokens + (now_s - self._seen_s) * self._rate)
        self._seen_s = now_s
        self._num_tokens = max(self._num_tokens - 1, -self._burst)
        return self._num_tokens >= 0

    def wait_s(self) -> float:
        """Seconds until a token is available, as of the last `take_token`."""
        return max(0.0, (1 - self._num_tokens) / self._rate)


@dataclass(slots=True, kw_only=True, eq=False)
class PeerConnection:
    """State of one connection, from its first call on."""

    key: str
    host: str
    known_s: float
    calls: TokenBucket
    cancels: TokenBucket
    num_open: int = 0
    num_vital: Counter[str] = field(default_factory=Counter)  # of the open ones, by method
    num_begun: int = 0
    num_messages: int = 0
    num_bytes: int = 0  # of messages that were whole
    is_cut: bool = False

    def record_message(self, num_bytes: int) -> None:
        """Count a complete message that was handed over."""
        self.num_messages += 1
        self.num_bytes += num_bytes

    def num_unread(self, num_received: int, now_s: float) -> int:
        """Upper bound of the bytes in incomplete messages, given all bytes received over the connection."""
        overhead = self.num_begun * CALL_BYTES + self.num_messages * MESSAGE_BYTES
        overhead += self.num_bytes // BYTES_PER_FRAME_BYTE
        overhead += round((now_s - self.known_s) * IDLE_BYTES_PER_S)
        return max(0, num_received - self.num_bytes - overhead)


class PeerLimits:
    """The limits and connections of one server. `cut` receives a connection that goes on beyond its limits, and why."""

    def __init__(
        self,
        limits: EdgeLimits,
        *,
        cut: Callable[[PeerConnection, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.connections: dict[str, PeerConnection] = {}
        self._cut = cut
        self._clock = clock
        # Of OPEN_METHODS (True) and of all others: in all, and by host; then by host and method.
        self._num_open: Counter[bool] = Counter()
        self._num_open_of_host: Counter[tuple[bool, str]] = Counter()
        self._num_open_of: Counter[tuple[str, str]] = Counter()
        self._cuts: dict[str, float] = {}  # by host, when

    def begin_call(self, peer: str, method: str) -> PeerConnection:
        """Admit a call; the caller then calls `end_call` at its end. Raises OverloadedError if it is refused."""
        now_s = self._clock()
        connection = self._connection(peer, now_s)
        connection.num_begun += 1
        if connection.is_cut:
            raise OverloadedError(
                "this connection exceeded the server's limits and is being closed; open another, and send more slowly",
                RETRY_S,
            )
        self._check_rate(connection, now_s)
        if self._is_counted(connection, method):
            self._check_open(connection, method)
            self._count(connection, method, 1)
        connection.num_open += 1
        if method in self.limits.vital_methods:
            connection.num_vital[method] += 1
        return connection

    def end_call(self, connection: PeerConnection, method: str, *, is_cancelled: bool) -> None:
        """Count the end of a call; `is_cancelled`: its client cancelled it."""
        connection.num_open -= 1
        if method in self.limits.vital_methods:
            connection.num_vital[method] -= 1
        if self._is_counted(connection, method):
            self._count(connection, method, -1)
        if is_cancelled and self.limits.max_cancel_rate:
            now_s = self._clock()
            if not connection.cancels.take_token(now_s):
                self.cut(connection, f"more than {self.limits.max_cancel_rate:g} calls cancelled per second")

    def cut(self, connection: PeerConnection, reason: str) -> None:
        """Mark a connection as cut and report it; repeating is harmless."""
        if not connection.is_cut:
            connection.is_cut = True
            self._cuts[connection.host] = self._clock()
            self._cut(connection, reason)

    def forget_closed_connections(self, present: Iterable[str]) -> None:
        """Forget closed connections without open calls; `present`: keys of the connections that are still open."""
        kept = set(present)
        self.connections = {
            key: each for key, each in self.connections.items() if each.num_open or (key in kept and not each.is_cut)
        }
        now_s = self._clock()
        self._cuts = {host: cut_s for host, cut_s in self._cuts.items() if now_s - cut_s < REMEMBER_CUT_S}

    def connections_to_cut(self, num_received: Mapping[str, int]) -> list[tuple[PeerConnection, int]]:
        """Connections to cut for their unread bytes, with those bytes; `num_received`: bytes received, by key.

        Each connection above its own limit; and, while all together exceed theirs, the one with the most.
        """
        now_s = self._clock()
        unread = [
            (each, each.num_unread(num_received[key], now_s))
            for key, each in self.connections.items()
            if key in num_received and not each.is_cut
        ]
        unread.sort(key=lambda pair: pair[1], reverse=True)
        most, most_of_all = self.limits.max_unread_bytes_per_connection, self.limits.max_unread_bytes
        total = sum(num_bytes for _, num_bytes in unread)
        found = []
        for connection, num_bytes in unread:
            if (most and num_bytes > most) or (most_of_all and total > most_of_all):
                found.append((connection, num_bytes))
                total -= num_bytes
        return found

    def _connection(self, peer: str, now_s: float) -> PeerConnection:
        key = connection_key(peer)
        known = self.connections.get(key)
        if known is not None:
            return known
        host, call_rate, cancel_rate = key.rpartition(":")[0], self.limits.max_call_rate, self.limits.max_cancel_rate
        burst = cancel_rate * CANCEL_BURST_S
        if now_s - self._cuts.get(host, -REMEMBER_CUT_S) < REMEMBER_CUT_S:
            burst /= SHORT_BURST
        made = self.connections[key] = PeerConnection(
            key=key,
            host=host,
            known_s=now_s,
            calls=TokenBucket(call_rate, call_rate * CALL_BURST_S, now_s),
            cancels=TokenBucket(cancel_rate, burst, now_s),
        )
        return made

    def _check_rate(self, connection: PeerConnection, now_s: float) -> None:
        rate = self.limits.max_call_rate
        if not rate or connection.calls.take_token(now_s):
            return
        if connection.calls.is_overdrawn:
            self.cut(connection, f"more than {rate:g} calls begun per second, although they were refused")
        raise OverloadedError(
            f"this connection begins more than {rate:g} calls per second; slow down, or send requests over one Session",
            max(0.1, min(connection.calls.wait_s(), 60.0)),
        )

    def _is_counted(self, connection: PeerConnection, method: str) -> bool:
        """False for a vital call as long as its connection has few of them: those are let in whatever is open."""
        return method not in self.limits.vital_methods or connection.num_vital[method] >= UNCOUNTED_CALLS

    def _count(self, connection: PeerConnection, method: str, change: int) -> None:
        is_open_to_all = method.startswith(OPEN_METHODS)
        _add(self._num_open, is_open_to_all, change)
        _add(self._num_open_of_host, (is_open_to_all, connection.host), change)
        _add(self._num_open_of, (connection.host, method), change)

    def _check_open(self, connection: PeerConnection, method: str) -> None:
        limits = self.limits
        host = connection.host
        most_of_method = limits.max_calls_of.get(method, 0)
        name = method.rpartition("/")[2]
        is_open_to_all = method.startswith(OPEN_METHODS)
        kind = " that need no key" if is_open_to_all else ""
        for num_open, most, what in (
            (self._num_open[is_open_to_all], limits.max_calls, f"the server has {{}} calls{kind} open"),
            (
                self._num_open_of_host[is_open_to_all, host],
                limits.max_calls_per_host,
                f"this host has {{}} calls{kind} open",
            ),
            (self._num_open_of[host, method], most_of_method, f"this host has {{}} calls of {name} open"),
        ):
            if most and num_open >= most:
                raise OverloadedError(
                    f"{what.format(num_open)}, which is the limit; end some, or try again later", RETRY_S
                )


def connection_key(peer: str) -> str:
    """Address and port of a peer as gRPC names it; `own_sockets` uses the same key."""
    scheme, _, rest = unquote(peer).partition(":")
    return rest.replace("[", "").replace("]", "") if scheme in ("ipv4", "ipv6") else peer


def _add(counts: Counter[Key], key: Key, change: int) -> None:
    """Change a count; one of 0 is not kept."""
    counts[key] += change
    if not counts[key]:
        del counts[key]
