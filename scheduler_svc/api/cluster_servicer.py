"""Cluster service: registration and draining of workers."""

from common.rpc import Context
from quire.errors import FieldViolation, InvalidRequestError
from quire.v1 import cluster_pb2 as pb
from quire.v1 import cluster_pb2_grpc
from scheduler_svc.workers.workers import LEASE_MS, Workers


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    """Answers `Register` and `DrainWorker`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Register a worker, or renew its lease."""
        violations = [
            FieldViolation(name, "must not be empty")
            for name in ("worker_id", "address", "incarnation", "model_fingerprint")
            if not getattr(request, name)
        ]
        if violations:
            raise InvalidRequestError.of(violations)
        reason = self._workers.register(request)
        return pb.RegisterResponse(lease_ms=LEASE_MS, epoch=self._workers.epoch, out_of_service=reason)

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        """Drain a worker, or undo that."""
        return pb.DrainWorkerResponse(num_running=self._workers.drain(request.worker_id, undo=request.undo))
