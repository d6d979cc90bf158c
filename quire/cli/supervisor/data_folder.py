"""The data folder of a deployment on one machine: its locks, its permissions and its paths.

The folder holds prompts and outputs, so it and everything in it is readable only to its owner.

The kernel releases both locks when their holders are gone, however they ended. The supervisor holds `serve.lock`. The
services inherit `services.lock`, so that the supervisor after a killed one can wait until the last of the old services
has ended.
"""

import asyncio
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MAX_SOCKET_PATH = 100  # the kernel takes 107 bytes; the store adds a few while it starts
POLL_S = 0.1
_OURS = {"serve.lock", "services.lock", "store", "logs", "store.sock", "store.place", "certificates"}
_NOBODYS = {"lost+found"}  # created by the system in the root of a mounted volume


class FolderError(Exception):
    """The folder cannot be used; the message has the reason and what to do."""


class FolderInUseError(FolderError):
    """Another supervisor uses the folder."""


class DataFolder:
    """The folder, locked for this supervisor until `close` or its death."""

    def __init__(self, path: Path) -> None:
        """Create and lock the folder. Raises FolderError, or OSError if it cannot be created or written."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_is_ours(path)
        path.chmod(0o700)
        self.path = path
        self._lock_fd = os.open(path / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not _lock(self._lock_fd):
            os.close(self._lock_fd)
            raise FolderInUseError(
                f"another quire serve uses the data folder {path}; stop it, or choose another with --data-dir"
            )
        self.services_fd = os.open(path / "services.lock", os.O_RDWR | os.O_CREAT, 0o600)
        for name in _OURS:
            _keep_private(path / name)

    @property
    def store(self) -> Path:
        """Folder of the embedded store. Raises FolderError."""
        return self._within("store")

    @property
    def certificates(self) -> Path:
        """Folder of certificates and their keys, which is there while they are served."""
        return self.path / "certificates"

    @property
    def socket(self) -> Path:
        """Socket of the embedded store, among temporary files where its path is too long or no text for a URL.

        There it is named after this folder.

        It stays there though temporary files have another place later (TMPDIR): a server may still listen.
        """
        socket = self.path / "store.sock"
        if _fits_socket(socket):
            return socket
        place, mark = self.path / "store.place", f"{self.path.stat().st_ino} "  # of this folder, not of its copy
        with suppress(OSError, UnicodeDecodeError):
            said = place.read_text()
            if said.startswith(mark) and Path(said.removeprefix(mark)).is_socket():
                return Path(said.removeprefix(mark))
        socket = self._socket_elsewhere()
        with suppress(OSError):  # the disk is full
            place.write_text(f"{mark}{socket}")
        return socket

    def _within(self, name: str) -> Path:
        folder = self.path / name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise FolderError(
                f"the folder {folder} cannot be made: {error.strerror}; mend that, or choose another data folder with "
                "--data-dir"
            ) from error
        return folder

    def _socket_elsewhere(self) -> Path:
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        for place in _temporary_folders():
            socket = place / f"quire-{os.getuid()}" / f"{name}.sock"
            if not _fits_socket(socket):
                continue
            with suppress(OSError):  # full, or not ours to write
                _make_private(socket.parent)
                return socket
        raise FolderError(
            f"the path of the data folder {self.path} is too long for the socket of the store, and no folder of "
            "temporary files with a shorter one can be written (TMPDIR, /tmp); choose a shorter --data-dir"
        )

    def log(self, name: str) -> Path:
        """Path of a log file. Raises FolderError."""
        return self._within("logs") / f"{name}.log"

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


def _fits_socket(path: Path) -> bool:
    """True if the system takes the path for a socket, and a URL can name it: it is text in UTF-8."""
    with suppress(UnicodeEncodeError):
        return len(str(path).encode()) <= MAX_SOCKET_PATH
    return False


def _temporary_folders() -> list[Path]:
    """The folder that TMPDIR names, if it can be written, and the usual one."""
    found = [Path("/tmp")]
    with suppress(OSError):  # there is none
        found.insert(0, Path(tempfile.gettempdir()))
    return found


def _make_private(folder: Path) -> None:
    """Create the folder for this user alone. Raises FolderError if it is another's, OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise FolderError(f"{folder} belongs to another user; choose a shorter --data-dir")
    folder.chmod(0o700)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_is_ours(path: Path) -> None:
    """Raises FolderError for a folder that holds other files: they would be mixed with ours, and made private."""
    if path.stat().st_uid != os.getuid():
        raise FolderError(f"the data folder {path} belongs to another user; choose another with --data-dir")
    names = {each.name for each in path.iterdir()} - _NOBODYS
    if names and not names & _OURS:
        raise FolderError(
            f"the data folder {path} holds other files ({sorted(names)[0]}); choose an empty or a new one with "
            "--data-dir"
        )


def _keep_private(path: Path) -> None:
    """Removes permissions of others that an earlier version or a person has granted."""
    with suppress(FileNotFoundError):  # a running store may remove files meanwhile
        if path.is_symlink():
            return
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            path.chmod(mode & 0o700)
        if path.is_dir():
            for each in path.iterdir():
                _keep_private(each)
