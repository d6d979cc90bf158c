"""Losses of workers as requests met them: which were in flight, and whether one of them was the cause.

A request that was in flight at a death caused by another one, and alone at a death that was injected, may be failed: a
limit that docs/durability.md names. Knows no scheduler.
"""

from collections.abc import Set

CRASH = "connection reset by a crash"  # why a line breaks whose worker died of a request


class Losses:
    """Losses of a run, as its schedulers count them."""

    def __init__(self) -> None:
        self._beside_crash: set[str] = set()  # request_ids
        self._alone: set[str] = set()  # at a death that no request caused

    def record(self, request_ids: Set[str], reason: str) -> None:
        """Record the requests in flight on a worker that is lost for this reason."""
        if reason == CRASH:
            self._beside_crash |= request_ids
        elif len(request_ids) == 1:
            self._alone |= request_ids

    def may_convict(self, request_id: str) -> bool:
        """True if an innocent request may be taken for one that ends workers."""
        return request_id in self._beside_crash and request_id in self._alone
