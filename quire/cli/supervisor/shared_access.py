"""Access to the scheduler for what `quire serve` starts, and for itself: key and certificate, by variables.

A process's variables can be read by its owner alone, its command line by everybody. The key is one of their own, so
that each key of a file may be revoked while they run.
"""

import os
import secrets
from pathlib import Path

from quire.access_settings import AccessSettings
from quire.access_variables import API_KEY, TLS_CLIENT_CERT, TLS_CLIENT_KEY, TLS_ROOT, TLS_SERVER_NAME
from quire.api_keys import read_api_keys
from quire.certificates import certificate_names


def share_access(settings: AccessSettings, host: str, trusted: Path | None) -> None:
    """Set the variables of callers, those of certificates unless the user has. Raises ValueError.

    Without a certificate of ours those of certificates are removed: the user's shell may have them for other servers.
    `host`: the one that they dial. `trusted`: certificates that they trust.
    """
    if read_api_keys(settings.api_key_file):
        os.environ[API_KEY] = ",".join([secrets.token_hex(32), *read_api_keys(None)])
    if trusted is None or settings.tls_cert is None or settings.tls_key is None:
        for name in (TLS_ROOT, TLS_SERVER_NAME, TLS_CLIENT_CERT, TLS_CLIENT_KEY):
            os.environ.pop(name, None)
        return
    os.environ[TLS_ROOT] = os.environ.get(TLS_ROOT) or str(trusted.absolute())
    names = certificate_names(settings.tls_cert, settings.tls_key)
    if host not in names and names:
        os.environ[TLS_SERVER_NAME] = os.environ.get(TLS_SERVER_NAME) or names[0].replace("*", "quire")
    from quire.credentials import Credentials  # noqa: PLC0415 - loads gRPC, which other refusals need not wait for

    Credentials()  # refuses here what each caller would fail with
