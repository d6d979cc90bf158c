"""Certificates of `quire serve` as they were at its start, kept in its data folder while it runs.

A service that is started again so has the certificates of those that run, whatever has become of the files meanwhile:
one that were the first to take new ones would be trusted by none of the others.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from quire.certificates import others_can_read
from quire.cli.serve_settings import Settled
from quire.settings import Settings
from quire.typed_names import flag_of

S = TypeVar("S", bound=Settings)

_KEYS = ("tls_key", "peer_tls_key")
_FILES = ("tls_cert", "peer_tls_cert", "peer_tls_root", *_KEYS)


def keep_certificates(settled: Settled, folder: Path) -> Settled:
    """Copy all PEM files of the services to the folder, and name them there. Raises OSError."""
    scheduler, scheduler_flags = _kept(settled.scheduler, settled.scheduler_flags, folder)
    worker, worker_flags = _kept(settled.worker, settled.worker_flags, folder)
    gateway, gateway_flags = _kept(settled.gateway, settled.gateway_flags, folder)
    return replace(
        settled,
        scheduler=scheduler,
        worker=worker,
        gateway=gateway,
        scheduler_flags=scheduler_flags,
        worker_flags=worker_flags,
        gateway_flags=gateway_flags,
    )


def open_keys(settled: Settled) -> list[Path]:
    """Private keys that others on this machine can read. Raises OSError."""
    files = {
        file
        for settings in (settled.scheduler, settled.worker, settled.gateway)
        for name in _KEYS
        if (file := getattr(settings, name, None)) is not None
    }
    return sorted(filter(others_can_read, files))


def _kept(settings: S, flags: tuple[str, ...], folder: Path) -> tuple[S, tuple[str, ...]]:
    files: dict[str, Path] = {name: file for name in _FILES if (file := getattr(settings, name, None)) is not None}
    copies = {name: folder / f"{settings.section}-{name}.pem" for name in files}
    if copies:
        folder.mkdir(mode=0o700, exist_ok=True)
    for name, copy in copies.items():
        content = files[name].read_bytes()
        with open(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
    others = [flag for flag in flags if not flag.startswith(tuple(f"{flag_of(name)}=" for name in copies))]
    own = [f"{flag_of(name)}={copy}" for name, copy in copies.items()]
    return settings.model_copy(update=copies), (*others, *own)
