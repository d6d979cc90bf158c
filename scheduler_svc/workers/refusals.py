"""Refused workers: neither asked nor logged again at each registration.

Knows a worker by its incarnation: a restarted worker is another one. Pure.
"""

import re
from dataclasses import dataclass

from scheduler_svc.workers.latest import Latest

ASK_AGAIN_S = 60.0  # even if no change is known
SAY_AGAIN_S = 600.0


@dataclass(slots=True)
class Refusal:
    """Last refusal of a worker."""

    incarnation: str
    reason: str
    holds_until_s: float
    say_again_s: float


class Refusals:
    """Latest refusal of each worker. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._refusals: Latest[Refusal] = Latest()

    def record_refusal(self, worker_id: str, incarnation: str, reason: str, now_s: float, *, holds: bool) -> bool:
        """Record a refusal, which `holds` for a while or must be found anew. Returns True if it is worth a log line.

        That is so if its reason is new, numbers aside, or was not logged for `SAY_AGAIN_S`.
        """
        known = self._refusals.get(worker_id)
        is_news = (
            known is None
            or known.incarnation != incarnation
            or _without_numbers(known.reason) != _without_numbers(reason)
            or now_s >= known.say_again_s
        )
        say_again_s = now_s + SAY_AGAIN_S if known is None or is_news else known.say_again_s
        holds_until_s = now_s + ASK_AGAIN_S if holds else now_s
        self._refusals.put(worker_id, Refusal(incarnation, reason, holds_until_s, say_again_s))
        return is_news

    def reason(self, worker_id: str, incarnation: str, now_s: float) -> str:
        """Reason to refuse this worker without asking it; empty if it has to be asked."""
        known = self._refusals.get(worker_id)
        if known is None or known.incarnation != incarnation or now_s >= known.holds_until_s:
            return ""
        return known.reason

    def reconsider(self) -> None:
        """Ask refused workers again: the workers in service have changed."""
        for each in self._refusals.values():
            each.holds_until_s = 0.0

    def forget_worker(self, worker_id: str) -> None:
        """Forget the refusal of a worker that serves now."""
        self._refusals.discard(worker_id)


def _without_numbers(reason: str) -> str:
    """Reason without numbers: remaining times and ports change from one attempt to the next."""
    return re.sub(r"\d+", "", reason)
