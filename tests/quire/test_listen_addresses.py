"""Addresses to serve on and to dial, and stores that are probed before anything is started."""

import asyncio
import socket
from pathlib import Path

import pytest

from quire.cli.supervisor.listen_addresses import (
    AddressError,
    ListenAddresses,
    dial_address,
    probe_store,
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


def test_what_listens_everywhere_is_dialled_here() -> None:
    assert dial_address("0.0.0.0:7847") == "127.0.0.1:7847"
    assert dial_address("[::]:7847") == "[::1]:7847"
    assert dial_address("192.0.2.7:1") == "192.0.2.7:1"


async def test_an_absent_store_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"redis://user:\*\*\*@127\.0\.0\.1:1/0 cannot be reached"):
        await probe_store("redis://user:secret@127.0.0.1:1/0")
    with pytest.raises(AddressError, match="cannot be reached"):
        await probe_store(f"unix://{tmp_path}/nothing")
    for url in ("redis://:pa/ss-secret@127.0.0.1:1", "redis://u:p#secret@h", "redis://127.0.0.1:1?password=secret"):
        with pytest.raises(AddressError) as caught:
            await probe_store(url)
        assert (
            "secret" not in str(caught.value) and "pa/ss" not in str(caught.value) and "'pa'" not in str(caught.value)
        )


@pytest.mark.parametrize(
    ("answer", "is_store"), [(b"+PONG\r\n", True), (b"-NOAUTH\r\n", True), (b"HTTP/1.1 400", False)]
)
async def test_what_is_no_store_is_told_by_its_answer(answer: bytes, is_store: bool) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"PING\r\n"
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as listener:
        url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        if is_store:
            await probe_store(url)
        else:
            with pytest.raises(AddressError, match="neither Redis nor Valkey"):
                await probe_store(url)


async def test_a_cluster_is_there_if_one_of_its_nodes_is() -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"+PONG\r\n")
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        await probe_store(f"redis+cluster://u:secret@127.0.0.1:1,127.0.0.1:{port}")
        with pytest.raises(
            AddressError, match=r"redis\+cluster://u:\*\*\*@127\.0\.0\.1:1,127\.0\.0\.1:2 cannot be reach"
        ):
            await probe_store("redis+cluster://u:secret@127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(AddressError, match="no database numbers") as refused:
        await probe_store("redis+cluster://u:secret@h:1,g:1/3")
    assert "secret" not in str(refused.value)


async def test_a_store_that_keeps_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.supervisor.listen_addresses.PROBE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(AddressError, match="no answer"):
        await probe_store(f"redis://127.0.0.1:{listener.getsockname()[1]}")
