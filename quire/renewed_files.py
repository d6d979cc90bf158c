"""Value made of files, made anew once one of them has changed, as certificates do while a service runs.

Files are looked at when they are asked for; nothing watches them between. Knows not what is made of them.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_Stamp = tuple[tuple[int, int, int, int], ...]


class RenewedFiles(Generic[T]):
    """Value of the latest files that could be used. Any thread may ask for it."""

    def __init__(
        self,
        files: Sequence[Path],
        make: Callable[[], T],
        *,
        on_renewed: Callable[[], object] = lambda: None,
        on_refused: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Make the first value; raises what `make` raises.

        Args:
            files: those that `make` reads.
            make: reads the files; OSError and ValueError leave the value as it is.
            on_renewed: called when a value was made anew.
            on_refused: called once for files that have changed and of which none could be made.
        """
        self._files = files
        self._make = make
        self._on_renewed = on_renewed
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._refused: _Stamp | None = ()  # of no file: of none until now
        self._stamp = self._look()
        self._value = make()

    def latest(self) -> T:
        """The value; the same object as long as no file has changed."""
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp:
                return self._value
            try:
                value = self._make()
            except (OSError, ValueError) as error:
                if stamp != self._refused:  # tried each time: a certificate may become valid as time passes
                    self._refused = stamp
                    self._on_refused(error)
                return self._value
            if self._look() != stamp:
                return self._value  # files of two states may have been read: the next call finds them settled
            self._stamp, self._value, self._refused = stamp, value, ()
        self._on_renewed()
        return value

    def _look(self) -> _Stamp | None:
        """States of the files, through links: a mounted secret is replaced by moving one. None: one is missing."""
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return None
        return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found)
