"""Checks whether a worker may serve here: by what was found of it before, and by the model that it brings.

Knows nothing of what a worker that serves does, nor of faults found in its answers.
"""

import time
from collections.abc import Callable

import structlog

from quire.errors import FailedPreconditionError, QuireError, UnavailableError
from quire.v1 import cluster_pb2, worker_pb2
from scheduler_svc.workers.member import Member
from scheduler_svc.workers.model_policy import ModelPolicy
from scheduler_svc.workers.refusals import Refusals

log = structlog.get_logger()


class WorkerChecks:
    """One per leader. `has_workers` tells whether any worker serves now: its model is the one that counts."""

    def __init__(self, policy: ModelPolicy, *, has_workers: Callable[[], bool]) -> None:
        self._policy = policy
        self._has_workers = has_workers
        self._refusals = Refusals()

    def check_registration(self, request: cluster_pb2.RegisterRequest) -> None:
        """Raise FailedPreconditionError for a worker that cannot serve, as far as known without asking it."""
        now_s = time.monotonic()
        if reason := self._refusals.reason(request.worker_id, request.incarnation, now_s):
            raise FailedPreconditionError(reason)
        try:
            self.check_model(request.worker_id, request.model_fingerprint)
        except FailedPreconditionError as error:
            if self._refusals.record_refusal(request.worker_id, request.incarnation, error.message, now_s, holds=False):
                log.warning(
                    "worker refused", worker_id=request.worker_id, address=request.address, reason=error.message
                )
            raise

    def check_description(self, member: Member, description: worker_pb2.DescribeResponse) -> None:
        """Check who answers at a worker's address, and its model.

        Raises UnavailableError if another worker answers there, which may change soon, and FailedPreconditionError for
        a model that is not served.
        """
        if (description.worker_id, description.incarnation) != (member.worker_id, member.incarnation):
            raise UnavailableError(
                f"worker {description.worker_id!r}, incarnation {description.incarnation}, answers at "
                f"{member.address}; give each worker an address of its own to advertise"
            )
        model = description.model
        self._policy.check_configured(member.worker_id, model.name, model.fingerprint)
        self.check_model(member.worker_id, model.fingerprint)

    def check_model(self, worker_id: str, fingerprint: str) -> None:
        """Raise FailedPreconditionError with the difference if a worker of this model cannot serve now."""
        self._policy.check(worker_id, fingerprint, time.monotonic(), has_workers=self._has_workers())

    def record_refusal(self, member: Member, error: QuireError) -> bool:
        """Record why a worker could not be taken in. Returns True if that is worth a log line."""
        holds = isinstance(error, FailedPreconditionError)  # else it may go well the next time
        return self._refusals.record_refusal(
            member.worker_id, member.incarnation, error.message, time.monotonic(), holds=holds
        )

    def record_taken_in(self, worker_id: str) -> None:
        """Record that a worker serves now."""
        self._refusals.forget_worker(worker_id)

    def record_change(self) -> None:
        """Record that the workers in service have changed: others, refused before, may fit now."""
        self._refusals.reconsider()
        if not self._has_workers():
            self._policy.record_last_gone(time.monotonic())
