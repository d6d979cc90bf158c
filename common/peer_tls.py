"""TLS between scheduler and workers: each side shows its certificate, and serves only whom their authority knows.

Knows no service. Where gRPC does not say why a connection fails, a handshake on trial does.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from common.access import grpc_credentials, renewed_certificate, warn_of_readers
from quire.certificates import check_signed, peer_context
from quire.peer_tls_settings import PeerTlsSettings
from quire.rpc import Option

_TRIAL_S = 1.0
_NAME_FAULTS = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
# What OpenSSL makes of an answer that is no TLS.
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"})
_FLAGS = "--peer-tls-cert, --peer-tls-key and --peer-tls-root"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """Certificate, key and authority in the forms that servers and callers take."""

    of_server: grpc.ServerCertificateConfiguration
    of_channel: grpc.ChannelCredentials
    of_trial: ssl.SSLContext  # of a channel, for Python


class PeerTls:
    """Certificate, key and authority of one process; once the files have changed, those of new connections."""

    def __init__(self, cert: Path, key: Path, root: Path, server_name: str | None) -> None:
        """Read the files; `server_name`: that the certificates of workers have. Raises AccessError."""
        self.cert, self.root, self.server_name = cert, root, server_name
        self._files = cert, key, root
        self._renewed = renewed_certificate(self._files, self._read)

    @property
    def of_server(self) -> grpc.ServerCredentials:
        """Credentials for one port."""
        return grpc_credentials(lambda: self._renewed.latest().of_server, of_clients=True)

    @property
    def of_channel(self) -> grpc.ChannelCredentials:
        return self._renewed.latest().of_channel

    @property
    def of_trial(self) -> ssl.SSLContext:
        return self._renewed.latest().of_trial

    def _read(self) -> _Shown:
        check_signed(*self._files)
        trial = _for_http2(peer_context(*self._files, is_server=False))
        chain, private, roots = (file.read_bytes() for file in self._files)
        return _Shown(
            of_server=grpc.ssl_server_certificate_configuration([(private, chain)], roots),
            of_channel=grpc.ssl_channel_credentials(roots, private, chain),
            of_trial=trial,
        )


def peer_tls_of(settings: PeerTlsSettings) -> PeerTls | None:
    """Certificates of the settings; None without. Raises AccessError."""
    cert, key, root = settings.peer_tls_cert, settings.peer_tls_key, settings.peer_tls_root
    if cert is None or key is None or root is None:
        return None
    made = PeerTls(cert, key, root, settings.peer_tls_server_name)
    warn_of_readers(key)
    return made


def open_peer_channel(address: str, tls: PeerTls | None, options: Sequence[Option]) -> grpc.aio.Channel:
    """A channel to a worker, encrypted if there are certificates."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [] if tls.server_name is None else [("grpc.ssl_target_name_override", tls.server_name)]
    return grpc.aio.secure_channel(address, tls.of_channel, options=[*options, *named])


async def certificate_fault(address: str, tls: PeerTls | None) -> str:
    """Fault in the certificates of this process or of the worker at the address, which could not be reached.

    Empty if there is none that is known, for example since nobody answers there.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        context = _plain_context() if tls is None else tls.of_trial
        name = host if tls is None or tls.server_name is None else tls.server_name
        async with asyncio.timeout(_TRIAL_S):
            is_refused = await _is_refused(host, int(port), context, name)
    except ssl.SSLCertVerificationError as error:
        return _distrust(error, tls)
    except ssl.SSLError as error:
        return _failure(error, tls)
    except (OSError, TimeoutError, ValueError):
        return ""
    if tls is None:
        return f"it serves with TLS alone: give this process {_FLAGS}, too"
    return _refusal(tls, "it closes the connection") if is_refused else ""


async def _is_refused(host: str, port: int, context: ssl.SSLContext, name: str) -> bool:
    """True if the server ends the connection instead of beginning to speak. Raises ssl.SSLError, OSError."""
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    try:
        return not await reader.read(1)  # a server looks at our certificate after the client's part of the handshake
    finally:
        writer.close()


def _plain_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return _for_http2(context)


def _for_http2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.set_alpn_protocols(["h2"])
    return context


def _distrust(error: ssl.SSLCertVerificationError, tls: PeerTls | None) -> str:
    """Reason for which this process does not believe a worker."""
    assert tls is not None  # else nothing is verified
    if error.verify_code in _NAME_FAULTS:
        return f"its certificate has another name: give --peer-tls-server-name ({error.verify_message})"
    return f"its certificate is not to be trusted by --peer-tls-root {tls.root}: {error.verify_message}"


def _failure(error: ssl.SSLError, tls: PeerTls | None) -> str:
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason:
        return f"it serves with TLS alone: give this process {_FLAGS}, too" if tls is None else _refusal(tls, reason)
    if tls is None:
        return ""
    if error.reason in _NOT_TLS:
        return f"it serves without TLS, and this process asks for it: give it {_FLAGS}, too"
    return f"no encrypted connection comes about with it: {reason}"


def _refusal(tls: PeerTls, reason: str) -> str:
    return f"it refuses the certificate {tls.cert}: let one authority, --peer-tls-root of both, sign both ({reason})"
