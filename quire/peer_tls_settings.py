"""Settings of the certificates between scheduler and workers, which both have, and which `quire serve` takes, too."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from quire.certificates import check_pair, check_signed
from quire.settings import Settings


class PeerTlsSettings(Settings):
    """Without certificates nothing is encrypted that schedulers say to workers, or workers to each other."""

    peer_tls_cert: Path | None = Field(
        None,
        description="PEM file of the certificate, with its chain, that scheduler and workers show each other, as "
        "server and as client; all three files are read again once they are renewed; absent, like the next two: what "
        "they say to each other is not encrypted",
    )
    peer_tls_key: Path | None = Field(
        None, description="PEM file of the private key of peer_tls_cert, without a password"
    )
    peer_tls_root: Path | None = Field(
        None,
        description="PEM file of the authority that has signed the certificates of scheduler and workers: whoever "
        "shows no certificate of it is refused",
    )
    peer_tls_server_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="name that the workers' certificates have; absent: the host at which each worker is reached",
    )

    @model_validator(mode="after")
    def _certificates_that_fit(self) -> Self:
        cert, key, root = self.peer_tls_cert, self.peer_tls_key, self.peer_tls_root
        if cert is None or key is None or root is None:
            if (cert, key, root, self.peer_tls_server_name) != (None,) * 4:
                raise ValueError("--peer-tls-cert, --peer-tls-key and --peer-tls-root belong together: give all three")
            return self
        check_pair(cert, key, "peer-")
        if not root.is_file():
            raise ValueError(f"there is no file {root}; name the authority's certificate with --peer-tls-root")
        try:
            check_signed(cert, key, root)
        except ValueError as error:
            raise ValueError(f"--peer-tls-cert and --peer-tls-root do not fit: {error}") from error
        return self
