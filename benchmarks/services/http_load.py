"""Load on a server of HTTP: requests over several connections, each as soon as the one before is answered."""

import asyncio
import time
from collections.abc import Sequence

_START_S = 60.0
_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class HttpLoad:
    """Load over many connections; parses no more of an answer than its length."""

    def __init__(self, port: int, requests: Sequence[bytes], num_at_once: int) -> None:
        self.num_done = 0
        self._port = port
        self._requests = requests
        self._num_at_once = num_at_once

    async def run(self, seconds: float) -> float:
        """Send for so long. Returns the requests a second."""
        self.num_done, began_s = 0, time.monotonic()
        asking = (self._ask(first, began_s + seconds) for first in range(self._num_at_once))
        await asyncio.gather(*asking)
        return self.num_done / (time.monotonic() - began_s)

    async def _ask(self, number: int, end_s: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while time.monotonic() < end_s:
            writer.write(self._requests[number % len(self._requests)])
            status, body = await read_answer(reader)
            if status != 200:
                raise RuntimeError(f"the server answers {status}: {body[:300]!r}")
            number += self._num_at_once
            self.num_done += 1
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of an answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, length = head.partition(b"content-length:")
    body = await reader.readexactly(int(length.split(b"\r\n")[0])) if length else b""
    return int(head.split(b" ", 2)[1]), body


async def until_healthy(port: int) -> None:
    """Return when the server answers that it is healthy."""
    async with asyncio.timeout(_START_S):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(_HEALTH)
                status, _ = await read_answer(reader)
                writer.close()
                if status == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.2)
