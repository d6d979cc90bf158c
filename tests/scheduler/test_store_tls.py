"""Stores that speak TLS: a certificate that is not trusted, or a file that is not there, is told at once, by name."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from scheduler_svc.journal.open_store import open_store
from scheduler_svc.journal.redis_link import RedisLink, pack
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError
from tests.patience import patient
from tests.peer_certificates import PeerCertificates
from tests.scheduler.scripted_cluster import CUT, PING, ScriptedNode


@pytest.fixture
def files(tmp_path: Path) -> PeerCertificates:
    return PeerCertificates(tmp_path / "certificates", "localhost")


@pytest.fixture
async def url(files: PeerCertificates) -> AsyncIterator[str]:
    """URL of a server that shows its certificate and says nothing more."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)

    async def hear(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hear, "127.0.0.1", 0, ssl=context) as listener:
        yield f"rediss://localhost:{listener.sockets[0].getsockname()[1]}"


async def test_a_certificate_that_is_not_trusted_is_refused_at_once(url: str) -> None:
    async with asyncio.timeout(patient(10)):
        with pytest.raises(StoreConfigurationError) as refused:
            await open_store(url, patience_s=3600)
    message = str(refused.value)
    assert f"the store at {url} refuses us: its certificate is not trusted" in message
    assert "ssl_ca_certs=" in message


async def test_a_certificate_for_another_name_is_refused_at_once(url: str, files: PeerCertificates) -> None:
    there = url.replace("localhost", "127.0.0.1")
    async with asyncio.timeout(patient(10)):
        with pytest.raises(StoreConfigurationError, match=r"its certificate is not trusted .*127\.0\.0\.1"):
            await open_store(f"{there}?ssl_ca_certs={files.root}", patience_s=3600)


@pytest.mark.parametrize("user", ["", "u:s3cret@"])
@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster"])
@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
async def test_a_file_that_is_not_there_is_named(url: str, tmp_path: Path, option: str, scheme: str, user: str) -> None:
    url = url.replace("rediss://", f"{scheme}://{user}")
    with pytest.raises(
        StoreConfigurationError, match=rf"{option} is {tmp_path}/none: there is no such file"
    ) as refused:
        await open_store(f"{url}?{option}={tmp_path}/none", patience_s=3600)
    assert "s3cret" not in str(refused.value)


@pytest.fixture
async def connected(files: PeerCertificates) -> AsyncIterator[tuple[RedisLink, ScriptedNode, ssl.SSLContext]]:
    """A link that is connected, its server, and the context that this shows to new connections."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    node = ScriptedNode("a")
    await node.start(context)
    url = f"rediss://localhost:{node.address.rpartition(':')[2]}?ssl_ca_certs={files.root}"
    link = RedisLink(url, timeout_s=patient(20.0), repeatable=True)
    assert await link.call(PING) == b"a:PING"
    yield link, node, context
    await link.close()
    await node.stop()


async def test_files_that_were_renewed_are_read_for_the_next_connection(
    connected: tuple[RedisLink, ScriptedNode, ssl.SSLContext], files: PeerCertificates
) -> None:
    link, node, context = connected
    files.renew(trustme.CA())
    context.load_cert_chain(files.cert, files.key)
    node.refusals["x"] = [CUT]
    assert await link.call(pack("GET", "x")) == b"a:x"


async def test_a_file_that_is_being_replaced_fails_calls_until_it_is_there(
    connected: tuple[RedisLink, ScriptedNode, ssl.SSLContext], files: PeerCertificates
) -> None:
    link, node, _ = connected
    root = files.root.read_bytes()
    files.root.unlink()
    node.refusals["x"] = [CUT]
    with pytest.raises(StoreUnavailableError, match="there is no such file") as refused:
        await link.call(pack("GET", "x"))
    assert not isinstance(refused.value, StoreConfigurationError)
    files.root.write_bytes(root)
    assert await link.call(pack("GET", "x")) == b"a:x"
