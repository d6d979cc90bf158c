"""Health status of our services: as announced, until a service is closed for good.

Knows services by their names alone.
"""

import asyncio

from common.serving import GrpcServer


class Readiness:
    """Owned by the event loop's thread."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._closed: set[str] = set()
        self._changes: set[asyncio.Task[None]] = set()  # on their way

    def announce(self, service: str, is_serving: bool) -> None:
        """Set soon whether a service is served; changes keep their order."""
        change = asyncio.create_task(self._say(service, is_serving))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)

    async def close(self, service: str) -> None:
        """Report a service as not served from now on, whatever is or was announced."""
        self._closed.add(service)
        await self._server.set_serving(service, False)

    async def _say(self, service: str, is_serving: bool) -> None:
        await self._server.set_serving(service, is_serving and service not in self._closed)
