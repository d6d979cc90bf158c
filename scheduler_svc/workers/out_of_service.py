"""Workers out of service: they gave impossible answers, or follow another scheduler, and get no work.

Knows a worker by its incarnation: a restarted worker is another one. Pure.
"""

from quire.v1 import cluster_pb2
from scheduler_svc.workers.latest import Latest


class OutOfService:
    """Workers out of service, with their reasons."""

    def __init__(self) -> None:
        self._reasons: Latest[tuple[str, str]] = Latest()  # incarnation, reason

    def put(self, worker_id: str, incarnation: str, reason: str) -> None:
        """Put a worker out of service. The latest reason counts."""
        self._reasons.put(worker_id, (incarnation, reason))

    def restore(self, worker_id: str) -> None:
        """Put a worker back into service. Harmless if it was."""
        self._reasons.discard(worker_id)

    def reason(self, request: cluster_pb2.RegisterRequest, epoch: int) -> str:
        """Reason why a worker that registers so gets no work from a scheduler of `epoch`; empty if it gets work."""
        incarnation, reason = self._reasons.get(request.worker_id) or ("", "")
        if incarnation == request.incarnation and reason:
            return reason
        self._reasons.discard(request.worker_id)  # another process
        if request.epoch > epoch:
            return (
                f"it follows a scheduler of epoch {request.epoch}, and this one leads at epoch {epoch}: "
                "it follows this one as soon as no other has answered it for a while"
            )
        return ""
