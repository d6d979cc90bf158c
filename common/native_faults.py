"""Which exceptions are faults of the code that was called, and which are the interpreter's or the event loop's own.

A panic of a library in Rust derives from BaseException alone. Where a call's fault must be its answer, `except
CONTROL_FLOW: raise` stands before `except BaseException`.
"""

import asyncio

CONTROL_FLOW = (GeneratorExit, asyncio.CancelledError, KeyboardInterrupt, SystemExit)
