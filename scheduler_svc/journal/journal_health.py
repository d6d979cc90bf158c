"""Health of the store: healthy if it takes entries, degraded if it refuses or does not answer.

An answer is late after a number of timers of our own event loop: while the loop is blocked no timer runs, so the store
is not blamed for our own slowness. Knows no store and no journal.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from common.waits import TURNS, TimerInTurns

log = structlog.get_logger()

_MOST_REASONS = 8  # logged of one trouble: some have figures, and are new again and again


class JournalHealth:
    """`on_change` gets True when the store becomes degraded, False when it recovers. Owned by the loop's thread."""

    def __init__(self, late_s: float) -> None:
        """`late_s`: time after which an answer is late."""
        self.on_change: Callable[[bool], None] | None = None
        self._late_s = late_s
        self._degraded_since_s: float | None = None
        self._reasons: set[str] = set()  # of this trouble, as logged
        self._trouble: asyncio.Future[None] | None = None

    @property
    def is_degraded(self) -> bool:
        """True if the store does not take entries now."""
        return self._degraded_since_s is not None

    @property
    def trouble(self) -> "asyncio.Future[None]":
        """Future that is done as soon as, and as long as, the store is degraded. Do not cancel it."""
        if self._trouble is None:
            self._trouble = asyncio.get_running_loop().create_future()
            if self.is_degraded:
                self._trouble.set_result(None)
        return self._trouble

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Watch the wait for one answer of the store."""
        timer = TimerInTurns(self._late_s, lambda: self.record_trouble(f"no answer for {self._late_s:g} s"))
        try:
            yield
        finally:
            timer.cancel()

    async def is_in_time(self, answer: "asyncio.Future[Any]") -> bool:
        """Wait for another answer of the store; False if it is late. The future is left as it is."""
        for _ in range(TURNS):
            await asyncio.wait([answer], timeout=self._late_s / TURNS)
            if answer.done():
                return True
        return False

    def record_trouble(self, reason: str) -> None:
        """Record that the store refused, or did not answer."""
        if self._degraded_since_s is not None:
            self._log_other(reason)
        else:
            self._degraded_since_s = time.monotonic()
            self._reasons = {reason}
            log.warning("journal degraded: output waits for the store", reason=reason)
            if self._trouble is not None:
                self._trouble.set_result(None)
            self._tell()

    def _log_other(self, reason: str) -> None:
        """Log a reason that is new: a lost connection or a late answer is often followed by what is wrong."""
        if reason not in self._reasons and len(self._reasons) < _MOST_REASONS:
            self._reasons.add(reason)
            log.warning("journal still degraded", reason=reason)

    def record_answer(self) -> None:
        """Record that the store did a command."""
        if self._degraded_since_s is not None:
            log.info("journal recovered", after_s=round(time.monotonic() - self._degraded_since_s, 3))
            self._degraded_since_s = self._trouble = None
            self._tell()

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change(self.is_degraded)
