"""Topology: the shards of the deployment, their leaders and caches, as any scheduler knows them, leading or not; and
the change of their number, which any scheduler makes.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc

from common.rpc import Context
from common.violations import refusal_of
from quire.errors import FailedPreconditionError
from quire.shards import MOST_SHARDS
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.leadership.shard_watch import ShardWatch

_SERVICE = pb.DESCRIPTOR.services_by_name["Cluster"].full_name
_PAUSE_S = 0.25  # between two messages of a stream


async def topology(watch: ShardWatch | None) -> AsyncIterator[pb.TopologyResponse]:
    """Messages of a Topology stream. `watch`: of a store that has the number of shards; None: there is one shard."""
    if watch is None:
        yield pb.TopologyResponse(shards=[pb.Shard()])
        return
    said: pb.TopologyResponse | None = None
    said_versions: dict[int, int] = {}
    while not watch.has_ended:
        changed = watch.changed
        answer = _answer(watch)
        news = [each for each in watch.cached if each.version != said_versions.get(each.shard, 0)]
        if news or answer != said:
            said, said_versions = answer, {each.shard: each.version for each in watch.cached}
            message = pb.TopologyResponse(cached=news)
            message.MergeFrom(answer)
            yield message
        await asyncio.sleep(_PAUSE_S)
        await changed.wait()


async def set_shards(watch: ShardWatch | None, request: pb.SetShardsRequest) -> pb.SetShardsResponse:
    """Change the number of shards. Raises InvalidRequestError, FailedPreconditionError, StoreUnavailableError."""
    if not 1 <= request.num_shards <= MOST_SHARDS:
        raise refusal_of("num_shards", f"is {request.num_shards}: give 1 to {MOST_SHARDS}")
    if watch is None:
        raise FailedPreconditionError(
            "several shards share a store, and this scheduler's is its own memory; start it with --store redis://…"
        )
    plan = await watch.set_wanted(request.num_shards)
    return pb.SetShardsResponse(version=plan.version, num_shards=plan.num_shards, wanted_shards=plan.num_wanted)


def topology_handler(watch: ShardWatch | None) -> grpc.GenericRpcHandler:
    """Handler of Topology and SetShards alone, to be added before the gate of the other methods."""

    def answer(request: pb.TopologyRequest, context: Context) -> AsyncIterator[pb.TopologyResponse]:
        return topology(watch)

    async def change(request: pb.SetShardsRequest, context: Context) -> pb.SetShardsResponse:
        return await set_shards(watch, request)

    following = grpc.unary_stream_rpc_method_handler(
        answer, pb.TopologyRequest.FromString, pb.TopologyResponse.SerializeToString
    )
    changing = grpc.unary_unary_rpc_method_handler(
        change, pb.SetShardsRequest.FromString, pb.SetShardsResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(_SERVICE, {"Topology": following, "SetShards": changing})


def _answer(watch: ShardWatch) -> pb.TopologyResponse:
    """Content of a message beside caches."""
    plan = watch.plan
    return pb.TopologyResponse(
        shards=watch.shards,
        version=plan.version,
        num_shards=plan.num_shards,
        former_num_shards=[each.num_shards for each in plan.former],
        wanted_shards=plan.num_wanted,
    )
