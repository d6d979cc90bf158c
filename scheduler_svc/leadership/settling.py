"""Requests that a shard had accepted before the number of shards changed: until none lives or has a record. Pure.

The leader says the version before which nothing is left; then nobody looks for an id under the numbers before it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.journal.shard_plan import ShardPlan

_LATER_S = 5.0  # than by our clock a record may go: its time to live is by the store's


@dataclass(slots=True)
class _Waiting:
    """Requests that were there when a version was seen first, as far as they are; `ended_s`: since when none is."""

    version: int
    request_ids: set[str]
    ended_s: float | None = None


class Settling:
    """One per leader. A new leader begins anew with all that it has taken over."""

    def __init__(self, record_ttl_s: float) -> None:
        self._gone_s = record_ttl_s + _LATER_S
        self._waiting: list[_Waiting] = []
        self._seen_version = 0
        self.settled_version = 0  # of what was accepted before it began, nothing is left

    def update(self, plan: ShardPlan, present: Callable[[], set[str]], now_s: float) -> None:
        """Note what has ended. `present`: ids of all requests that live, are on their way in, or have no record yet."""
        if plan.version > self._seen_version and not plan.is_settled:
            self._waiting.append(_Waiting(plan.version, present()))
            self._seen_version = plan.version
        if not self._waiting:
            return
        living = present() if any(each.ended_s is None for each in self._waiting) else set()
        for each in self._waiting:
            each.request_ids &= living
            if not each.request_ids and each.ended_s is None:
                each.ended_s = now_s
        gone = [each for each in self._waiting if each.ended_s is not None and now_s - each.ended_s >= self._gone_s]
        self.settled_version = max([self.settled_version, *(each.version for each in gone)])
        self._waiting = [each for each in self._waiting if each.version > self.settled_version]
