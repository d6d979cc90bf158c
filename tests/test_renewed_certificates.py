"""Certificates that are renewed while a service runs: each connection that begins then sees the new ones."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from common.access import http_context, server_credentials
from common.peer_tls import PeerTls, certificate_fault, open_peer_channel
from quire.access_settings import AccessSettings
from quire.credentials import Credentials
from quire.errors import UnavailableError
from quire.host_names import HostNames
from quire.servers import Servers
from tests.patience import patient
from tests.peer_certificates import PeerCertificates, grpc_port, peer_tls, served_serial, trusting

NAME = "quire.example.org"

Port = Callable[[PeerCertificates], AbstractAsyncContextManager[str]]


@pytest.fixture
def made(tmp_path: Path) -> PeerCertificates:
    return PeerCertificates(tmp_path / "tls", NAME)


def public_port(made: PeerCertificates) -> AbstractAsyncContextManager[str]:
    return grpc_port(server_credentials(AccessSettings(tls_cert=made.cert, tls_key=made.key)))


@asynccontextmanager
async def http_port(made: PeerCertificates) -> AsyncIterator[str]:
    context = http_context(made.cert, made.key)
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context) as port:
        yield f"127.0.0.1:{port.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("port", [public_port, http_port])
@pytest.mark.parametrize("name", [NAME, None])
async def test_a_new_connection_is_shown_the_renewed_certificate(
    made: PeerCertificates, port: Port, name: str | None
) -> None:
    context = trusting(made)
    async with port(made) as address:
        assert await served_serial(address, context, name) == made.serial
        for _ in range(2):
            made.renew()
            with capture_logs() as logs:
                shown = [await served_serial(address, context, name) for _ in range(3)]
            assert shown == [made.serial] * 3
            assert [(each["event"], each["file"]) for each in logs] == [("certificate renewed", str(made.cert))]


@pytest.mark.parametrize("port", [public_port, http_port])
async def test_half_of_a_renewal_is_refused_once_in_words_and_the_one_before_shown_on(
    made: PeerCertificates, port: Port
) -> None:
    context, serial, key = trusting(made), made.serial, made.key.read_bytes()
    async with port(made) as address:
        made.renew()
        renewed = made.key.read_bytes()
        for broken in (key, renewed[:100], b""):
            made.key.write_bytes(broken)
            with capture_logs() as logs:
                assert [await served_serial(address, context) for _ in range(2)] == [serial] * 2
            (said,) = logs
            assert said["log_level"] == "warning" and said["files"] == [str(made.cert), str(made.key)]
            assert "cannot be used" in said["reason"]
        made.key.unlink()
        assert await served_serial(address, context) == serial
        made.key.write_bytes(renewed)
        assert await served_serial(address, context) == made.serial


async def test_a_connection_that_is_open_stays(made: PeerCertificates) -> None:
    credentials = Credentials(tls_root=str(made.root), tls_server_name=NAME)
    async with public_port(made) as address, credentials.open_channel(address, ()) as channel:
        await asyncio.wait_for(channel.channel_ready(), patient(20))
        made.renew()
        await served_serial(address, trusting(made))
        health: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError) as answer:
            await health(b"\n\x04none", timeout=patient(20))
        assert answer.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("server_name", [None, NAME])
async def test_a_name_of_several_addresses_is_the_one_that_the_certificate_must_have(
    made: PeerCertificates, server_name: str | None
) -> None:
    """Regression: the certificate had to have the address that the name was resolved to."""

    async def look_up(host: str, port: int) -> list[str]:
        return ["127.0.0.1", "127.0.0.2"]

    credentials = Credentials(tls_root=str(made.root), tls_server_name=server_name)
    for given, is_believed in ((NAME, True), ("other.example.org", server_name is not None)):
        async with public_port(made) as address:
            servers = Servers(f"{given}:{address.rpartition(':')[2]}", credentials, names=HostNames(look_up))
            await servers.resolve_again()
            ready = asyncio.create_task(servers.channel_to(address).channel_ready())
            done, _ = await asyncio.wait({ready}, timeout=patient(20) if is_believed else 0.5)
            assert bool(done) == is_believed
            ready.cancel()
            await servers.close()


async def ready(address: str, tls: PeerTls) -> None:
    async with open_peer_channel(address, tls, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        await asyncio.wait_for(channel.channel_ready(), patient(20))


async def test_peers_take_a_renewed_certificate_and_a_renewed_authority(made: PeerCertificates, tmp_path: Path) -> None:
    one, other = peer_tls(made, NAME), PeerCertificates(tmp_path / "other", NAME, authority=made.authority)
    two = peer_tls(other, NAME)
    async with grpc_port(one.of_server) as address:
        await ready(address, two)
        made.renew()
        await ready(address, two)
        strangers = PeerCertificates(tmp_path / "third", NAME)
        made.renew(strangers.authority)
        assert (await certificate_fault(address, two)).startswith("its certificate is not to be trusted")
        other.renew(strangers.authority)
        assert await certificate_fault(address, two) == ""
        await ready(address, two)


async def test_a_certificate_that_its_authority_has_not_signed_is_not_taken(
    made: PeerCertificates, tmp_path: Path
) -> None:
    tls = peer_tls(made, NAME)
    before = tls.of_channel
    stranger = PeerCertificates(tmp_path / "third", NAME)
    with capture_logs() as logs:
        for file, other in ((made.cert, stranger.cert), (made.key, stranger.key)):
            file.write_bytes(other.read_bytes())
            assert tls.of_channel is before
        made.root.write_bytes(stranger.root.read_bytes())
        assert tls.of_channel is not before
    assert [each["event"] for each in logs] == [
        *["renewed certificate not used; the one before is shown on"] * 2,
        "certificate renewed",
    ]


async def test_a_caller_that_reaches_nobody_trusts_what_its_files_have_now(
    made: PeerCertificates, tmp_path: Path
) -> None:
    root = tmp_path / "root.pem"
    root.write_bytes(made.root.read_bytes())
    credentials = Credentials(tls_root=str(root), tls_server_name=NAME)
    stranger = PeerCertificates(tmp_path / "stranger", NAME)
    failure = UnavailableError("nobody answers")
    async with public_port(stranger) as address:
        servers = Servers(address, credentials)
        first = servers.current_channel
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.channel_ready(), 0.5)
        servers.record_failure(failure, was_reached=False)
        assert servers.current_channel is first, "its files have not changed"
        root.write_bytes(made.root.read_bytes() + stranger.root.read_bytes())
        servers.record_failure(failure, was_reached=True)
        assert servers.current_channel is first, "it is reached with those it has"
        servers.record_failure(failure, was_reached=False)
        assert servers.current_channel is not first
        await asyncio.wait_for(servers.current_channel.channel_ready(), patient(20))
        await servers.close()
