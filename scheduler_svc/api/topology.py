"""Topology: the shards of the deployment and their leaders, as any scheduler knows them, leading or not."""

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
    while True:
        changed = watch.changed
        answer = pb.TopologyResponse(shards=watch.shards)
        if answer != said:
            yield answer
            said = answer
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
