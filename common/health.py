"""The service `grpc.health.v1.Health`: what a server has set of its services, asked for once or watched.

No change of health waits for a watcher: one that takes nothing is a slow reader like any other. Knows services by
their names alone.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc import Context
from quire.errors import NotFoundError

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Answer = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # without types
    """The servicer. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._is_serving: dict[str, bool] = {}
        self._changed = asyncio.Event()  # of the next change; the one after it has another
        self._is_closed = False

    def set_serving(self, service: str, serving: bool) -> None:
        """Set the health of a service, and wake those that watch it. Does nothing once closed."""
        if self._is_closed:
            return
        self._is_serving[service] = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Report all services as not served, for good."""
        for service in list(self._is_serving):
            self.set_serving(service, False)
        self._is_closed = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Health of a service now. Raises NotFoundError."""
        if request.service not in self._is_serving:
            raise NotFoundError("no service of this name is served here")
        return self._answer(request.service)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Health of a service now and after each change, of which those are left out that pass while one is written."""
        said = None
        while True:
            changed = self._changed
            answer = self._answer(request.service)
            if answer != said:
                said = answer
                yield answer
            await changed.wait()

    async def List(self, request: Any, context: Context) -> Any:
        """Health of all services. Called with a version of the service that has this method."""
        return health_pb2.HealthListResponse(statuses={name: self._answer(name) for name in self._is_serving})

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        is_serving = self._is_serving.get(service)
        if is_serving is None:
            return _Answer(status=_Answer.SERVICE_UNKNOWN)
        return _Answer(status=_Answer.SERVING if is_serving else _Answer.NOT_SERVING)
