"""Throw-away certificates of a test's scheduler and workers, signed by an authority of their own."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import trustme
from cryptography import x509

from common.peer_tls import PeerTls, peer_tls_of
from common.serving import GrpcServer
from quire.scheduler_settings import SchedulerSettings


class PeerCertificates:
    """Files in a folder that is made: `cert.pem` for the names, `key.pem`, and `ca.pem` of their authority."""

    def __init__(self, folder: Path, *names: str, authority: trustme.CA | None = None) -> None:
        folder.mkdir(parents=True)
        self.cert, self.key, self.root = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        self.authority = authority or trustme.CA()
        self._names = names
        self.renew()

    def renew(self, authority: trustme.CA | None = None, names: tuple[str, ...] = ()) -> None:
        """Another certificate and key in the files, of the same authority or of another; `names`: for others."""
        self.authority = authority or self.authority
        issued = self.authority.issue_cert(*(names or self._names))
        self.root.write_bytes(self.authority.cert_pem.bytes())
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    @property
    def serial(self) -> int:
        """Number of the certificate in the file."""
        return x509.load_pem_x509_certificate(self.cert.read_bytes()).serial_number

    @property
    def settings(self) -> dict[str, Path]:
        return {"peer_tls_cert": self.cert, "peer_tls_key": self.key, "peer_tls_root": self.root}

    @property
    def options(self) -> tuple[str, ...]:
        """Flags of scheduler and worker."""
        return tuple(f"--{name.replace('_', '-')}={file}" for name, file in self.settings.items())


async def served_serial(address: str, context: ssl.SSLContext, name: str | None = None) -> int:
    """Number of the certificate that a server shows to a new connection; `name`: the one that is asked for, if any."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name or "")
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


def trusting(*made: PeerCertificates) -> ssl.SSLContext:
    """Context of a client that trusts the authorities, and believes any name."""
    context = ssl.create_default_context(cadata="".join(each.root.read_text() for each in made))
    context.check_hostname = False
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def peer_tls(made: PeerCertificates, server_name: str | None) -> PeerTls:
    """TLS of a process with these certificates."""
    settings = SchedulerSettings(**made.settings, peer_tls_server_name=server_name)  # type: ignore[arg-type]
    tls = peer_tls_of(settings)
    assert tls is not None
    return tls


@asynccontextmanager
async def grpc_port(credentials: grpc.ServerCredentials | None) -> AsyncIterator[str]:
    """Address of a server without services, while it is up."""
    server = GrpcServer([], 1 << 20, credentials=credentials)
    address = server.bind("127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
