"""Tells faults of the called code from exceptions of the interpreter and the event loop.

A panic of a library in Rust derives from BaseException, not from Exception. Where a call must be answered with its
fault, `except CONTROL_FLOW: raise` stands before `except BaseException`.
"""

import asyncio

CONTROL_FLOW = (GeneratorExit, asyncio.CancelledError, KeyboardInterrupt, SystemExit)

_MOST_SHOWN = 300  # characters of a message that a library wrote


def shortened(error: BaseException) -> str:
    """The exception's message, short enough to be passed on; its type if it has no message."""
    said = str(error) or type(error).__name__
    return said if len(said) <= _MOST_SHOWN else said[:_MOST_SHOWN] + "…"
