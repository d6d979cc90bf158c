"""Terminals and pipes that take nothing for now: stopped as by Ctrl-S, or full since nobody reads."""

import os
import pty
import termios
from contextlib import suppress
from typing import Literal

Kind = Literal["pipe", "terminal"]


def stopped_output(kind: Kind) -> tuple[int, int]:
    """Both ends, the one to read from first."""
    if kind == "terminal":
        ours, theirs = pty.openpty()
        termios.tcflow(theirs, termios.TCOOFF)
        return ours, theirs
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with suppress(BlockingIOError):
        while True:
            os.write(theirs, bytes(4096))
    os.set_blocking(theirs, True)
    return ours, theirs


def let_go_on(kind: Kind, ours: int, theirs: int) -> bytes:
    """Have it take output again. Returns what was read for that."""
    read = b""
    if kind == "terminal":
        termios.tcflow(theirs, termios.TCOON)
        return read
    os.set_blocking(ours, False)
    with suppress(BlockingIOError):
        while data := os.read(ours, 65536):
            read += data
    os.set_blocking(ours, True)
    return read
