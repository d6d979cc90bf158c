"""The log file of one service: what it has said since its last start, and when it became ready.

Lines that are JSON objects are events with a timestamp, as our services write them; others are anybody's.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

TAIL_BYTES = 8192


class ServiceLog:
    """The file outlives the service's starts; this knows where in it the last one began."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def begin(self) -> BinaryIO:
        """The file to write to, from a new start on; the caller closes it."""
        log = self.path.open("ab")
        self._start = log.tell()
        return log

    def last_line(self) -> str:
        """What was said last since the start."""
        lines = self.last_lines()
        return lines[-1].strip() if lines else "it said nothing"

    def last_lines(self) -> list[str]:
        """The end of what was said since the start."""
        with self.path.open("rb") as log:
            end = log.seek(0, 2)
            log.seek(max(self._start, end - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()]

    def first_time_of(self, event: str) -> datetime | None:
        """When the event was first logged since the start; None if it was not."""
        for line in self._lines():
            if f'"{event}"' not in line:
                continue
            try:
                logged = json.loads(line)
                if logged["event"] == event:
                    return datetime.fromisoformat(logged["timestamp"])
            except (ValueError, TypeError, KeyError):  # it only looked like one
                continue
        return None

    def _lines(self) -> Iterator[str]:
        with self.path.open("rb") as log:
            log.seek(self._start)
            for line in log:
                yield line.decode(errors="replace")
