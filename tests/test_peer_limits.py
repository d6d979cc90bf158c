"""Limits by connection and host, on a clock of the test's own."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.connection_watch import ConnectionWatch
from common.own_sockets import bytes_received
from common.peer_limits import CALL_BYTES, UNCOUNTED_CALLS, EdgeLimits, PeerConnection, PeerLimits, connection_key
from common.waits import end_tasks
from quire.errors import OverloadedError
from tests.patience import patient

METHOD = "/quire.v1.Inference/Generate"
SESSION = "/quire.v1.Inference/Session"
REGISTER = "/quire.v1.Cluster/Register"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
MIB = 1 << 20


class Gate:
    """PeerLimits with a clock, and what they have cut."""

    def __init__(self, **limits: Any) -> None:
        self.now_s = 1000.0
        self.cut: list[tuple[str, str]] = []
        self.peers = PeerLimits(
            EdgeLimits(**limits),
            cut=lambda connection, reason: self.cut.append((connection.key, reason)),
            clock=lambda: self.now_s,
        )

    def begin_call(self, peer: str = "ipv4:10.0.0.1:1000", method: str = METHOD) -> PeerConnection:
        return self.peers.begin_call(peer, method)


def test_what_one_host_has_open_is_bounded_over_all_its_connections() -> None:
    gate = Gate(max_calls_per_host=3)
    held = [gate.begin_call(f"ipv4:10.0.0.1:{port}") for port in (1, 2, 3)]
    with pytest.raises(OverloadedError, match="this host has 3 calls open, which is the limit") as refused:
        gate.begin_call("ipv4:10.0.0.1:4")
    assert refused.value.retry_after_s > 0
    gate.begin_call("ipv4:10.0.0.2:1")
    gate.peers.end_call(held[0], METHOD, is_cancelled=False)
    gate.begin_call("ipv4:10.0.0.1:4")


def test_what_is_open_in_all_is_bounded() -> None:
    gate = Gate(max_calls=2)
    gate.begin_call("ipv4:10.0.0.1:1")
    gate.begin_call("ipv4:10.0.0.2:1")
    with pytest.raises(OverloadedError, match="the server has 2 calls open"):
        gate.begin_call("ipv4:10.0.0.3:1")


def test_nothing_is_kept_of_hosts_that_were_refused() -> None:
    gate = Gate(max_calls=1)
    held = gate.begin_call("ipv4:10.0.0.1:1")
    for number in range(100):
        with pytest.raises(OverloadedError):
            gate.begin_call(f"ipv4:10.0.1.{number}:1")
    gate.peers.end_call(held, METHOD, is_cancelled=False)
    gate.peers.forget_closed_connections([])
    assert not gate.peers.connections
    assert not gate.peers._num_open_of_host and not gate.peers._num_open_of


def test_a_method_can_have_a_limit_of_its_own() -> None:
    gate = Gate(max_calls_of={SESSION: 1})
    gate.begin_call(method=SESSION)
    gate.begin_call()
    with pytest.raises(OverloadedError, match="this host has 1 calls of Session open"):
        gate.begin_call(method=SESSION)


@pytest.mark.parametrize("limits", [{"max_calls": 3}, {"max_calls_per_host": 3}, {"max_calls_of": {WATCH: 3}}])
def test_calls_that_need_no_key_take_no_room_of_others(limits: dict[str, Any]) -> None:
    gate = Gate(**limits)
    watching = [gate.begin_call(method=WATCH) for _ in range(3)]
    with pytest.raises(OverloadedError, match="has 3 calls"):
        gate.begin_call(method=WATCH)
    others = [gate.begin_call() for _ in range(3)]
    gate.peers.end_call(watching.pop(), WATCH, is_cancelled=False)
    gate.begin_call(method=WATCH)
    if "max_calls_of" not in limits:
        with pytest.raises(OverloadedError, match="has 3 calls open"):
            gate.begin_call()
    gate.peers.end_call(others.pop(), METHOD, is_cancelled=False)
    gate.begin_call()


@pytest.mark.parametrize("method", [REGISTER, CHECK])
def test_vital_calls_are_let_in_whatever_else_is_open(method: str) -> None:
    gate = Gate(max_calls=2, max_calls_per_host=2, vital_methods=frozenset({REGISTER, CHECK}))
    for each in (METHOD, METHOD, WATCH, WATCH):
        gate.begin_call(method=each)
    for port in range(1000, 1010):
        for _ in range(UNCOUNTED_CALLS):
            gate.begin_call(f"ipv4:10.0.0.1:{port}", method)
        with pytest.raises(OverloadedError):  # no connection needs so many at once
            gate.begin_call(f"ipv4:10.0.0.1:{port}", method)


def test_vital_calls_beyond_the_first_of_a_connection_count_until_as_many_have_ended() -> None:
    gate = Gate(max_calls=2, vital_methods=frozenset({REGISTER, CHECK}))
    for method in (REGISTER, CHECK):
        open_calls = [gate.begin_call(method=method) for _ in range(UNCOUNTED_CALLS + 2)]
        for call in open_calls:
            gate.peers.end_call(call, method, is_cancelled=False)
    for _ in range(2):
        gate.begin_call()
        gate.begin_call(method=WATCH)
    gate.begin_call(method=REGISTER)


def test_the_rate_of_vital_calls_is_limited_like_that_of_others() -> None:
    gate = Gate(max_call_rate=10, vital_methods=frozenset({CHECK}))
    for _ in range(20):
        gate.peers.end_call(gate.begin_call(method=CHECK), CHECK, is_cancelled=False)
    with pytest.raises(OverloadedError, match="begins more than 10 calls per second"):
        gate.begin_call(method=CHECK)


def test_a_refused_call_counts_as_begun_and_not_as_open() -> None:
    gate = Gate(max_calls=1)
    held = gate.begin_call()
    for _ in range(5):
        with pytest.raises(OverloadedError):
            gate.begin_call()
    gate.peers.end_call(held, METHOD, is_cancelled=False)
    assert gate.begin_call().num_open == 1


def test_zero_is_no_limit() -> None:
    gate = Gate(max_calls=0, max_calls_per_host=0, max_call_rate=0, max_cancel_rate=0, max_unread_bytes=0)
    for _ in range(10_000):
        gate.peers.end_call(gate.begin_call(), METHOD, is_cancelled=True)
    for _ in range(10_000):
        gate.begin_call()
    assert gate.cut == []


def test_calls_begin_at_a_rate_with_two_seconds_worth_at_once() -> None:
    gate = Gate(max_call_rate=10)
    for _ in range(20):
        gate.peers.end_call(gate.begin_call(), METHOD, is_cancelled=False)
    with pytest.raises(OverloadedError, match="begins more than 10 calls per second") as refused:
        gate.begin_call()
    gate.now_s += refused.value.retry_after_s
    gate.begin_call()
    assert gate.cut == []


def test_who_goes_on_although_it_is_refused_is_cut_once() -> None:
    gate = Gate(max_call_rate=10)
    for _ in range(100):
        try:
            gate.peers.end_call(gate.begin_call(), METHOD, is_cancelled=False)
        except OverloadedError:
            continue
    assert [key for key, _ in gate.cut] == ["10.0.0.1:1000"]


def test_who_comes_back_when_it_is_told_to_is_never_cut() -> None:
    gate = Gate(max_call_rate=10)
    for _ in range(1000):
        try:
            gate.peers.end_call(gate.begin_call(), METHOD, is_cancelled=False)
        except OverloadedError as refused:
            gate.now_s += refused.retry_after_s
    assert gate.cut == []


def test_cancelling_at_the_rate_is_harmless_and_beyond_it_cuts() -> None:
    gate = Gate(max_cancel_rate=10, max_call_rate=0)
    for _ in range(500):
        gate.now_s += 0.1
        gate.peers.end_call(gate.begin_call(), METHOD, is_cancelled=True)
    assert gate.cut == []
    for _ in range(98):  # ten seconds' worth
        gate.peers.end_call(gate.begin_call(), METHOD, is_cancelled=True)
    assert gate.cut == []
    for _ in range(3):
        if not gate.cut:
            gate.peers.end_call(gate.begin_call(), METHOD, is_cancelled=True)
    assert len(gate.cut) == 1


def test_after_a_cut_the_next_connection_of_that_host_has_less_patience() -> None:
    gate = Gate(max_cancel_rate=8, max_call_rate=0)

    def num_until_cut(peer: str) -> int:
        num_cut = len(gate.cut)
        for number in range(1000):
            gate.peers.end_call(gate.begin_call(peer), METHOD, is_cancelled=True)
            if len(gate.cut) > num_cut:
                return number
        raise AssertionError("not cut")

    assert num_until_cut("ipv4:10.0.0.1:1") == 80
    assert num_until_cut("ipv4:10.0.0.1:2") == 10
    assert num_until_cut("ipv4:10.0.0.2:1") == 80
    gate.now_s += 61  # it is forgotten
    assert num_until_cut("ipv4:10.0.0.1:3") == 80


def test_what_is_unread_is_what_came_in_less_the_messages_that_came_of_it() -> None:
    gate = Gate()
    connection = gate.begin_call()
    connection.record_message(10 * MIB)
    received = 10 * MIB + CALL_BYTES
    assert connection.num_unread(received, gate.now_s) == 0
    assert connection.num_unread(received + MIB, gate.now_s) == pytest.approx(MIB, abs=CALL_BYTES + 10 * MIB // 256)


def test_frames_and_records_of_long_messages_are_no_unread_message() -> None:
    """Regression: a busy client with TLS was cut within a day. 4 MB have 5,460 bytes of them, as measured."""
    gate = Gate()
    connection = gate.begin_call()
    day_s, num_messages = 86_400, 2 * 86_400
    for _ in range(num_messages):
        connection.record_message(4_000_000)
    assert connection.num_unread(num_messages * 4_005_460, gate.now_s + day_s) == 0


def test_overhead_of_years_is_no_unread_message() -> None:
    """A ping and its answer each second, 30 bytes with their share of the windows' updates."""
    gate = Gate()
    connection = gate.begin_call()
    year_s = 365 * 86_400
    assert connection.num_unread(30 * year_s, gate.now_s + year_s) == 0


def test_who_holds_too_much_goes_and_of_all_together_who_holds_most() -> None:
    gate = Gate(max_unread_bytes_per_connection=64 * MIB, max_unread_bytes=100 * MIB)
    sizes = {1: 70, 2: 60, 3: 50, 4: 30, 5: 1}
    for port in sizes:
        gate.begin_call(f"ipv4:10.0.0.1:{port}")
    hoarders = gate.peers.connections_to_cut({f"10.0.0.1:{port}": size * MIB for port, size in sizes.items()})
    assert [connection.key for connection, _ in hoarders] == ["10.0.0.1:1", "10.0.0.1:2"]


def test_connections_that_have_gone_are_forgotten_and_those_with_calls_are_not() -> None:
    gate = Gate()
    idle, busy, gone = (gate.begin_call(f"ipv4:10.0.0.1:{port}") for port in (1, 2, 3))
    for each in (idle, gone):
        gate.peers.end_call(each, METHOD, is_cancelled=False)
    gate.peers.forget_closed_connections(["10.0.0.1:1"])
    assert set(gate.peers.connections) == {idle.key, busy.key}


@pytest.mark.parametrize(
    ("peer", "key"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1:5000"),
        ("ipv6:%5B::1%5D:5000", "::1:5000"),
        ("ipv6:[fe80::1]:5000", "fe80::1:5000"),
        ("unix:/run/quire", "unix:/run/quire"),
    ],
)
def test_peers_are_known_by_the_names_of_their_sockets(peer: str, key: str) -> None:
    assert connection_key(peer) == key


def test_limits_of_nothing_watch_nothing() -> None:
    assert ConnectionWatch(EdgeLimits()).peers.connections_to_cut(bytes_received()) == []


async def test_connections_are_watched_on_after_a_look_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the watch would be the end of every limit of connections, unseen: nothing waits for it."""
    looked: list[int] = []
    is_watched_on = asyncio.Event()

    def resident() -> int:
        looked.append(1)
        if len(looked) == 1:
            raise OSError("no more files")
        is_watched_on.set()
        return 0

    monkeypatch.setattr("common.connection_watch.resident_bytes", resident)
    monkeypatch.setattr("common.connection_watch.LOOK_EVERY_S", 0.001)
    monkeypatch.setattr("common.connection_watch.TIDY_SOON_S", 0.001)
    watching = asyncio.create_task(ConnectionWatch(EdgeLimits()).run())
    with capture_logs() as logs:
        await asyncio.wait_for(is_watched_on.wait(), patient(10))
    await end_tasks(watching)
    assert [line["event"] for line in logs] == ["connections were not looked at"]
