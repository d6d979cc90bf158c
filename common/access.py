"""API keys and certificate of a server that clients reach, made from its settings."""

from pathlib import Path

import grpc
import structlog

from quire.access_settings import AccessSettings
from quire.api_keys import AcceptedKeys, read_api_keys
from quire.certificates import others_can_read

log = structlog.get_logger()


class AccessError(Exception):
    """Keys or certificate cannot be used; the message has the reason."""


def accepted_keys(settings: AccessSettings) -> AcceptedKeys | None:
    """The keys that callers must have; None if every caller is served. Raises AccessError."""
    try:
        keys = read_api_keys(settings.api_key_file)
    except ValueError as error:
        raise AccessError(str(error)) from error
    for file in (settings.api_key_file, settings.tls_key):
        if file is not None:
            warn_of_readers(file)
    return AcceptedKeys(keys) if keys else None


def key_to_send(settings: AccessSettings) -> str | None:
    """The key for calls to another of our servers that has the same keys; None without any. Raises ValueError."""
    return next(iter(read_api_keys(settings.api_key_file)), None)


def server_credentials(settings: AccessSettings) -> grpc.ServerCredentials | None:
    """The certificate for a gRPC port; None without one. Raises AccessError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        pair = settings.tls_key.read_bytes(), settings.tls_cert.read_bytes()
    except OSError as error:
        raise AccessError(f"--tls-cert and --tls-key cannot be read: {error}") from error
    return grpc.ssl_server_credentials([pair])


def warn_of_readers(file: Path) -> None:
    """Warn of a file with a secret that others can read."""
    if others_can_read(file):
        log.warning("others on this machine can read a secret", file=str(file), fix=f"chmod 600 {file}")
