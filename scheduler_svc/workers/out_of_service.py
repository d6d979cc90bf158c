"""Workers that get no work though they are here: whose answers could not be believed, or who follow another scheduler.

Knows a worker by its incarnation: one that is started anew is another. Pure.
"""

from quire.v1 import cluster_pb2
from scheduler_svc.workers.latest import Latest


class OutOfService:
    """Who was put out of service, and why."""

    def __init__(self) -> None:
        self._reasons: Latest[tuple[str, str]] = Latest()  # incarnation, reason

    def put(self, worker_id: str, incarnation: str, reason: str) -> None:
        """It gets no work from now on. Said again, the latest reason counts."""
        self._reasons.put(worker_id, (incarnation, reason))

    def take_back(self, worker_id: str) -> None:
        """Harmless if it was not out of service."""
        self._reasons.discard(worker_id)

    def reason(self, request: cluster_pb2.RegisterRequest, epoch: int) -> str:
        """Why a worker that gives this sign of life gets no work of a scheduler of `epoch`; empty: it does."""
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
