"""The life of a service's process: its event loop, stop signals, and the exit.

Knows nothing of what the process does.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import uvloop

T = TypeVar("T")


def end_after(main: Callable[[], None]) -> NoReturn:
    """Calls `main` and ends the process with it: with exit code 0, that of SystemExit, or 1 after a traceback.

    No thread is waited for, as the interpreter and its libraries would: one of them may be looking up the name of a
    host that is gone, which takes a resolver up to a minute, or load a model. `main` waits for what has to be done.
    """
    code = 1
    try:
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    except BaseException:  # any other exception ends the process too
        sys.excepthook(*sys.exc_info())
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader is gone
                stream.flush()
        os._exit(code)


def run_service(work: Coroutine[Any, Any, T]) -> T:
    """Runs the work on an event loop, for a process that `end_after` ends.

    The loop is not closed: that would wait for its threads, and those of gRPC.
    """
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(work)


def stop_event(parent_pipe_fd: int | None) -> asyncio.Event:
    """An event that is set on SIGTERM, on SIGINT, and when the supervisor is gone.

    Args:
        parent_pipe_fd: read end of a pipe whose write end only the supervisor holds; None without a supervisor.
    """
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    if parent_pipe_fd is not None:
        os.set_blocking(parent_pipe_fd, False)
        loop.add_reader(parent_pipe_fd, _supervisor_gone, loop, parent_pipe_fd, event)
    return event


def _supervisor_gone(loop: asyncio.AbstractEventLoop, fd: int, event: asyncio.Event) -> None:
    if not os.read(fd, 1):  # end of file: nothing is ever written
        loop.remove_reader(fd)
        event.set()
