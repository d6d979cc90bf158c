"""Trims the journal now and then, beside its writer. Knows only up to where."""

import asyncio

import structlog

from scheduler_svc.journal.store import JOURNAL_START, EntryId, Store, StoreUnavailableError

log = structlog.get_logger()


class Trimmer:
    """One trim at a time, each after so many entries."""

    def __init__(self, store: Store, every: int) -> None:
        self._store = store
        self._every = every
        self._next = every
        self.trimmed_to = JOURNAL_START  # entries before it may be gone
        self._trimming: asyncio.Task[None] | None = None

    def trim_if_due(self, num_entries: int, oldest: EntryId) -> None:
        """Start a trim up to `oldest`, the first needed entry, if enough entries were written since the last."""
        if num_entries < self._next or (self._trimming is not None and not self._trimming.done()):
            return
        self._next = num_entries + self._every
        self.trimmed_to = oldest
        self._trimming = asyncio.create_task(self._trim(oldest))

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
