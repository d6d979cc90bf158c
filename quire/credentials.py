"""Credentials of a caller: the API key that it sends, and the certificates by which it knows its servers.

What is not given comes from QUIRE_API_KEY, QUIRE_TLS_ROOT and QUIRE_TLS_SERVER_NAME, for every caller: SDK, command
line, gateway and worker.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from quire.access_variables import TLS_ROOT, TLS_SERVER_NAME
from quire.api_keys import SCHEME, first_variable_key

PUBLIC_ROOTS = "public"  # in place of a file: the public certificate authorities, as gRPC knows them

Metadata = tuple[tuple[str, str], ...]


class Credentials:
    """Key and certificates of one caller."""

    def __init__(
        self, *, api_key: str | None = None, tls_root: str | None = None, tls_server_name: str | None = None
    ) -> None:
        """Take what is given, else what the variables say; an empty string is none.

        Args:
            api_key: key to send.
            tls_root: PEM file with the certificates that servers are checked with, or "public"; with none of both the
                connection is not encrypted.
            tls_server_name: name that a server's certificate must have; None: the host that is dialled.

        Raises:
            ValueError: if a file cannot be read, or a variable has something that is no key.
        """
        key = first_variable_key() if api_key is None else api_key
        root = os.environ.get(TLS_ROOT, "") if tls_root is None else tls_root
        name = os.environ.get(TLS_SERVER_NAME, "") if tls_server_name is None else tls_server_name
        self.metadata: Metadata = (("authorization", SCHEME + key),) if key else ()
        self._tls = grpc.ssl_channel_credentials(_certificates(root)) if root else None
        self._server_name = name

    def open_channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to a server; calls over it send `metadata`."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        named = [("grpc.ssl_target_name_override", self._server_name)] if self._server_name else []
        return grpc.aio.secure_channel(address, self._tls, options=[*options, *named])


def _certificates(root: str) -> bytes | None:
    """The certificates of a PEM file; None for the public ones."""
    if root == PUBLIC_ROOTS:
        return None
    try:
        return Path(root).read_bytes()
    except OSError as error:
        raise ValueError(f"the root certificates {root} cannot be read: {error.strerror}") from error
