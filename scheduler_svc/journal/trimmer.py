"""Trims the journal now and then, beside its writer. Knows only up to where."""

import asyncio

import structlog

from scheduler_svc.journal.store import JOURNAL_START, EntryId, Store, StoreUnavailableError

EVERY_BYTES = 4 << 20  # entries with log-probabilities of prompts have up to a megabyte each

log = structlog.get_logger()


class Trimmer:
    """One trim at a time, each after so many entries, or after fewer with so many bytes together."""

    def __init__(self, store: Store, every: int, every_bytes: int = EVERY_BYTES) -> None:
        self._store = store
        self._every = every
        self._every_bytes = every_bytes
        self._next = every  # less what was read
        self._num_bytes = 0  # since the last
        self.trimmed_to = JOURNAL_START  # entries before it may be gone
        self._trimming: asyncio.Task[None] | None = None

    def trim_if_due(self, num_entries: int, oldest: EntryId, entry_bytes: int = 0) -> None:
        """Start a trim up to `oldest`, the first needed entry, if enough was written since the last.

        `entry_bytes`: of the entry that was written just now.
        """
        self._num_bytes += entry_bytes
        is_due = num_entries >= self._next or self._num_bytes >= self._every_bytes
        if not is_due or (self._trimming is not None and not self._trimming.done()):
            return
        self._next, self._num_bytes = num_entries + self._every, 0
        self.trimmed_to = oldest
        self._trimming = asyncio.create_task(self._trim(oldest))

    def count_read(self, num_entries: int, num_bytes: int) -> None:
        """Count entries of earlier leaders as written: short lives would else never trim what they leave together."""
        self._next -= num_entries
        self._num_bytes += num_bytes

    async def close(self) -> None:
        """Cancel a trim."""
        if self._trimming is not None:
            self._trimming.cancel()
            await asyncio.wait([self._trimming])

    async def _trim(self, oldest: EntryId) -> None:
        try:
            await self._store.trim(oldest)
        except StoreUnavailableError as error:
            log.warning("journal not trimmed", reason=error.message)
