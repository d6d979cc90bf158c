"""Certificates in PEM files: whether a key and an authority belong to one, its names, and who can read keys.

Opens no connection. Python checks and decodes a certificate only in a handshake, so one is made in memory.
"""

import ssl
import stat
from pathlib import Path
from typing import Any


def check_pair(cert: Path, key: Path, prefix: str = "") -> None:
    """Raise ValueError unless the key is that of the certificate; `prefix` is that of the flags to name."""
    cert_flag, key_flag = f"--{prefix}tls-cert", f"--{prefix}tls-key"
    for file in (cert, key):
        if not file.is_file():
            raise ValueError(f"there is no file {file}; name the PEM files with {cert_flag} and {key_flag}")
    try:
        _context(ssl.PROTOCOL_TLS_SERVER, cert, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ValueError(f"{cert_flag} {cert} and {key_flag} {key} cannot be used: {error}") from error


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Context of a server that asks its clients for no certificate. Raises OSError, ValueError."""
    return _context(ssl.PROTOCOL_TLS_SERVER, cert, key)


def others_can_read(secret: Path) -> bool:
    """True if others on this machine can read a file with keys. Raises OSError."""
    return bool(secret.stat().st_mode & stat.S_IROTH)


def peer_context(cert: Path, key: Path, root: Path, *, is_server: bool) -> ssl.SSLContext:
    """Context of one side of a connection whose sides show certificates of one authority. Raises OSError, ValueError.

    A client leaves the name in the server's certificate to whoever wraps a connection, unless it is told not to.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT, cert, key)
    context.load_verify_locations(root)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: an authority below the first is one, too
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def check_signed(cert: Path, key: Path, root: Path) -> None:
    """Raise ValueError unless the authority has signed the certificate, for servers and for clients."""
    try:
        client, server = (peer_context(cert, key, root, is_server=is_server) for is_server in (False, True))
        client.check_hostname = False
        _shake_hands(client, server)
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"{cert} is not to be trusted by {root}: {error.verify_message}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{cert} and {root} cannot be used: {error}") from error


def certificate_names(cert: Path, key: Path) -> list[str]:
    """DNS names of a certificate, then its IP addresses. Raises ValueError if it cannot be used."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    try:
        found = _shake_hands(client, _context(ssl.PROTOCOL_TLS_SERVER, cert, key))
    except ssl.SSLError as error:
        raise ValueError(f"--tls-cert {cert} cannot be used: {error.reason or error}") from error
    names: Any = found.get("subjectAltName", ())
    return [name for wanted in ("DNS", "IP Address") for kind, name in names if kind == wanted]


def _context(protocol: int, cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.load_cert_chain(cert, key, password=_no_password)
    return context


def _no_password() -> str:
    raise ValueError("the key has a password; take it off first, with `openssl pkey`")


def _shake_hands(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> dict[str, Any]:
    """The server's certificate, as the client sees it. Raises ssl.SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
    return dict(client.getpeercert() or {})
