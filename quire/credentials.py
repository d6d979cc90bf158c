"""Credentials of a caller: the API key that it sends, the certificates that it trusts, and the one that it shows.

What is not given comes from QUIRE_API_KEY and the variables QUIRE_TLS_…, for every caller: SDK, command line, gateway
and worker. Files of certificates are read again once they have changed, for the channels that are opened then.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from quire.access_variables import TLS_CLIENT_CERT, TLS_CLIENT_KEY, TLS_ROOT, TLS_SERVER_NAME
from quire.api_keys import SCHEME, first_variable_key
from quire.renewed_files import RenewedFiles

PUBLIC_ROOTS = "public"  # in place of a file: the public certificate authorities, as gRPC knows them

Metadata = tuple[tuple[str, str], ...]

_SENDABLE = re.compile(r"[ -~]*")  # in a header; of others gRPC complains on standard error, and its calls never end


class Credentials:
    """Key and certificates of one caller."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        tls_root: str | None = None,
        tls_server_name: str | None = None,
        tls_client_cert: str | None = None,
        tls_client_key: str | None = None,
    ) -> None:
        """Take what is given, else what the variables say; an empty string is none.

        Args:
            api_key: key to send.
            tls_root: PEM file with the certificates that servers are checked with, or "public"; with none of both the
                connection is not encrypted.
            tls_server_name: name that a server's certificate must have; None: the host that was given, or that the
                leader's address has.
            tls_client_cert: PEM file of the certificate to show to servers that ask for one, as workers may.
            tls_client_key: PEM file of its key.

        Raises:
            ValueError: if a file cannot be read, or there is something that is no key.
        """
        key = first_variable_key() if api_key is None else _sendable(api_key)
        root = _given(tls_root, TLS_ROOT)
        cert, private = _given(tls_client_cert, TLS_CLIENT_CERT), _given(tls_client_key, TLS_CLIENT_KEY)
        if bool(cert) != bool(private) or (cert and not root):
            variables = f"{TLS_CLIENT_CERT}, {TLS_CLIENT_KEY} and {TLS_ROOT}"
            raise ValueError(
                f"tls_client_cert, tls_client_key and tls_root (or {variables}) belong together: give all three"
            )
        self.metadata: Metadata = (("authorization", SCHEME + key),) if key else ()
        self._tls: RenewedFiles[grpc.ChannelCredentials] | None = None
        if root:
            files = [Path(file) for file in (root, cert, private) if file and file != PUBLIC_ROOTS]
            self._tls = RenewedFiles(files, lambda: _channel_credentials(root, cert, private))
        self._server_name = _given(tls_server_name, TLS_SERVER_NAME)

    def open_channel(
        self, address: str, options: Sequence[tuple[str, Any]], name: str | None = None
    ) -> grpc.aio.Channel:
        """A channel to a server; calls over it send `metadata`.

        `name`: the address by host name of which this is one of several; certificates and proxies go by it.
        """
        named = [] if name is None or self._server_name else [("grpc.default_authority", name)]
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=[*options, *named])
        server_name = self._server_name or (name or "").rpartition(":")[0]
        if server_name:
            named.append(("grpc.ssl_target_name_override", server_name))
        return grpc.aio.secure_channel(address, self._tls.latest(), options=[*options, *named])

    @property
    def certificates(self) -> object | None:
        """Token of the certificates that a channel opened now would have: another one once their files have changed."""
        return None if self._tls is None else self._tls.latest()


def _sendable(api_key: str) -> str:
    if not _SENDABLE.fullmatch(api_key):
        raise ValueError(
            "api_key has a character that no header can carry, as the line break at the end of a file: leave it out"
        )
    return api_key


def _given(value: str | None, variable: str) -> str:
    return os.environ.get(variable, "") if value is None else value


def _channel_credentials(root: str, cert: str, private: str) -> grpc.ChannelCredentials:
    shown = (_read(private, "key"), _read(cert, "certificate")) if cert else ()
    return grpc.ssl_channel_credentials(_certificates(root), *shown)


def _certificates(root: str) -> bytes | None:
    """The certificates of a PEM file; None for the public ones."""
    return None if root == PUBLIC_ROOTS else _read(root, "root certificates")


def _read(file: str, kind: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"the {kind} {file} cannot be read: {error.strerror}") from error
