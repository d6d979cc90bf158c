"""API keys and certificate of a server that clients reach, made from its settings.

The files are read again once they have changed: keys count at the next call, certificates at the next connection.
"""

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc
import structlog

from quire.access_settings import AccessSettings
from quire.api_keys import AcceptedKeys, read_api_keys
from quire.certificates import check_pair, others_can_read, server_context
from quire.renewed_files import RenewedFiles

T = TypeVar("T")

log = structlog.get_logger()


class AccessError(Exception):
    """Keys or certificate cannot be used; the message has the reason."""


def accepted_keys(settings: AccessSettings) -> Callable[[], AcceptedKeys] | None:
    """The keys that callers must have, as the file says when asked; None if every caller is served. Raises AccessError.

    The keys stay as they were while the file cannot be used.
    """
    file = settings.api_key_file
    for secret in (file, settings.tls_key):
        if secret is not None:
            warn_of_readers(secret)
    try:
        renewed = RenewedFiles(
            [] if file is None else [file],
            lambda: AcceptedKeys(read_api_keys(file)),
            on_renewed=lambda: log.info("API keys renewed", file=str(file), keys=len(renewed.latest())),
            on_refused=lambda error: log.warning(
                "changed file of API keys not used; the keys before are accepted on", reason=str(error)
            ),
        )
    except ValueError as error:
        raise AccessError(str(error)) from error
    return renewed.latest if len(renewed.latest()) else None


def key_to_send(settings: AccessSettings) -> str | None:
    """The key for calls to another of our servers that has the same keys; None without any. Raises ValueError."""
    return next(iter(read_api_keys(settings.api_key_file)), None)


def server_credentials(settings: AccessSettings) -> grpc.ServerCredentials | None:
    """The certificate for one gRPC port; None without one. Raises AccessError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    cert, key = settings.tls_cert, settings.tls_key

    def configure() -> grpc.ServerCertificateConfiguration:
        check_pair(cert, key)
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), cert.read_bytes())])

    return grpc_credentials(renewed_certificate([cert, key], configure).latest)


def http_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The certificate for an HTTP port; None without one. Raises AccessError."""
    if cert is None or key is None:
        return None

    def make() -> ssl.SSLContext:
        check_pair(cert, key)
        return server_context(cert, key)

    renewed = renewed_certificate([cert, key], make)

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = renewed.latest()

    context = renewed.latest()
    context.sni_callback = choose  # which each handshake calls, with a name or without
    return context


def renewed_certificate(files: Sequence[Path], make: Callable[[], T]) -> RenewedFiles[T]:
    """Value made of the PEM files of a certificate, renewed with them; the log names the first. Raises AccessError."""
    names = [str(file) for file in files]
    try:
        return RenewedFiles(
            files,
            make,
            on_renewed=lambda: log.info("certificate renewed", file=names[0]),
            on_refused=lambda error: log.warning(
                "renewed certificate not used; the one before is shown on", files=names, reason=str(error)
            ),
        )
    except (OSError, ValueError) as error:
        raise AccessError(f"{' and '.join(names)} cannot be used: {error}") from error


def grpc_credentials(
    latest: Callable[[], grpc.ServerCertificateConfiguration], *, of_clients: bool = False
) -> grpc.ServerCredentials:
    """Credentials for one port, which asks for the latest certificate at each connection.

    `of_clients`: each client must show one, too.
    """
    shown = latest()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        before, shown = shown, latest()
        return None if shown is before else shown

    return grpc.dynamic_ssl_server_credentials(shown, fetch, of_clients)  # type: ignore[arg-type] # None: no change


def warn_of_readers(file: Path) -> None:
    """Warn of a file with a secret that others can read."""
    if others_can_read(file):
        log.warning("others on this machine can read a secret", file=str(file), fix=f"chmod 600 {file}")
