"""Addresses to serve on and to dial."""

import socket

import pytest

from quire.cli.supervisor.listen_addresses import (
    AddressError,
    ListenAddresses,
    dial_address,
)


def chosen_alone(listen: str) -> str:
    with ListenAddresses() as chosen:
        return chosen.choose(listen)


def test_port_zero_becomes_a_port_and_a_port_in_use_is_refused() -> None:
    address = chosen_alone("127.0.0.1:0")
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    with socket.create_server((host, int(port))), pytest.raises(AddressError, match=r"in use; .* --listen"):
        chosen_alone(address)
    with pytest.raises(AddressError, match="--listen"):
        chosen_alone("127.0.0.1:99999")
    with pytest.raises(AddressError, match="--listen"):
        chosen_alone("203.0.113.1:0")  # not an address of this machine
    assert chosen_alone(address) == address  # nothing is held any more


def test_a_second_server_takes_one_of_the_next_ports_or_any_that_is_free() -> None:
    host = "127.0.0.1"
    with socket.create_server((host, 0)) as neighbour, ListenAddresses() as chosen:
        taken = int(neighbour.getsockname()[1])
        other = chosen.choose_next(f"{host}:{taken - 1}")
        assert other not in (f"{host}:{taken - 1}", f"{host}:{taken}")
    with ListenAddresses() as chosen:
        assert chosen.choose_next(f"{host}:{taken - 1}") == f"{host}:{taken}"
        assert chosen.choose_next(f"{host}:65535") != f"{host}:65535"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_no_two_servers_get_one_port(host: str) -> None:
    with ListenAddresses() as chosen:
        first = chosen.choose("127.0.0.1:0")
        port = first.rpartition(":")[2]
        with pytest.raises(
            AddressError, match=f"^--listen takes the port of {host}:{port}: choose another with --http"
        ):
            chosen.choose(f"{host}:{port}", option="--http")
        http = chosen.choose_next(first)
        assert len({first, http, chosen.choose_next(first), chosen.choose_next(http)}) == 4


def test_one_port_of_several_addresses_is_held_on_each() -> None:
    with ListenAddresses() as chosen:
        port = chosen.choose("127.0.0.1:0").rpartition(":")[2]
        chosen.choose(f"127.0.0.2:{port}", option="--http")
        for host in ("127.0.0.1", "127.0.0.2"):
            with pytest.raises(AddressError, match="takes the port"):
                chosen.choose(f"{host}:{port}")
        with pytest.raises(AddressError, match=f"^cannot listen on 203.0.113.1:{port}"):
            chosen.choose(f"203.0.113.1:{port}")


def test_only_an_address_in_use_is_said_to_be_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as neighbour, ListenAddresses() as chosen:
        with pytest.raises(
            AddressError, match=r"in use; stop what uses it, or choose another with --listen host:port$"
        ):
            chosen.choose(f"127.0.0.1:{neighbour.getsockname()[1]}")
        with pytest.raises(AddressError, match=r"assign requested address; choose another with --listen host:port$"):
            chosen.choose("203.0.113.1:0")


def test_what_listens_everywhere_is_dialled_here() -> None:
    assert dial_address("0.0.0.0:7847") == "127.0.0.1:7847"
    assert dial_address("[::]:7847") == "[::1]:7847"
    assert dial_address("192.0.2.7:1") == "192.0.2.7:1"
