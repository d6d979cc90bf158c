"""Messages of `quire serve` to its user: lines, and on a terminal one live line while it starts.

A closed terminal, or a pipe without a reader, is no reason to fail: from then on nothing is written there. Passwords of
URLs are never shown.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console

from quire.log_text import readable_line
from quire.redaction import without_passwords

_CLEAR_LINE = "\r\033[K"


class _LastingConsole(Console):
    """A console that raises on a broken pipe, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Announcer:
    """Writes messages to standard error, and the greeting to standard output."""

    def __init__(self, log_format: str = "auto") -> None:
        """`log_format`: as in the services' settings."""
        self._log_format = log_format
        self._out = _LastingConsole(highlight=False)
        self._err = _LastingConsole(stderr=True, highlight=False, soft_wrap=True)
        self._live = ""  # text of the live line

    @property
    def has_live_line(self) -> bool:
        """True if standard error is a terminal."""
        return self._err.is_terminal and not self._err.is_dumb_terminal

    def print_message(self, message: str) -> None:
        """Prints a line above the live one."""
        self._guarded(lambda: self._print(self._err, f"quire: {message}"))

    def print_greeting(self, headline: str, lines: list[tuple[str, str]]) -> None:
        """Prints the greeting: a headline, then names with values."""

        def show() -> None:
            self._clear()
            self._out.print(headline)
            for name, value in lines:
                self._print(self._out, f"  {name:<9}{value}")

        self._guarded(show)

    def show_live_line(self, text: str) -> None:
        """Replaces the live line; "" removes it. Without a terminal nothing happens."""
        if not self.has_live_line or text == self._live:
            return

        def draw() -> None:
            room = max(10, self._err.width - 1)
            self._err.file.write(_CLEAR_LINE + (text if len(text) <= room else text[: room - 1] + "…"))
            self._err.file.flush()

        self._guarded(draw)
        self._live = text

    def print_log_line(self, line: str) -> None:
        """Prints a line of a service's log; on a terminal in readable form, unless JSON was asked for."""

        def write() -> None:
            self._clear()
            is_read = self._err.is_terminal and self._log_format != "json"
            text = readable_line(line, colours=True) if is_read else line
            self._err.file.write(without_passwords(text) + "\n")
            self._err.file.flush()

        self._guarded(write)

    def _print(self, console: Console, text: str) -> None:
        self._clear()
        console.print(without_passwords(text), markup=False, soft_wrap=True)

    def _clear(self) -> None:
        if self._live:
            self._err.file.write(_CLEAR_LINE)
            self._err.file.flush()
            self._live = ""

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError):  # gone, or closed
            self._live = ""
            for stream in (sys.stdout, sys.stderr):
                _redirect_to_null(stream)


def _redirect_to_null(stream: object) -> None:
    """Redirects a broken stream to the null device, so that flushing it at exit does not fail."""
    try:
        stream.flush()  # type: ignore[attr-defined]
    except (OSError, ValueError):
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # type: ignore[attr-defined]
            os.close(nowhere)
