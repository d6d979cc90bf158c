"""Topology: the shards of the deployment, their leaders and caches, as any scheduler knows them, leading or not."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from common.rpc import Context
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.leadership.shard_watch import ShardWatch

_SERVICE = pb.DESCRIPTOR.services_by_name["Cluster"].full_name
_PAUSE_S = 0.25  # between two messages of a stream


async def topology(watch: ShardWatch | None) -> AsyncIterator[pb.TopologyResponse]:
    """Messages of a Topology stream. `watch`: of several shards; None: there is one, and one message."""
    if watch is None:
        yield pb.TopologyResponse(shards=[pb.Shard()])
        return
    said: pb.TopologyResponse | None = None
    said_versions = [0] * len(watch.cached)
    while True:
        changed = watch.changed
        answer = pb.TopologyResponse(shards=watch.shards)
        news = [each for each, version in zip(watch.cached, said_versions, strict=True) if each.version != version]
        if news or answer != said:
            said, said_versions = answer, [each.version for each in watch.cached]
            yield pb.TopologyResponse(shards=answer.shards, cached=news)
        await asyncio.sleep(_PAUSE_S)
        await changed.wait()


def topology_handler(watch: ShardWatch | None) -> grpc.GenericRpcHandler:
    """Handler of Topology alone, to be added before the gate of the other methods."""

    def answer(request: pb.TopologyRequest, context: Context) -> AsyncIterator[pb.TopologyResponse]:
        return topology(watch)

    method = grpc.unary_stream_rpc_method_handler(
        answer, pb.TopologyRequest.FromString, pb.TopologyResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(_SERVICE, {"Topology": method})
