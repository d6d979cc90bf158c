"""The end of a journal that another process writes, as it grows: a blocking read on a connection of its own."""

from collections.abc import Sequence
from typing import Any

from scheduler_svc.journal.entry_pages import EntryPages, asking_first_id, entry_id_of
from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.links import open_link
from scheduler_svc.journal.redis_link import Packed, pack
from scheduler_svc.journal.store import EntryId, StoredEntry

_WAIT_MS = 250  # for which the server may keep a read that finds nothing
_TIMEOUT_S = 2.25  # a server answers later than it was told to, and what is long has longer


class RedisTail:
    """Used by one task. Never writes."""

    def __init__(self, url: str, *, deployment: str = "default") -> None:
        """Take the address. Raises StoreConfigurationError or ValueError if it or the deployment is malformed."""
        self._journal = Keys.of(deployment).journal
        self._link = open_link(url, [self._journal], timeout_s=_TIMEOUT_S, repeatable=False)
        self._pages = EntryPages(self._link, self._journal)

    async def read_after(self, last: EntryId, limit: int) -> Sequence[StoredEntry]:
        """Up to `limit` entries behind `last`; none if none has come for a while. Raises StoreUnavailableError."""

        def ask(found: EntryId | None, count: int) -> Packed:
            words = ("XREAD", "COUNT", count, "BLOCK", _WAIT_MS, "STREAMS", self._journal, str(found or last))
            return pack(*words)

        return await self._pages.read(ask, _entries_of_one, limit)

    async def first(self) -> StoredEntry | None:
        """Oldest entry that is not trimmed; None if there is none. Raises StoreUnavailableError."""
        found = await self._pages.read(
            lambda _, count: pack("XRANGE", self._journal, "-", "+", "COUNT", count), list, 1
        )
        return found[0] if found else None

    async def has(self, entry_id: EntryId) -> bool:
        """True if this entry is there. Raises StoreUnavailableError."""
        found = await self._pages.look(asking_first_id(self._journal, entry_id))
        return found is not None and entry_id_of(found) == entry_id

    async def close(self) -> None:
        await self._link.close()


def _entries_of_one(reply: Any) -> list[Any]:
    """Entries of the one stream that was asked for; none if no entry has come."""
    return next(iter(reply.values())) if reply else []
