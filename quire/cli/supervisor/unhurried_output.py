"""Output to terminals and pipes on a thread of its own: nobody waits for one that is stopped, or that nobody reads.

Texts keep their order. What is too much to be kept is lost, and so is all that follows the end of a reader.
"""

import os
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO

MOST_BYTES = 1 << 20  # that wait for their readers


class OutputThread:
    """Writes what it is given, text after text."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()  # descriptors with their texts
        self._num_bytes = 0
        threading.Thread(target=self._write_all, name="output", daemon=True).start()

    @property
    def is_behind(self) -> bool:
        """True if a text waits."""
        return bool(self._waiting)

    def give(self, fd: int, text: bytes) -> None:
        """Have a text written to a descriptor, without waiting for it."""
        with self._changed:
            if self._num_bytes + len(text) <= MOST_BYTES:
                self._waiting.append((fd, text))
                self._num_bytes += len(text)
                self._changed.notify_all()

    def wait_until_written(self, timeout_s: float) -> None:
        """Wait for all texts that were given, but no longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                fd, text = self._waiting[0]
            rest = memoryview(text)
            with suppress(OSError):  # its reader is gone, or the disk is full
                while rest:
                    rest = rest[os.write(fd, rest) :]
            with self._changed:
                self._waiting.popleft()
                self._num_bytes -= len(text)
                self._changed.notify_all()


class UnhurriedStream:
    """A standard stream, as far as a console needs one, whose texts the thread writes."""

    def __init__(self, stream: TextIO, thread: OutputThread) -> None:
        self.encoding = stream.encoding
        self._errors = stream.errors or "replace"
        self._fd = stream.fileno()
        self._is_terminal = stream.isatty()
        self._thread = thread

    def write(self, text: str) -> int:
        """Have a text written."""
        self._thread.give(self._fd, text.encode(self.encoding, self._errors))
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is written is on its way."""

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._fd
