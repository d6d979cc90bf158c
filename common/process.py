"""The life of a service's process: when to end, what to give up then, and how to refuse to start.

Knows nothing of what the process does.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Collection, Coroutine
from typing import Any, NoReturn

EXIT_CONFIGURATION = 2


def refuse_to_start(service: str, message: str) -> NoReturn:
    """Ends the process with one sentence on standard error and the exit code of a configuration error."""
    print(f"{service}: {message}", file=sys.stderr, flush=True)  # noqa: T201 - for the person who started it
    raise SystemExit(EXIT_CONFIGURATION)


def ending(parent_pipe_fd: int | None) -> asyncio.Event:
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


async def unless_failed(work: Coroutine[Any, Any, Any], others: Collection["asyncio.Future[None]"]) -> None:
    """Does the work, or gives it up and raises when one of the others fails."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
        for each in (*others, task):
            if each.done():
                each.result()
    finally:
        task.cancel()
