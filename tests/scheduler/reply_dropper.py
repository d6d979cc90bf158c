"""A proxy before Redis, on a unix socket, that can swallow a reply.

The command is executed, and its caller never hears of it.
"""

import asyncio
from pathlib import Path


class ReplyDropper:
    """Forwards both ways, until told to drop a reply."""

    def __init__(self, listen_at: Path, server_at: Path) -> None:
        self._listen_at = listen_at
        self._server_at = server_at
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._dropping = False
        self.num_dropped = 0
        self.cuts_on_drop = False

    @property
    def url(self) -> str:
        return f"unix://{self._listen_at}"

    async def __aenter__(self) -> "ReplyDropper":
        self._server = await asyncio.start_unix_server(self._accept, self._listen_at)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    def drop_next_reply(self, *, and_cut: bool) -> None:
        """The next reply is lost; with `and_cut` its connection too, else it stays silent from then on."""
        self._dropping = True
        self.cuts_on_drop = and_cut

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._server_at)
        self._writers |= {writer, server_writer}
        for pump in (self._requests(reader, server_writer), self._replies(server_reader, writer)):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent = False
        while data := await reader.read(1 << 16):
            if self._dropping:
                self._dropping, silent = False, True
                self.num_dropped += 1
                if self.cuts_on_drop:
                    break
            if not silent:
                writer.write(data)
        writer.close()
