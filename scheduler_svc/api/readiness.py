"""Health status of our services: as announced, until a service is closed for good.

Knows services by their names alone.
"""

from typing import Protocol


class HealthReport(Protocol):
    """Report of the health of services, by their names."""

    def set_serving(self, service: str, serving: bool) -> None:
        """Set the health of one service."""


class SharedHealth:
    """Health of the services of several shards in one process: a service is served while one of them serves it."""

    def __init__(self, whole: HealthReport) -> None:
        self._whole = whole
        self._serving: set[tuple[int, str]] = set()

    def part(self, shard: int) -> HealthReport:
        """The health of one shard's services."""
        return _Part(self, shard)

    def set_serving(self, shard: int, service: str, serving: bool) -> None:
        """Set the health of one service of one shard."""
        if serving:
            self._serving.add((shard, service))
        else:
            self._serving.discard((shard, service))
        self._whole.set_serving(service, any(name == service for _, name in self._serving))


class _Part:
    def __init__(self, shared: SharedHealth, shard: int) -> None:
        self._shared = shared
        self._shard = shard

    def set_serving(self, service: str, serving: bool) -> None:
        self._shared.set_serving(self._shard, service, serving)


class Readiness:
    """Owned by the event loop's thread."""

    def __init__(self, server: HealthReport) -> None:
        self._server = server
        self._closed: set[str] = set()

    def announce(self, service: str, is_serving: bool) -> None:
        """Set whether a service is served."""
        self._server.set_serving(service, is_serving and service not in self._closed)

    def close(self, service: str) -> None:
        """Report a service as not served from now on, whatever is or was announced."""
        self._closed.add(service)
        self._server.set_serving(service, False)
