"""The end of a journal that another process writes, as it grows: a blocking read on a connection of its own."""

from collections.abc import Sequence

from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.links import open_link
from scheduler_svc.journal.redis_link import pack
from scheduler_svc.journal.redis_store import stored_entry
from scheduler_svc.journal.store import EntryId, StoredEntry

_WAIT_MS = 250  # for which the server may keep a read that finds nothing
_TIMEOUT_S = 2.25  # a server answers later than it was told to, and a page may be long


class RedisTail:
    """Used by one task. Never writes."""

    def __init__(self, url: str, *, deployment: str = "default") -> None:
        """Take the address. Raises StoreConfigurationError or ValueError if it or the deployment is malformed."""
        self._journal = Keys.of(deployment).journal
        self._link = open_link(url, [self._journal], timeout_s=_TIMEOUT_S, repeatable=False)

    async def read_after(self, last: EntryId, limit: int) -> Sequence[StoredEntry]:
        """Up to `limit` entries behind `last`; none if none has come for a while. Raises StoreUnavailableError."""
        words = ("XREAD", "COUNT", limit, "BLOCK", _WAIT_MS, "STREAMS", self._journal, str(last))
        reply = await self._link.call(pack(*words))
        if not reply:
            return []
        (entries,) = reply.values()
        return [stored_entry(*item) for item in entries]

    async def first(self) -> StoredEntry | None:
        """Oldest entry that is not trimmed; None if there is none. Raises StoreUnavailableError."""
        found = await self._link.call(pack("XRANGE", self._journal, "-", "+", "COUNT", 1))
        return stored_entry(*found[0]) if found else None

    async def has(self, entry_id: EntryId) -> bool:
        """True if this entry is there. Raises StoreUnavailableError."""
        return bool(await self._link.call(pack("XRANGE", self._journal, str(entry_id), str(entry_id))))

    async def close(self) -> None:
        await self._link.close()
