"""The folder of a deployment on one machine: who may use it, and where things lie in it.

Two locks, both released by the kernel when their holders are gone, however they went. `serve.lock` is held by the
supervisor. `services.lock` is handed down to the services, so that a supervisor that follows a killed one can wait
until the last of the old services has ended.
"""

import asyncio
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

MAX_SOCKET_PATH = 100  # the kernel takes 107 bytes; the store adds a few while it starts
MAX_LOG_BYTES = 16 * 1024 * 1024
POLL_S = 0.1


class FolderInUseError(Exception):
    """Another supervisor uses the folder."""


class DataFolder:
    """The folder, locked for this supervisor until `close` or its death."""

    def __init__(self, path: Path) -> None:
        """Raises FolderInUseError, or OSError if the folder cannot be made or written."""
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock_fd = os.open(path / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not _lock(self._lock_fd):
            os.close(self._lock_fd)
            raise FolderInUseError(
                f"another quire serve uses the data folder {path}; stop it, or choose another with --data-dir"
            )
        self.services_fd = os.open(path / "services.lock", os.O_RDWR | os.O_CREAT, 0o600)

    @property
    def store(self) -> Path:
        """Folder of the embedded store."""
        folder = self.path / "store"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def socket(self) -> Path:
        """Socket of the embedded store; elsewhere, under a name made of the folder's, where the path is too long."""
        socket = self.path / "store.sock"
        if len(os.fsencode(socket)) <= MAX_SOCKET_PATH:
            return socket
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"quire-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to somebody else; choose a shorter --data-dir")
        return folder / f"{name}.sock"

    def log(self, name: str) -> Path:
        """A log file, set aside once if it has grown large."""
        folder = self.path / "logs"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.log"
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(folder / f"{name}.log.1")
        return path

    async def await_old_services(self, on_wait: Callable[[], None]) -> None:
        """Waits until the services of a supervisor that was killed have ended."""
        told = False
        while not _lock(self.services_fd):
            if not told:
                on_wait()
                told = True
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Unlocks the folder."""
        os.close(self.services_fd)
        os.close(self._lock_fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
