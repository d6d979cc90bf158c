"""Where a service's log goes: standard error, or a file of bounded size that takes the place of it.

What cannot be written, because a disk is full or a terminal has gone, is lost, and nothing fails for it.
"""

import os
import sys
from pathlib import Path
from threading import Lock


class LogStream:
    """Standard error as a stream for loggers: one write a line, so that no two lines mix."""

    def __init__(self) -> None:
        self._fd = sys.stderr.fileno()

    def write(self, text: str) -> int:
        """Writes the text. What does not go out is dropped."""
        data = memoryview(text.encode(errors="backslashreplace"))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            pass
        return len(text)

    def flush(self) -> None:
        """Do nothing: a write is out when it returns."""


class RotatingLog(LogStream):
    """A log file that is set aside as NAME.1 when it has grown beyond `max_bytes`, which replaces an older one.

    Standard output and standard error are the file, so that tracebacks and what libraries print are in it too; the
    process needs nobody else to rotate it.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError if the file cannot be written."""
        super().__init__()
        self._path = path
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._open()

    def write(self, text: str) -> int:
        """As LogStream, into a file that has room."""
        with self._lock:
            try:
                if os.fstat(self._fd).st_size >= self._max_bytes:
                    self._path.replace(f"{self._path}.1")
                    self._open()
            except OSError:  # the folder has gone, or may not be written: what is open is written on
                pass
            return super().write(text)

    def _open(self) -> None:
        opened = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for fd in {self._fd, 1, 2}:
            os.dup2(opened, fd)
        os.close(opened)
