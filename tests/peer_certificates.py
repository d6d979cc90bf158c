"""Throw-away certificates of a test's scheduler and workers, signed by an authority of their own."""

from pathlib import Path

import trustme


class PeerCertificates:
    """Files in a folder that is made: `cert.pem` for the names, `key.pem`, and `ca.pem` of their authority."""

    def __init__(self, folder: Path, *names: str, authority: trustme.CA | None = None) -> None:
        folder.mkdir(parents=True)
        self.authority = authority or trustme.CA()
        self.cert, self.key, self.root = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        issued = self.authority.issue_cert(*names)
        issued.private_key_pem.write_to_path(str(self.key))
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(self.cert), append=True)
        self.authority.cert_pem.write_to_path(str(self.root))

    @property
    def settings(self) -> dict[str, Path]:
        return {"peer_tls_cert": self.cert, "peer_tls_key": self.key, "peer_tls_root": self.root}

    @property
    def options(self) -> tuple[str, ...]:
        """Flags of scheduler and worker."""
        return tuple(f"--{name.replace('_', '-')}={file}" for name, file in self.settings.items())
