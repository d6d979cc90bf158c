"""Access to the scheduler for what `quire serve` starts, and for itself: key and certificate, by variables.

A process's variables can be read by its owner alone, its command line by everybody.
"""

import os
import ssl
from pathlib import Path
from typing import Any

from quire.access_settings import AccessSettings
from quire.access_variables import API_KEY, TLS_ROOT, TLS_SERVER_NAME
from quire.api_keys import read_api_keys


def share_access(settings: AccessSettings, host: str) -> None:
    """Set the variables of callers, unless the user has; `host` is the one that they dial. Raises ValueError."""
    keys = read_api_keys(settings.api_key_file)
    if keys:
        os.environ[API_KEY] = ",".join(keys)
    if settings.tls_cert is None or settings.tls_key is None:
        return
    os.environ.setdefault(TLS_ROOT, str(settings.tls_cert.absolute()))
    names = certificate_names(settings.tls_cert, settings.tls_key)
    if host not in names and names:
        os.environ.setdefault(TLS_SERVER_NAME, names[0].replace("*", "quire"))


def certificate_names(cert: Path, key: Path) -> list[str]:
    """DNS names of a certificate, then its IP addresses. Raises ValueError if it cannot be used.

    Python decodes a certificate only in a handshake, so one is made in memory.
    """
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(cert, key)
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(cert)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    try:
        _shake_hands(client, server)
    except ssl.SSLError as error:
        raise ValueError(f"--tls-cert {cert} cannot be used: {error.reason or error}") from error
    found: Any = (client.getpeercert() or {}).get("subjectAltName", ())
    return [name for wanted in ("DNS", "IP Address") for kind, name in found if kind == wanted]


def _shake_hands(client: ssl.SSLObject, server: ssl.SSLObject) -> None:
    waiting = [client, server]
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
