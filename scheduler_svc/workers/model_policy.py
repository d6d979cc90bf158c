"""Models that a worker may bring: the configured one, else the served one, else any.

Knows fingerprints and names, not the contents of a model. The caller gives the time.
"""

from quire.errors import FailedPreconditionError
from scheduler_svc.requests.admission import Admission

MIN_FINGERPRINT_CHARS = 8  # of `only_model`: fewer are a name


class ModelPolicy:
    """Refuses workers of another model. Times are of the monotonic clock."""

    def __init__(self, admission: Admission, *, only_model: str | None, patience_s: float) -> None:
        """Take the configured model.

        Args:
            admission: knows the served model, and if it is in use.
            only_model: name, or first characters of the fingerprint, of the only model to serve. None: any.
            patience_s: time for which the served model is kept after its last worker has gone.
        """
        self._admission = admission
        self._only_model = only_model
        self._patience_s = patience_s
        self._kept_until_s = 0.0

    def record_last_gone(self, now_s: float) -> None:
        """Record that the last worker has gone."""
        self._kept_until_s = now_s + self._patience_s

    def check(self, worker_id: str, fingerprint: str, now_s: float, *, has_workers: bool) -> None:
        """Raise FailedPreconditionError with the difference if a worker of this model cannot serve now."""
        model = self._admission.model
        if model is None:
            self._admission.recovery.check_model(worker_id, fingerprint)
            return
        left_s = self._kept_until_s - now_s
        if model.fingerprint == fingerprint:
            return
        if has_workers:
            why = ""
        elif self._admission.is_in_use:
            why = ", whose workers have gone, but requests wait for one of them"
        elif left_s > 0:
            why = f", whose workers have gone: it is kept for {left_s:.0f} s more, in case one of them comes back"
        else:
            return
        raise FailedPreconditionError(
            f"worker {worker_id!r} has another model than the {model.name!r} being served{why}: its fingerprint is "
            f"{fingerprint[:12]!r}, and {model.fingerprint[:12]!r} is served; start it with the same model folder "
            "and version of Quire, or serve it by a scheduler of its own"
        )

    def check_configured(self, worker_id: str, name: str, fingerprint: str) -> None:
        """Raise FailedPreconditionError with the difference if another model is configured."""
        only = self._only_model
        if only is None or name == only or (len(only) >= MIN_FINGERPRINT_CHARS and fingerprint.startswith(only)):
            return
        raise FailedPreconditionError(
            f"worker {worker_id!r} has another model than this scheduler is set to serve: it is {name!r} of the "
            f"fingerprint {fingerprint[:12]!r}, and only_model is {only!r}; start it with that model (or name it so, "
            "with --model-name), or change only_model"
        )
