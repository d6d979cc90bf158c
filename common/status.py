"""What a service tells the supervisor that started it: how far its start is, and what a person should know of it.

One JSON object a line, on a pipe that the supervisor reads: {"phase": …, "part": …}, {"about": …, "notice": …},
{"event": …}, {"warning": …, "reason": …}. Nothing waits for the reader, and nothing fails without one.
"""

import json
import os
from contextlib import suppress
from typing import Any

EVENTS = ("listening", "ready", "leading")  # of the log; told to the supervisor whatever the level of the log is
_MAX_BYTES = 4096  # what a pipe takes whole or not at all


class Status:
    """The writing end of the pipe; without one, everything said is dropped."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)

    def phase(self, name: str, part: float | None = None) -> None:
        """Tells what is done now, and which part of it is done, from 0 to 1, where that is known."""
        self._tell(phase=name, **({} if part is None else {"part": round(part, 3)}))

    def notice(self, about: str, text: str) -> None:
        """Tells something that the greeting shows, such as a choice that was made and why, under a short name."""
        self._tell(about=about, notice=text)

    def note_log_entry(self, entry: dict[str, Any]) -> None:
        """Tells what the log says, as far as the supervisor has to know it: warnings, and that we are ready."""
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
