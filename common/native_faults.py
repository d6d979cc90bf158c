"""Which exceptions are faults of the code that was called, and which are the interpreter's or the event loop's own.

A panic of a library in Rust derives from BaseException alone. Where a call's fault must be its answer, `except
CONTROL_FLOW: raise` stands before `except BaseException`.
"""

import asyncio

CONTROL_FLOW = (GeneratorExit, asyncio.CancelledError, KeyboardInterrupt, SystemExit)

_MOST_SHOWN = 300  # characters of a message that a library wrote


def shortened(error: BaseException) -> str:
    """What the exception says, short enough to be passed on; its type if it says nothing."""
    said = str(error) or type(error).__name__
    return said if len(said) <= _MOST_SHOWN else said[:_MOST_SHOWN] + "…"
