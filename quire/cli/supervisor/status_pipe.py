"""The pipe on which a service tells how far its start is: the reading end, and what is made of its lines."""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_LAST_WORDS_S = 1.0


class StatusPipe:
    """One pipe for one start of a service: `theirs` is for it to inherit, `read` reads ours."""

    def __init__(self) -> None:
        """Raises OSError if there are no descriptors left."""
        self._ours, self.theirs = os.pipe()
        self._is_theirs_open = True

    async def read(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Hands on each object that is told, until the service has ended. Lines that are none are passed over."""
        self._close_theirs()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._ours, "rb", 0)
        )
        try:
            while line := await _line(reader):
                with suppress(ValueError):
                    said = json.loads(line)
                    if isinstance(said, dict):
                        tell(said)
        finally:
            transport.close()

    async def end(self, reading: "asyncio.Task[None]") -> None:
        """Waits a moment for the last words of a service that has ended."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reading, _LAST_WORDS_S)

    def close(self) -> None:
        """Closes both ends of a pipe that nobody was given."""
        self._close_theirs()
        os.close(self._ours)

    def _close_theirs(self) -> None:
        if self._is_theirs_open:
            self._is_theirs_open = False
            os.close(self.theirs)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; one that is too long is cut up."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
