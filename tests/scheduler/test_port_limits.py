"""Limits of the scheduler's port: whoever fills what a host may have open neither ends workers nor fails probes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.serving import GrpcServer
from quire.api_keys import AcceptedKeys
from quire.limit_settings import LimitSettings
from quire.rpc import PUBLIC_MESSAGE_BYTES
from quire.v1 import cluster_pb2 as pb
from quire.v1 import cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from scheduler_svc.part_settings import edge_limits
from tests.patience import patient

MOST = 3
KEY = "key-of-the-deployment"


class IdleCluster(cluster_pb2_grpc.ClusterServicer):
    """Takes every worker, and tells the shards for ever."""

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        return pb.RegisterResponse(epoch=1)

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:
        return pb.DrainWorkerResponse()

    async def Topology(self, request: pb.TopologyRequest, context: Any) -> AsyncIterator[pb.TopologyResponse]:
        yield pb.TopologyResponse(shards=[pb.Shard()])
        await asyncio.Event().wait()


class IdleInference(inference_pb2_grpc.InferenceServicer):
    """Answers once what is asked for, then keeps the call open."""

    async def GetStats(self, request: Any, context: Any) -> inference_pb2.GetStatsResponse:
        return inference_pb2.GetStatsResponse()

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse()
        await asyncio.Event().wait()


@pytest.fixture
async def address() -> AsyncIterator[str]:
    limits = edge_limits(LimitSettings(max_calls=MOST, max_calls_per_host=MOST, max_sessions_per_host=MOST - 1))
    keys = AcceptedKeys([KEY])
    server = GrpcServer(("quire.v1.Cluster",), PUBLIC_MESSAGE_BYTES, limits=limits, keys=lambda: keys)
    cluster_pb2_grpc.add_ClusterServicer_to_server(IdleCluster(), server.grpc)  # type: ignore[abstract]
    inference_pb2_grpc.add_InferenceServicer_to_server(IdleInference(), server.grpc)  # type: ignore[abstract]
    bound = server.bind("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(patient(30)):
        yield bound
    await server.stop(0)


WITH_KEY = (("authorization", f"Bearer {KEY}"),)


async def fill(begin: Callable[[], Any]) -> list[Any]:
    """Open calls until one is refused. Returns those that are open, as long as they are kept."""
    calls: list[Any] = []
    while True:
        call = begin()
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            return calls
        calls.append(call)


async def listings() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    """One question, and no end of them."""
    yield reflection_pb2.ServerReflectionRequest(list_services="")
    await asyncio.Event().wait()


async def test_calls_without_a_key_fill_no_room_but_their_own(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as hostile, grpc.aio.insecure_channel(address) as ours:
        health: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(hostile)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(hostile)
        watching = await fill(lambda: health.Watch(health_pb2.HealthCheckRequest()))
        listing = await fill(lambda: reflection.ServerReflectionInfo(listings()))
        assert (len(watching), len(listing)) == (MOST - 1, 1)  # of one method, and of both together
        inference: Any = inference_pb2_grpc.InferenceStub(ours)
        await inference.GetStats(inference_pb2.GetStatsRequest(), metadata=WITH_KEY)
        await is_alive(ours)


async def test_a_host_that_has_all_its_calls_open_registers_workers_and_answers_probes(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as busy, grpc.aio.insecure_channel(address) as ours:
        cluster: Any = cluster_pb2_grpc.ClusterStub(busy)
        inference: Any = inference_pb2_grpc.InferenceStub(busy)
        following = await fill(lambda: cluster.Topology(pb.TopologyRequest(), metadata=WITH_KEY))
        reading = await fill(lambda: inference.Attach(inference_pb2.AttachRequest(), metadata=WITH_KEY))
        assert (len(following), len(reading)) == (MOST - 1, 1)
        with pytest.raises(grpc.aio.AioRpcError, match="calls open, which is the limit"):
            await inference.GetStats(inference_pb2.GetStatsRequest(), metadata=WITH_KEY)
        await is_alive(ours)


async def is_alive(channel: grpc.aio.Channel) -> None:
    """A worker keeps its lease and is drained, and a probe is answered."""
    cluster: Any = cluster_pb2_grpc.ClusterStub(channel)
    health: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(channel)
    registration = pb.RegisterRequest(worker_id="w", address="h:1", incarnation="i", model_fingerprint="m")
    assert (await cluster.Register(registration, metadata=WITH_KEY)).epoch == 1
    await cluster.DrainWorker(pb.DrainWorkerRequest(worker_id="w"), metadata=WITH_KEY)
    await health.Check(health_pb2.HealthCheckRequest())


def test_every_method_with_a_limit_of_its_own_exists() -> None:
    limits = edge_limits(LimitSettings())
    assert limits.vital_methods
    for method in (*limits.max_calls_of, *limits.vital_methods):
        _, service, name = method.split("/")
        assert name in descriptor_pool.Default().FindServiceByName(service).methods_by_name
