"""Health of services: what is announced is said, and what is closed stays so."""

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.serving import GrpcServer
from quire.rpc import PUBLIC_MESSAGE_BYTES
from scheduler_svc.api.readiness import Readiness

SERVICE = "quire.v1.Inference"


class Site:
    """A server, what is announced of it, and a look from outside."""

    def __init__(self) -> None:
        self.server = GrpcServer((SERVICE,), PUBLIC_MESSAGE_BYTES)
        self.readiness = Readiness(self.server)
        self.channel = grpc.aio.insecure_channel(self.server.bind("127.0.0.1:0"))
        self._health: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(self.channel)

    async def is_serving(self) -> bool:
        answer = await self._health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    await made.server.start()
    yield made
    await made.channel.close()
    await made.server.stop(0)


async def test_what_is_announced_last_is_said(site: Site) -> None:
    assert not await site.is_serving()
    site.readiness.announce(SERVICE, True)
    assert await site.is_serving()
    site.readiness.announce(SERVICE, True)
    site.readiness.announce(SERVICE, False)
    assert not await site.is_serving()


async def test_a_closed_service_is_not_served_again_whatever_was_or_is_announced(site: Site) -> None:
    site.readiness.announce(SERVICE, True)
    site.readiness.close(SERVICE)
    assert not await site.is_serving()
    site.readiness.announce(SERVICE, True)
    assert not await site.is_serving()
