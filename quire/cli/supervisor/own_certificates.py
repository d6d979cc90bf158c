"""Certificates of `quire serve`: copies in its data folder while it runs, made anew when the files are renewed.

The services read the copies, so that one that is started again fits the others, whatever becomes of the files: half a
file, or none. A renewed certificate is copied once it can be used, and trusted by the services before it is shown; they
read copies anew by themselves.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from quire.certificates import certificate_names, check_pair, check_signed, others_can_read
from quire.cli.serve_settings import Settled
from quire.renewed_files import RenewedFiles
from quire.settings import Settings
from quire.typed_names import flag_of

S = TypeVar("S", bound=Settings)

_RENEW_EVERY_S = 5.0
_PAIR = ("tls_cert", "tls_key")
_PEERS = ("peer_tls_cert", "peer_tls_key", "peer_tls_root")
_KEYS = (_PAIR[1], _PEERS[1])


class OwnCertificates:
    """Copies of all PEM files of the services. `say` tells the user of those that were renewed, and that cannot be."""

    def __init__(self, settled: Settled, folder: Path, say: Callable[[str], None]) -> None:
        """Make the copies. Raises OSError, and ValueError if the files do not fit any more."""
        self._folder = folder
        self._say = say
        self._copies: list[_Copies] = []
        self.trusted: Path | None = None  # what callers of the scheduler trust; None: it has no certificate
        if settled.scheduler.tls_cert is not None:
            self.trusted = folder / "trusted.pem"
        scheduler, scheduler_flags = self._copied(settled.scheduler, settled.scheduler_flags, self.trusted)
        worker, worker_flags = self._copied(settled.worker, settled.worker_flags)
        gateway, gateway_flags = self._copied(settled.gateway, settled.gateway_flags)
        self.services = replace(  # the settings that the services get
            settled,
            scheduler=scheduler,
            worker=worker,
            gateway=gateway,
            scheduler_flags=scheduler_flags,
            worker_flags=worker_flags,
            gateway_flags=gateway_flags,
        )

    async def renew_repeatedly(self) -> None:
        """Copy what is renewed, until it is cancelled."""
        while self._copies:
            await asyncio.sleep(_RENEW_EVERY_S)
            self.renew()

    def renew(self) -> None:
        """Copy the files that have changed and can be used."""
        said = [copies.renew() for copies in self._copies]  # scheduler and gateway mostly have the same files
        for each in dict.fromkeys(filter(None, said)):
            self._say(each)

    def _copied(self, settings: S, flags: tuple[str, ...], trusted: Path | None = None) -> tuple[S, tuple[str, ...]]:
        """Settings and flags of a service with copies in place of its files."""
        copies: dict[str, Path] = {}
        for names in (_PAIR, _PEERS):
            files = {name: file for name in names if (file := getattr(settings, name, None)) is not None}
            if files:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                places = {name: self._folder / f"{settings.section}-{name}.pem" for name in files}
                known = trusted if names is _PAIR else None
                self._copies.append(_Copies(list(files.values()), list(places.values()), known))
                copies |= places
        others = [flag for flag in flags if not flag.startswith(tuple(f"{flag_of(name)}=" for name in copies))]
        own = [f"{flag_of(name)}={copy}" for name, copy in copies.items()]
        return settings.model_copy(update=copies), (*others, *own)


def open_keys(settled: Settled) -> list[Path]:
    """Private keys that others on this machine can read. Raises OSError."""
    files = {
        file
        for settings in (settled.scheduler, settled.worker, settled.gateway)
        for name in _KEYS
        if (file := getattr(settings, name, None)) is not None
    }
    return sorted(filter(others_can_read, files))


class _Copies:
    """Copies of a certificate, its key, and perhaps the authority, which belong together."""

    def __init__(self, files: list[Path], places: list[Path], trusted: Path | None) -> None:
        """Make them; `trusted` gets the certificate and the one before. Raises OSError, ValueError."""
        self._files = files
        self._places = places
        self._trusted = trusted
        self._names: set[str] = set()
        self._said = ""
        self._renewed = RenewedFiles(files, self._read, on_refused=self._refuse)
        self._written: list[bytes] = []
        self._write(self._renewed.latest())

    def renew(self) -> str:
        """Copy the files if they have changed and can be used. Returns what is to be said of it; mostly nothing."""
        self._said = ""
        latest = self._renewed.latest()
        if latest is self._written:
            return self._said
        try:
            self._write(latest)
        except OSError as error:  # tried again
            return f"the renewed certificate {self._files[0]} cannot be copied: {error}"
        return f"certificate renewed: {self._files[0]}"

    def _read(self) -> list[bytes]:
        cert, key, *roots = self._files
        check_pair(cert, key)
        for root in roots:
            check_signed(cert, key, root)
        names = set(certificate_names(cert, key))
        if lost := self._names - names:
            raise ValueError(f"it has not the name {min(lost)} any more; start quire serve again for another name")
        content = [file.read_bytes() for file in self._files]
        self._names = names
        return content

    def _write(self, content: list[bytes]) -> None:
        if self._trusted is not None:
            _replace(self._trusted, content[0] + b"\n" + b"".join(self._written[:1]))
        for place, each in reversed(list(zip(self._places, content, strict=True))):
            _replace(place, each)
        self._written = content

    def _refuse(self, error: Exception) -> None:
        self._said = f"the renewed certificate {self._files[0]} is not used, and the one before is shown on: {error}"


def _replace(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read, at once for those that read it."""
    beside = file.with_suffix(".new")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(content)
    beside.replace(file)
