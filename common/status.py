"""Status lines from a service to the supervisor that started it: the phase of its start, notices and warnings.

One JSON object a line, on a pipe that the supervisor reads: {"phase": …, "part": …}, {"about": …, "notice": …},
{"event": …}, {"warning": …, "reason": …}. Nothing waits for the reader, and nothing fails without one.
"""

import json
import os
from contextlib import suppress
from typing import Any

EVENTS = ("listening", "ready", "leading")  # of the log; reported to the supervisor whatever the log's level
_MAX_BYTES = 4096  # what a pipe takes whole or not at all


class Status:
    """The writing end of the pipe; without one, all lines are dropped."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)

    def phase(self, name: str, part: float | None = None) -> None:
        """Report the phase of the start and, where known, the part of it that is done, from 0 to 1."""
        self._tell(phase=name, **({} if part is None else {"part": round(part, 3)}))

    def notice(self, about: str, text: str) -> None:
        """Report a line for the greeting, such as a choice and its reason, under the short name `about`."""
        self._tell(about=about, notice=text)

    def forward_log_entry(self, entry: dict[str, Any]) -> None:
        """Report the entries of the log that the supervisor needs: warnings, and the events in `EVENTS`."""
        event = str(entry.get("event"))
        if event in EVENTS:
            self._tell(event=event)
        elif entry.get("level") in ("warning", "error", "critical"):
            reason = entry.get("reason")
            self._tell(warning=event, **({} if reason is None else {"reason": str(reason)}))

    def _tell(self, **said: object) -> None:
        if self._fd is None:
            return
        line = json.dumps(said).encode() + b"\n"
        if len(line) > _MAX_BYTES:
            line = json.dumps({name: str(value)[:500] for name, value in said.items()}).encode() + b"\n"
        with suppress(OSError):  # the supervisor has gone, or is busy elsewhere
            os.write(self._fd, line)
