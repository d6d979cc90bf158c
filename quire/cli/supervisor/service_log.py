"""The log file of one service, and its output since its last start, as far as the file still has it."""

import os
from pathlib import Path
from typing import BinaryIO

TAIL_BYTES = 8192
MOST_BYTES = 16 << 20  # of a file that a start goes on with, unless it is said otherwise


class ServiceLog:
    """A log file that is kept across restarts, and the position where the last start began.

    The service rotates the file when it has grown; a start does that for one that ended before it could.
    """

    def __init__(self, path: Path, max_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._start = 0
        self._file = (0, 0)  # device and inode

    def begin(self) -> BinaryIO:
        """Open the file for a new start; the caller closes it. Raises OSError."""
        log = open_private_log(self.path)
        if os.fstat(log.fileno()).st_size >= self._max_bytes:
            log.close()
            self.path.replace(f"{self.path}.1")
            log = open_private_log(self.path)
        self._start = log.seek(0, os.SEEK_END)
        self._file = _identity(log)
        return log

    def last_line(self) -> str:
        """The last line since the start."""
        try:
            with self.path.open("rb") as log:
                start = self._start if _identity(log) == self._file else 0
                end = log.seek(0, os.SEEK_END)
                log.seek(max(start, end - TAIL_BYTES))
                return last_line(log.read())
        except OSError as error:
            return f"its log cannot be read: {error}"


def last_line(output: bytes) -> str:
    """The last line of a process's output that has a text."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it printed nothing"


def _identity(log: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(log.fileno())
    return stat.st_dev, stat.st_ino


def open_private_log(path: Path) -> BinaryIO:
    """Open a log in the data folder for this user alone; the caller closes it. Raises OSError.

    Folders that were removed are made again.
    """
    for folder in (path.parent.parent, path.parent):  # one by one: the mode is not that of parents
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
