"""Whether the store takes entries now: seen by its answers, and by their absence.

An answer is late after so many turns of a clock of our own event loop: while the loop itself stands still the clock
does, too, so that the store is not blamed for our own slowness. Knows no store and no journal.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

log = structlog.get_logger()

TURNS = 4
LATE_S = 0.4  # after which an answer is late


class JournalHealth:
    """`on_change` is told whether the store is in trouble, each time that this changes. Owned by the loop's thread."""

    def __init__(self) -> None:
        self.on_change: Callable[[bool], None] | None = None
        self._degraded_since_s: float | None = None
        self._trouble: asyncio.Future[None] | None = None
        self._turn: asyncio.TimerHandle | None = None

    @property
    def is_degraded(self) -> bool:
        """Whether the store does not take entries now."""
        return self._degraded_since_s is not None

    @property
    def trouble(self) -> "asyncio.Future[None]":
        """Done as soon as, and as long as, the store does not take entries. Not to be cancelled."""
        if self._trouble is None:
            self._trouble = asyncio.get_running_loop().create_future()
            if self.is_degraded:
                self._trouble.set_result(None)
        return self._trouble

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While the store owes us one answer."""
        self._turn = asyncio.get_running_loop().call_later(LATE_S / TURNS, self._turned, TURNS - 1)
        try:
            yield
        finally:
            self._turn.cancel()

    def note_trouble(self, reason: str) -> None:
        """The store said no, or nothing."""
        if self._degraded_since_s is None:
            self._degraded_since_s = time.monotonic()
            log.warning("journal degraded: output waits for the store", reason=reason)
            if self._trouble is not None:
                self._trouble.set_result(None)
            self._tell()

    def note_answer(self) -> None:
        """The store did what it was asked."""
        if self._degraded_since_s is not None:
            log.info("journal recovered", after_s=round(time.monotonic() - self._degraded_since_s, 3))
            self._degraded_since_s = self._trouble = None
            self._tell()

    def _turned(self, num_left: int) -> None:
        if num_left:
            self._turn = asyncio.get_running_loop().call_later(LATE_S / TURNS, self._turned, num_left - 1)
        else:
            self.note_trouble(f"no answer for {LATE_S:g} s")

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change(self.is_degraded)


async def answered_in_time(answer: "asyncio.Future[Any]") -> bool:
    """Waits for an answer until it is late, by the same clock. The future is left as it is."""
    for _ in range(TURNS):
        await asyncio.wait([answer], timeout=LATE_S / TURNS)
        if answer.done():
            return True
    return False
