"""Follows log files as they grow, for `quire serve --verbose`."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

POLL_S = 0.1


async def echo_logs(paths: Sequence[Path], echo: Callable[[str], None]) -> None:
    """Pass on every complete line that is appended from now on; ends when cancelled."""
    tails = [_Tail(path) for path in paths]
    while True:
        for tail in tails:
            for line in tail.new_lines():
                echo(line)
        await asyncio.sleep(POLL_S)


class _Tail:
    """Reading position in a log file that may be rotated to NAME.1."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._place = 0, 0
        if path.exists():
            stat = path.stat()
            self._inode, self._place = stat.st_ino, stat.st_size

    def new_lines(self) -> list[str]:
        try:
            inode = self._path.stat().st_ino
            lines = []
            if inode != self._inode:
                rest = self._path.with_name(f"{self._path.name}.1")
                if self._inode and rest.exists() and rest.stat().st_ino == self._inode:
                    lines = self._read(rest)
                self._inode, self._place = inode, 0
            return [*lines, *self._read(self._path)]
        except OSError:  # not created yet, or not readable
            return []

    def _read(self, path: Path) -> list[str]:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            self._place = self._place if self._place <= log.tell() else 0
            log.seek(self._place)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        return whole.decode(errors="replace").splitlines()
