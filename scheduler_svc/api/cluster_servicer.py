"""The Cluster service: workers announce themselves here."""

import grpc

from common.errors import FieldViolation, InvalidRequestError
from protos import cluster_pb2 as pb
from protos import cluster_pb2_grpc
from scheduler_svc.workers.workers import LEASE_MS, Workers


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    """Answers `Register`."""

    def __init__(self, workers: Workers, epoch: int) -> None:
        self._workers = workers
        self._epoch = epoch

    async def Register(
        self,
        request: pb.RegisterRequest,
        context: grpc.aio.ServicerContext[pb.RegisterRequest, pb.RegisterResponse],
    ) -> pb.RegisterResponse:
        """Takes a sign of life."""
        violations = [
            FieldViolation(name, "must not be empty")
            for name in ("worker_id", "address", "incarnation", "model_fingerprint")
            if not getattr(request, name)
        ]
        if violations:
            raise InvalidRequestError.of(violations)
        self._workers.register(request)
        return pb.RegisterResponse(lease_ms=LEASE_MS, epoch=self._epoch)
