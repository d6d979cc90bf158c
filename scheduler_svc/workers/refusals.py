"""Workers that were refused for what they are: not asked again, nor logged, at each of their signs of life.

Knows a worker by its incarnation: one that is started anew is another. Pure.
"""

import re
from dataclasses import dataclass

from scheduler_svc.workers.latest import Latest

ASK_AGAIN_S = 60.0  # though nothing has changed that we know of
SAY_AGAIN_S = 600.0


@dataclass(slots=True)
class Refusal:
    """Why a worker was refused last."""

    incarnation: str
    reason: str
    holds_until_s: float
    say_again_s: float


class Refusals:
    """The latest. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._refusals: Latest[Refusal] = Latest()

    def note(self, worker_id: str, incarnation: str, reason: str, now_s: float, *, holds: bool) -> bool:
        """Keeps a refusal, which `holds` for a while or has to be found anew. Returns whether it is worth a log line.

        It is if it is another one than before, numbers aside, or was not logged for long.
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
        """Why this worker is refused without being asked; empty: it has to be asked."""
        known = self._refusals.get(worker_id)
        if known is None or known.incarnation != incarnation or now_s >= known.holds_until_s:
            return ""
        return known.reason

    def reconsider(self) -> None:
        """Others serve than did: who did not fit beside them is asked again."""
        for each in self._refusals.values():
            each.holds_until_s = 0.0

    def forget(self, worker_id: str) -> None:
        """It serves now."""
        self._refusals.discard(worker_id)


def _without_numbers(reason: str) -> str:
    """Times that are left, and ports, change from one attempt to the next."""
    return re.sub(r"\d+", "", reason)
