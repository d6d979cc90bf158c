"""Sockets of this process, found by their peers."""

import socket
import struct
from collections.abc import Iterator

import pytest

from common import own_sockets
from common.own_sockets import bytes_received, resident_bytes, shut_down_connections


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest) -> tuple[socket.socket, socket.socket]:
    """A client's socket, and the server's for it."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((request.param, 0))
        listener.listen()
        client = socket.create_connection(listener.getsockname()[:2])
        server, _ = listener.accept()
    request.addfinalizer(client.close)
    request.addfinalizer(server.close)
    return client, server


def _key(client: socket.socket) -> str:
    host, port = client.getsockname()[:2]
    return f"{host}:{port}"


def test_what_came_in_over_a_connection_is_counted_read_or_not(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    assert bytes_received()[_key(client)] == 0
    client.sendall(b"x" * 5000)
    server.recv(1)  # so it has arrived, at least in part
    while bytes_received()[_key(client)] < 5000:
        pass
    assert bytes_received()[_key(client)] == 5000


def test_a_connection_is_shut_down_by_its_peer_and_others_are_not(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    assert shut_down_connections(["127.0.0.1:1"]) == 0
    assert shut_down_connections([_key(client)]) == 1
    assert client.recv(1) == b""
    assert server.recv(1) == b""


def test_a_connection_that_has_gone_is_not_found(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    server.close()
    assert _key(client) not in bytes_received()


def test_a_connection_that_its_peer_resets_meanwhile_keeps_no_other_open(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = pair
    key, find = _key(client), own_sockets._connections

    def reset_when_found() -> Iterator[tuple[str, socket.socket]]:
        for found, each in find():
            if found == key:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            yield found, each

    monkeypatch.setattr(own_sockets, "_connections", reset_when_found)
    assert shut_down_connections([key]) == 1
    with pytest.raises(ConnectionResetError):
        server.recv(1)


def test_the_memory_of_this_process_is_known() -> None:
    assert resident_bytes() > 1 << 20
