"""Cluster service: registration and draining of workers."""

from collections.abc import AsyncIterator

from common.rpc import Context
from quire.errors import FieldViolation, InvalidRequestError, UnavailableError
from quire.v1 import cluster_pb2 as pb
from quire.v1 import cluster_pb2_grpc
from scheduler_svc.api.shard_gates import not_leader_of
from scheduler_svc.api.topology import set_shards, topology
from scheduler_svc.api.worker_shares import SHORT_LEASE_MS, WorkerShares
from scheduler_svc.leadership.shard_watch import ShardWatch
from scheduler_svc.workers.workers import LEASE_MS, Workers


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    """Answers `Register` and `DrainWorker`; the others are answered before it, by every scheduler."""

    def __init__(self, workers: Workers, shares: WorkerShares | None = None, watch: ShardWatch | None = None) -> None:
        """`shares`: of the workers among several shards, which `watch` sees; None: there can be but one shard."""
        self._workers = workers
        self._shares = shares
        self._watch = watch

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Register a worker, or renew its lease."""
        violations = [
            FieldViolation(name, "must not be empty")
            for name in ("worker_id", "address", "incarnation", "model_fingerprint")
            if not getattr(request, name)
        ]
        if violations:
            raise InvalidRequestError.of(violations)
        shares = self._shares if self._watch is not None and self._watch.is_several else None
        shard, lease_ms = 0, LEASE_MS
        if shares is not None:
            shard = shares.shard_of(request)
            lease_ms = SHORT_LEASE_MS if shares.are_scarce else LEASE_MS
            if not request.HasField("shard") or not shares.has_shard(request.shard):
                return pb.RegisterResponse(lease_ms=lease_ms, shard=shard)
            if request.shard != shares.shard:
                raise not_leader_of(request.shard, shares.leader_of(request.shard))
        reason = self._workers.register(request)
        return pb.RegisterResponse(lease_ms=lease_ms, epoch=self._workers.epoch, out_of_service=reason, shard=shard)

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        """Drain a worker, or undo that."""
        if self._shares is not None and self._shares.is_given_away(request.worker_id):
            raise UnavailableError(  # the shard that it goes to would not know of the drain
                f"worker {request.worker_id!r} is on its way to another shard; repeat the call in a moment"
            )
        return pb.DrainWorkerResponse(num_running=self._workers.drain(request.worker_id, undo=request.undo))

    def Topology(self, request: pb.TopologyRequest, context: Context) -> AsyncIterator[pb.TopologyResponse]:
        """Stream the shards, as the handler before the gate does."""
        return topology(self._watch)

    async def SetShards(self, request: pb.SetShardsRequest, context: Context) -> pb.SetShardsResponse:
        """Change the number of shards, as the handler before the gate does."""
        return await set_shards(self._watch, request)
