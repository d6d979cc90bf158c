"""Watches what a server's connections hold in memory, and cuts those that hold too much.

gRPC buffers a message until it is complete, so a message that a peer never finishes keeps its memory. Its size is the
bytes that the kernel received over the connection, less the messages that were delivered. It is looked at when the
process grows.
"""

import asyncio
import ctypes

import structlog

from common.own_sockets import bytes_received, resident_bytes, shut_down_connections
from common.peer_limits import EdgeLimits, PeerConnection, PeerLimits
from common.waits import is_set_within

LOOK_EVERY_S = 0.1
GROWTH_BYTES = 32 << 20  # of the process, after which its connections are looked at
TIDY_EVERY_S = 20.0
TIDY_SOON_S = 1.0  # after a connection was cut: by then gRPC has freed its buffers

log = structlog.get_logger()


class ConnectionWatch:
    """Applies the limits of one server to its connections while `run` runs."""

    def __init__(self, limits: EdgeLimits) -> None:
        self.peers = PeerLimits(limits, cut=self._to_cut)
        self._doomed: dict[str, str] = {}  # reasons by key
        self._wanted = asyncio.Event()
        self._calm_bytes = 0  # memory of the process at the last look that found nothing to cut
        self._tidy_s = 0.0  # when to tidy up next, by the loop's clock

    async def run(self) -> None:
        """Watch the connections until cancelled."""
        self._tidy_s = asyncio.get_running_loop().time() + TIDY_EVERY_S
        while True:
            await is_set_within(self._wanted, LOOK_EVERY_S)
            self._wanted.clear()
            try:
                await self._watch_once()
            except Exception:  # nobody waits for this task, and without it no limit would count
                log.exception("connections were not looked at")
                await asyncio.sleep(TIDY_SOON_S)

    async def _watch_once(self) -> None:
        loop = asyncio.get_running_loop()
        if self._has_grown():
            await self._look()
            self._tidy_s = min(self._tidy_s, loop.time() + TIDY_SOON_S)
        if self._doomed:
            await self._cut_doomed()
            self._tidy_s = loop.time() + TIDY_SOON_S
        if loop.time() >= self._tidy_s:
            await self._tidy()
            self._tidy_s = loop.time() + TIDY_EVERY_S

    def _has_grown(self) -> bool:
        size = resident_bytes()
        self._calm_bytes = min(self._calm_bytes or size, size)
        return size > self._calm_bytes + GROWTH_BYTES

    async def _look(self) -> None:
        hoarders = self.peers.connections_to_cut(await asyncio.to_thread(bytes_received))
        for connection, num_bytes in hoarders:
            self.peers.cut(connection, f"{num_bytes >> 20} MiB received that are no whole message")

    async def _tidy(self) -> None:
        self.peers.forget_closed_connections(await asyncio.to_thread(bytes_received))
        await asyncio.to_thread(_return_freed_memory)
        self._calm_bytes = resident_bytes()

    def _to_cut(self, connection: PeerConnection, reason: str) -> None:
        self._doomed[connection.key] = reason
        self._wanted.set()

    async def _cut_doomed(self) -> None:
        doomed, self._doomed = self._doomed, {}
        await asyncio.to_thread(shut_down_connections, doomed)
        for key, reason in doomed.items():
            log.warning("connection cut", peer=key, reason=reason)


def _return_freed_memory() -> None:
    """Give freed memory back to the system: the allocator keeps small pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)
