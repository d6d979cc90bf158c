"""Which of our services health says are served: as it is announced, and never again once a service is closed.

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
        """Says soon whether it is served; changes are said in their order."""
        change = asyncio.create_task(self._say(service, is_serving))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)

    async def close(self, service: str) -> None:
        """It is not served from now on, whatever is announced, or was and is not said yet."""
        self._closed.add(service)
        await self._server.set_serving(service, False)

    async def _say(self, service: str, is_serving: bool) -> None:
        await self._server.set_serving(service, is_serving and service not in self._closed)
