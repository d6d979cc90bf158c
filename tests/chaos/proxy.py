"""TCP proxy between any two of our processes, which injects network faults.

It can hold what flows in one direction or both (what a broken network does: nothing arrives, nobody is told), swallow
it, delay and throttle it, cut connections, lose a reply, and flip a bit. Everything it holds goes on when it is healed;
a connection that lost something stays half-open for ever.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Literal

Direction = Literal["up", "down"]  # to the server, to the client
CHUNK_BYTES = 1 << 16
MIN_FLIPPED_BYTES = 40  # shorter ones are acknowledgements and pings

Edit = Callable[[bytes], bytes]
Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Proxy:
    """Proxy on a port of its own. Use as an asynchronous context manager."""

    def __init__(self, server: str, *, seed: int = 0) -> None:
        """`server`: host:port, or the path of a unix socket."""
        self.address = ""
        self.num_flipped = 0
        self.num_dropped = 0
        self.num_edited = 0
        self.num_connections = 0  # that were taken
        self.num_half_open = 0  # connections that lost something in a direction
        self._dial = _dial_of(server)
        self._rng = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open: dict[Direction, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._swallowed: set[Direction] = set()
        self._delay_s = (0.0, 0.0)
        self._bytes_per_s: float | None = None
        self._drops = 0
        self._flips: dict[Direction, int] = {"up": 0, "down": 0}
        self._edits: dict[Direction, Edit] = {}
        self.heal()

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def hold(self, *directions: Direction) -> None:
        """Hold back data in these directions without telling anybody."""
        for direction in directions:
            self._open[direction].clear()

    def swallow(self, *directions: Direction) -> None:
        """Drop data in these directions, and everything later on its connection, without telling anybody."""
        self._swallowed |= set(directions)

    def delay(self, least_s: float, most_s: float | None = None) -> None:
        """Delay every piece by this much, or by a time drawn between the two."""
        self._delay_s = (least_s, least_s if most_s is None else most_s)

    def throttle(self, bytes_per_s: float) -> None:
        """Limit the bytes a second in either direction of a connection."""
        self._bytes_per_s = bytes_per_s

    def drop_reply(self, number: int = 1) -> None:
        """Lose the next replies, each with its connection: the server has executed the commands."""
        self._drops = number

    def flip(self, direction: Direction, number: int = 1) -> None:
        """Flip one bit in each of the next pieces with data."""
        self._flips[direction] = number

    def edit(self, direction: Direction, edit: Edit) -> None:
        """Replace the first piece that `edit` changes."""
        self._edits[direction] = edit

    def cut(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def heal(self) -> None:
        """Stop interfering: held data goes on, connections that lost data stay broken."""
        self._delay_s, self._bytes_per_s, self._drops = (0.0, 0.0), None, 0
        self._swallowed.clear()
        self._flips = {"up": 0, "down": 0}
        self._edits = {}
        for event in self._open.values():
            event.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await self._dial()
        except OSError:
            writer.transport.abort()
            return
        self.num_connections += 1
        self._writers |= {writer, server_writer}
        for pump in (self._pump("up", reader, server_writer), self._pump("down", server_reader, writer)):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_half_open = False
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._open[direction].wait()
                if is_half_open or direction in self._swallowed:
                    self.num_half_open += not is_half_open
                    is_half_open = True
                    continue
                if any(self._delay_s) or self._bytes_per_s:
                    delay_s = self._rng.uniform(*self._delay_s)
                    await asyncio.sleep(delay_s + len(data) / (self._bytes_per_s or float("inf")))
                if direction == "down" and self._drops:
                    self._drops -= 1
                    self.num_dropped += 1
                    break
                writer.write(self._flipped(direction, self._edited(direction, data)))
                await writer.drain()
        except OSError:
            pass
        finally:
            if not is_half_open:  # else not even the end arrives
                self._writers.discard(writer)
                writer.close()

    def _edited(self, direction: Direction, data: bytes) -> bytes:
        edited = self._edits[direction](data) if direction in self._edits else data
        if edited != data:
            del self._edits[direction]
            self.num_edited += 1
        return edited

    def _flipped(self, direction: Direction, data: bytes) -> bytes:
        if not self._flips[direction] or len(data) < MIN_FLIPPED_BYTES:
            return data
        self._flips[direction] -= 1
        self.num_flipped += 1
        changed = bytearray(data)
        changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)


def _dial_of(server: str) -> Dial:
    if server.startswith("/"):
        return lambda: asyncio.open_unix_connection(server)
    host, _, port = server.rpartition(":")
    return lambda: asyncio.open_connection(host, int(port))
