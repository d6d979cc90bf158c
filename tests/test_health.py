"""Health of a server: changes reach whoever watches, and wait for nobody."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.health import HealthServicer
from common.peer_limits import EdgeLimits
from common.rpc import Keepalive
from common.serving import GrpcServer
from quire.rpc import PUBLIC_MESSAGE_BYTES
from tests.hostile.raw_connection import RawConnection, message
from tests.patience import patient

SERVICE = "test.Service"
WATCH = "/grpc.health.v1.Health/Watch"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NOBODY: Any = None  # as the context of a call
CALM = Keepalive(time_s=3600, timeout_s=3600)  # for peers that answer no ping


class WatchedServer:
    """A server whose health is watched, from one host at most `max_watches` times."""

    def __init__(self, *, max_watches: int = 0) -> None:
        self.server = GrpcServer(
            (SERVICE,),
            PUBLIC_MESSAGE_BYTES,
            keepalive=CALM,
            limits=EdgeLimits(max_calls_of={WATCH: max_watches}),
        )
        self.address = self.server.bind("127.0.0.1:0")
        self._channel = grpc.aio.insecure_channel(self.address)
        self.health: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> "WatchedServer":
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        async with asyncio.timeout(patient(20)):
            await self.server.stop(0)

    async def check(self, service: str = SERVICE) -> Any:
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=service))).status

    def watch(self, service: str = SERVICE) -> Any:
        return self.health.Watch(health_pb2.HealthCheckRequest(service=service))

    async def until_one_may_watch(self) -> None:
        """Return once one of those that watched has ended, by the refusals of one more."""
        async with asyncio.timeout(patient(20)):
            while await _is_refused(self.watch()):  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.01)

    def watch_and_take_nothing(self) -> RawConnection:
        """Watch over a connection whose window is closed. Returns once the server has begun to write."""
        connection = RawConnection(self.address, window_bytes=0)
        call = connection.open_call(WATCH)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        connection.send(call, message(request.SerializeToString()), ends=True)
        connection.until_answered(call)
        return connection


async def _is_refused(call: Any) -> bool:
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return True
    call.cancel()
    return False


@pytest.fixture
async def watched() -> AsyncIterator[WatchedServer]:
    async with WatchedServer() as made, asyncio.timeout(patient(30)):
        yield made


async def status_of(call: Any) -> Any:
    return (await call.read()).status


async def test_a_service_is_served_as_was_set_last(watched: WatchedServer) -> None:
    assert await watched.check() == await watched.check("") == NOT_SERVING
    watched.server.set_serving(SERVICE, True)
    assert await watched.check() == SERVING
    assert await watched.check("") == NOT_SERVING
    watched.server.set_serving(SERVICE, False)
    assert await watched.check() == NOT_SERVING


async def test_an_unknown_service_is_not_found_and_may_be_watched_until_it_is_known(watched: WatchedServer) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watched.check("later")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    call = watched.watch("later")
    assert await status_of(call) == SERVICE_UNKNOWN
    watched.server.set_serving("later", True)
    assert await status_of(call) == SERVING


async def test_watchers_go_on_when_another_one_leaves() -> None:
    async with WatchedServer(max_watches=2) as watched, asyncio.timeout(patient(30)):
        leaving, staying = watched.watch(), watched.watch()
        assert await status_of(leaving) == await status_of(staying) == NOT_SERVING
        leaving.cancel()
        await watched.until_one_may_watch()
        for serving in (True, False):
            watched.server.set_serving(SERVICE, serving)
            assert await status_of(staying) == (SERVING if serving else NOT_SERVING)


async def test_a_change_does_not_wait_for_a_watcher_that_takes_nothing(watched: WatchedServer) -> None:
    """Else one connection could keep a scheduler from taking over, or a worker from its start or its end."""
    reading = watched.watch()
    assert await status_of(reading) == NOT_SERVING
    with await asyncio.to_thread(watched.watch_and_take_nothing):
        watched.server.set_serving(SERVICE, True)
        assert await status_of(reading) == SERVING
        assert await watched.check() == SERVING
        await watched.server.stop(0)


async def test_a_watch_leaves_its_writing_to_the_edge_which_cuts_slow_readers() -> None:
    health = HealthServicer()
    answers = aiter(health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), NOBODY))
    assert (await anext(answers)).status == SERVICE_UNKNOWN
    for serving in (True, False, False, True):  # while it waits for a reader: the present state is what counts
        health.set_serving(SERVICE, serving)
    assert (await anext(answers)).status == SERVING


async def test_the_end_of_a_server_is_the_end_of_its_health() -> None:
    health = HealthServicer()
    for service in ("", SERVICE):
        health.set_serving(service, True)
    health.close()
    health.set_serving(SERVICE, True)
    for service in ("", SERVICE):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service), NOBODY)
        assert answer.status == NOT_SERVING


async def test_the_health_of_all_services_is_listed_where_the_library_knows_how(watched: WatchedServer) -> None:
    if not hasattr(health_pb2, "HealthListResponse"):  # an older version
        assert not hasattr(watched.health, "List")
        return
    watched.server.set_serving(SERVICE, True)
    answer = await watched.health.List(health_pb2.HealthListRequest())
    assert {name: each.status for name, each in answer.statuses.items()} == {"": NOT_SERVING, SERVICE: SERVING}
