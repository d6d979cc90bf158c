"""The pipe on which a service reports its start: the reading end, and the parser of its lines."""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_LAST_WORDS_S = 1.0


class StatusPipe:
    """A pipe for one start of a service: the service inherits `theirs`, `read` reads our end."""

    def __init__(self) -> None:
        """Open the pipe. Raises OSError if there are no descriptors left."""
        self._ours, self.theirs = os.pipe()
        self._is_theirs_open = True

    async def read(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Pass on each object until the service has ended. Lines that are no object are ignored."""
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
        """Wait briefly for the last lines of a service that has ended."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reading, _LAST_WORDS_S)

    def close(self) -> None:
        """Close both ends of a pipe that no process inherited."""
        self._close_theirs()
        os.close(self._ours)

    def _close_theirs(self) -> None:
        if self._is_theirs_open:
            self._is_theirs_open = False
            os.close(self.theirs)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; one that is too long comes in parts."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
