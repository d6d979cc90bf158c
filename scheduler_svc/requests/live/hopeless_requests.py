"""Requests whose deadline will pass before their prompt could be computed: found in the queue, and ended early.

The scheduler says which they are; here the search is bounded to one every `HOPELESS_EVERY_S`. A long queue is searched
less often, so that it takes a twentieth of the time.
"""

import asyncio
import time
from collections.abc import Callable

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup

HOPELESS_EVERY_S = 0.05  # between two searches of the queue
LONGEST_PAUSE_S = 1.0  # the same, where each search takes long
_TIMES_LONGER = 20  # than the search before it takes a pause


class HopelessRequests:
    """`expire` ends the request of a group, if it has one; `wake` wakes the workers for the next search."""

    def __init__(self, scheduler: Scheduler, expire: Callable[[SequenceGroup], None], wake: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._expire = expire
        self._wake = wake
        self._next_s = 0.0  # when to search again
        self._timer: asyncio.TimerHandle | None = None

    def drop(self, now_s: float, *, is_idle: bool) -> None:
        """End hopeless requests, unless the last search was a moment ago.

        An idle worker would not ask again by itself: a timer wakes it for that.
        """
        if not self._scheduler.waiting.num_groups:
            return
        early_s = self._next_s - now_s
        if early_s > 0:
            if is_idle and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(early_s, self._wake_to_drop)
            return
        began_s = time.monotonic()
        expired = self._scheduler.expired_groups(now_s)
        pause_s = _TIMES_LONGER * (time.monotonic() - began_s)
        self._next_s = now_s + min(max(HOPELESS_EVERY_S, pause_s), LONGEST_PAUSE_S)
        for group in expired:
            self._expire(group)

    def _wake_to_drop(self) -> None:
        self._timer = None
        self._wake()
