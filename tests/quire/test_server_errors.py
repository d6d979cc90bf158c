"""Messages about servers that do not answer: the reason, in words without gRPC's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

import quire
from quire.errors import to_status
from quire.server_errors import unreachable_error
from tests.patience import patient
from tests.peer_certificates import PeerCertificates

DETAILS = {
    "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Failed to connect to remote host: "
    "connect: Connection refused (111)": "connect: Connection refused (111)",
    "errors resolving nosuch:1: [field:hostname lookup error:UNKNOWN: address lookup failed for nosuch:1: Name or "
    "service not known]": "Name or service not known",
    "DNS resolution failed for nosuch:1: C-ares status is not ARES_SUCCESS qtype=AAAA name=nosuch is_balancer=0: "
    "Domain name not found": "Domain name not found",
    "DNS resolution failed for nosuch:1: Timeout while contacting DNS servers": "Timeout while contacting DNS servers",
}


@pytest.mark.parametrize(("details", "why"), DETAILS.items())
def test_the_reason_alone_is_said(details: str, why: str) -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details)
    assert unreachable_error("nosuch:1", error).message.endswith(
        f"at nosuch:1 ({why}); start one with `quire serve MODEL`"
    )


def test_a_proxy_that_takes_no_request_of_that_size_is_named() -> None:
    nothing = grpc.aio.Metadata()
    details = "Received http2 header with status: 413"
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, nothing, nothing, details)
    assert "host:1 does not answer: a proxy on the way" in unreachable_error("host:1", error).message


def test_a_server_that_refuses_does_answer() -> None:
    full = to_status(quire.OverloadedError("the server has 1 calls open, which is the limit", 1.0))
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", full.SerializeToString()))
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing, full.message)
    assert unreachable_error("host:1", error).message == (
        "the server at host:1 refuses at the moment: the server has 1 calls open, which is the limit"
    )


@asynccontextmanager
async def grpc_server(credentials: grpc.ServerCredentials | None) -> AsyncIterator[str]:
    """Address of a server without services."""
    server = grpc.aio.server()
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def said_of(address: str, root: Path | None = None) -> tuple[str, str]:
    """Messages of a client for a server that it cannot use: of a call, and of a request."""
    tls_root = str(root) if root else None
    async with quire.AsyncClient(address, connect_timeout_s=patient(10), tls_root=tls_root) as client:
        with pytest.raises(quire.UnavailableError) as of_call:
            await client.health()
    async with quire.AsyncClient(address, connect_timeout_s=0.5, tls_root=tls_root) as client:
        with pytest.raises(quire.UnavailableError) as of_request:
            await client.generate("x")
    return of_call.value.message, of_request.value.message


@pytest.mark.parametrize(
    ("names", "root", "hint"),
    [
        (None, "own", "it has no TLS: leave out tls_root and QUIRE_TLS_ROOT"),
        (["127.0.0.1"], None, "if it has TLS, give tls_root, or set QUIRE_TLS_ROOT; if not, it may have as many"),
        (["127.0.0.1"], "other", "its certificate is not to be trusted by the roots that tls_root or QUIRE_TLS_ROOT"),
        (["llm.example.org"], "own", "another name: give that as tls_server_name, or set QUIRE_TLS_SERVER_NAME"),
    ],
)
async def test_access_that_does_not_fit_the_server_is_named(
    names: list[str] | None, root: str | None, hint: str, tmp_path: Path
) -> None:
    own = PeerCertificates(tmp_path / "own", *(names or ["127.0.0.1"]))
    roots = {"own": own.root, "other": PeerCertificates(tmp_path / "other", "127.0.0.1").root}
    credentials = grpc.ssl_server_credentials([(own.key.read_bytes(), own.cert.read_bytes())]) if names else None
    async with grpc_server(credentials) as address:
        for said in await said_of(address, roots[root] if root else None):
            assert said.startswith(f"the server at {address} does not answer: ") and hint in said


async def test_the_port_of_a_gateway_is_named_as_one_of_http() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(24)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for said in await said_of(address):
            assert said == (
                f"the server at {address} does not answer: it speaks HTTP/1, as a gateway does: "
                "give the port of gRPC, 7847 unless `--listen` says otherwise"
            )


async def test_a_server_that_does_not_know_a_call_is_named_and_what_it_may_be() -> None:
    """Regression: all that was said was "Method not found!"."""
    async with grpc_server(None) as address, quire.AsyncClient(address, connect_timeout_s=patient(10)) as client:
        told = f"^the server at {address} does not know this call .* worker$"
        for call in (
            client.stats,
            client.health,
            lambda: client.generate("x"),
            lambda: client.attach("x").completion(),
        ):
            with pytest.raises(quire.QuireError, match=told):
                await call()
