"""Stores that are probed before anything is started."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from quire.cli.supervisor.listen_addresses import AddressError
from quire.cli.supervisor.store_probe import probe_store
from quire.typed_names import as_typed
from tests.peer_certificates import PeerCertificates
from tests.valkey import ValkeyProcess


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
    ("answer", "is_store"), [(b"+PONG\r\n", True), (b"-LOADING\r\n", True), (b"HTTP/1.1 400", False)]
)
async def test_what_is_no_store_is_told_by_its_answer(answer: bytes, is_store: bool) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readuntil(b"PING\r\n") == b"*1\r\n$4\r\nPING\r\n"
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as listener:
        url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        if is_store:
            await probe_store(url)
        else:
            with pytest.raises(AddressError, match="neither Redis nor Valkey"):
                await probe_store(url)


async def test_who_has_a_url_in_the_environment_is_told_which_variable_to_leave_out() -> None:
    """Regression: "leave the URL out", said to somebody who had given none."""
    with pytest.raises(AddressError) as refused:
        await probe_store("redis://127.0.0.1:1")
    assert as_typed(str(refused.value), {"redis_url": "REDIS_URL"}).endswith(
        "or leave out REDIS_URL to use the embedded one"
    )


async def test_a_cluster_is_there_if_one_of_its_nodes_is() -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"PING\r\n")
        writer.write(b"+OK\r\n+PONG\r\n")
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
    monkeypatch.setattr("quire.cli.supervisor.store_probe.PROBE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(AddressError, match="no answer"):
        await probe_store(f"redis://127.0.0.1:{listener.getsockname()[1]}")


async def test_a_password_or_database_that_a_store_does_not_take_is_told_at_once(valkey: ValkeyProcess) -> None:
    valkey.command("ACL", "SETUSER", "quire", "on", ">s3/cret", "~{quire:*", "+@all")
    socket_path = valkey.socket_path
    for url in (f"unix://quire:s3%2Fcret@{socket_path}?db=3", f"unix://{socket_path}?username=quire&password=s3/cret"):
        await probe_store(url)
    for url, told in (
        (f"unix://quire:wr0ng@{socket_path}", "WRONGPASS .* check the password"),
        (f"unix://quire:s3%2Fcret@{socket_path}?db=99", "DB index is out of range.* check the number of the database"),
    ):
        with pytest.raises(AddressError, match=f"refuses us .*{told}") as refused:
            await probe_store(url)
        said = str(refused.value).replace(str(socket_path), "")  # whose name is drawn, and may hold any two letters
        assert "wr0ng" not in said and "s3" not in said
    valkey.command("ACL", "SETUSER", "default", "resetpass", ">other")
    with pytest.raises(AddressError, match=r"asks for a password\); write :PASSWORD@ before the host"):
        await probe_store(f"unix://{socket_path}")


async def test_what_the_scheduler_can_use_is_not_refused(valkey: ValkeyProcess) -> None:
    valkey.command("ACL", "SETUSER", "app", "on", ">pw", "~*", "+@all", "-select", "-ping")
    socket_path = valkey.socket_path
    for url in (
        f"unix://:needless@{socket_path}",  # the default user has no password
        f"unix://app:pw@{socket_path}?db=0",
        f"unix://app:pw@{socket_path}?username=another&password=other",
    ):
        await probe_store(url)


@pytest.mark.parametrize("answer", [b"-LOADING\r\n", b"-ERR max number of clients reached\r\n"])
async def test_a_refusal_that_passes_is_left_to_the_scheduler(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"PING\r\n")
        writer.write(answer * 3)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as listener:
        await probe_store(f"redis://u:secret@127.0.0.1:{listener.sockets[0].getsockname()[1]}/3")


async def test_a_store_that_wants_a_certificate_of_its_client_speaks_tls(tmp_path: Path) -> None:
    files = PeerCertificates(tmp_path / "tls", "127.0.0.1")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.root))
    server.load_cert_chain(files.cert, files.key)
    server.maximum_version = ssl.TLSVersion.TLSv1_2  # which refuses within the handshake
    server.verify_mode = ssl.CERT_REQUIRED

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hear, "127.0.0.1", 0, ssl=server) as listener:
        url = f"rediss://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        await probe_store(url)
        await probe_store(f"{url}?ssl_certfile={files.cert}&ssl_keyfile={files.key}")


async def test_a_store_without_tls_is_told_from_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.supervisor.store_probe.PROBE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(AddressError, match="write redis:// if it"):
        await probe_store(f"rediss://127.0.0.1:{listener.getsockname()[1]}")
