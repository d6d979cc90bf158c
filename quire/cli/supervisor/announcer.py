"""Messages of `quire serve` to its user: lines, and on a terminal one live line while it starts.

Nothing waits for a terminal or for the reader of a pipe, or fails without one. Passwords of URLs are never shown.
"""

import atexit
import sys
from typing import IO, cast

from rich.console import Console

from quire.cli.supervisor.unhurried_output import OutputThread, UnhurriedStream
from quire.log_text import readable_line
from quire.redaction import without_passwords

_CLEAR_LINE = "\r\033[K"
_END_S = 1.0  # for the last messages at the end of the process


class Announcer:
    """Writes messages to standard error, and the greeting to standard output."""

    def __init__(self, log_format: str = "auto") -> None:
        """`log_format`: as in the services' settings."""
        self._log_format = log_format
        self._thread = OutputThread()
        out, err = (cast(IO[str], UnhurriedStream(each, self._thread)) for each in (sys.stdout, sys.stderr))
        self._out = Console(file=out, highlight=False)
        self._err = Console(file=err, highlight=False, soft_wrap=True)
        self._live = ""  # text of the live line
        atexit.register(self._thread.wait_until_written, _END_S)

    @property
    def has_live_line(self) -> bool:
        """True if standard error is a terminal."""
        return self._err.is_terminal and not self._err.is_dumb_terminal

    def print_message(self, message: str) -> None:
        """Prints a line above the live one."""
        self._print(self._err, f"quire: {message}")

    def print_greeting(self, headline: str, lines: list[tuple[str, str]]) -> None:
        """Prints the greeting: a headline, then names with values."""
        self._clear()
        self._out.print(headline)
        for name, value in lines:
            self._print(self._out, f"  {name:<9}{value}")

    def show_live_line(self, text: str) -> None:
        """Replaces the live line; "" removes it. Without a terminal, or while it is stopped, nothing happens."""
        if not self.has_live_line or text == self._live or (text and self._thread.is_behind):
            return
        room = max(10, self._err.width - 1)
        self._err.file.write(_CLEAR_LINE + (text if len(text) <= room else text[: room - 1] + "…"))
        self._live = text

    def print_log_line(self, line: str) -> None:
        """Prints a line of a service's log; on a terminal in readable form, unless JSON was asked for."""
        self._clear()
        is_read = self._err.is_terminal and self._log_format != "json"
        text = readable_line(line, colours=True) if is_read else line
        self._err.file.write(without_passwords(text) + "\n")

    def _print(self, console: Console, text: str) -> None:
        self._clear()
        console.print(without_passwords(text), markup=False, soft_wrap=True)

    def _clear(self) -> None:
        if self._live:
            self._err.file.write(_CLEAR_LINE)
            self._live = ""
