"""The output of a service's log: standard error, or a file of bounded size that replaces it.

Lines that cannot be written, because a disk is full, a terminal is gone or stopped, or nobody reads a pipe, are lost;
the service goes on. What comes behind a line that was cut, because there was room for a part of it, begins a new one.
"""

import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock

_PATIENCE_MS = 500  # with a reader that is behind; one that has taken nothing for so long is not waited for any more


class LogStream:
    """Standard error as a stream for loggers: line after line, so that no two lines mix."""

    def __init__(self) -> None:
        self._fd = sys.stderr.fileno()
        self._lock = Lock()
        self._is_cut = False  # the last line was written in part
        self._is_stopped = False  # it took nothing the last time
        self._room = select.poll()
        self._room.register(self._fd, select.POLLOUT)

    def write(self, text: str) -> int:
        """Writes the text, or drops it where it cannot be written."""
        with self._lock:
            self._write_line(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: a write is out when it returns."""

    def _write_line(self, text: str) -> None:
        data = memoryview(("\n" * self._is_cut + text).encode(errors="backslashreplace"))
        try:
            while data and (written := self._write_part(data)):
                data = data[written:]
                self._is_cut = bool(data)
        except OSError:
            pass

    def _write_part(self, data: memoryview) -> int:
        """Write what there is room for. Returns the number of bytes; 0: there is none, and it was waited for."""
        self._is_stopped = not self._room.poll(0 if self._is_stopped else _PATIENCE_MS)
        return 0 if self._is_stopped else os.write(self._fd, data[: select.PIPE_BUF])


class RotatingLog(LogStream):
    """A log file that is rotated to NAME.1 when it exceeds `max_bytes`; an older NAME.1 is replaced.

    Standard output and standard error go to the file, so tracebacks and output of libraries are in it too. The process
    rotates the file itself.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError if the file cannot be written."""
        super().__init__()
        self._path = path
        self._max_bytes = max_bytes
        self._open()

    def _write_line(self, text: str) -> None:
        try:
            if os.fstat(self._fd).st_size >= self._max_bytes:
                with suppress(FileNotFoundError):  # set aside before, when no new one could be opened
                    self._path.replace(f"{self._path}.1")
                self._open()
        except OSError:  # the folder is gone, or may not be written: go on writing to the open file
            pass
        super()._write_line(text)

    def _write_part(self, data: memoryview) -> int:
        return os.write(self._fd, data)  # a file always takes what it has room for

    def _open(self) -> None:
        opened = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for fd in {self._fd, 1, 2}:
            os.dup2(opened, fd)
        os.close(opened)
        self._is_cut = _ends_within_line(self._path)


def _ends_within_line(path: Path) -> bool:
    """True for a file whose last line was cut, such as by an earlier process, when the disk was full."""
    with suppress(OSError), path.open("rb") as log:
        if size := os.fstat(log.fileno()).st_size:
            return os.pread(log.fileno(), 1, size - 1) != b"\n"
    return False
