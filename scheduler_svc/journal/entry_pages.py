"""Pages of journal entries from Redis or Valkey, shorter ones and with more time where a page takes too long.

Knows what is sent and how long an answer may be, and nothing of what the entries contain.
"""

from collections.abc import Callable, Sequence
from typing import Any

from scheduler_svc.journal.links import StoreLink
from scheduler_svc.journal.redis_link import Packed, pack
from scheduler_svc.journal.store import EntryId, StoredEntry, StoreTimeoutError

_FEWER = 4  # times fewer entries after a page that took too long, and so many times more bytes
_FIRST_MORE_BYTES = 4 << 20
_MOST_BYTES = 1 << 30  # that an answer may have
_MOST_EXPECTED_BYTES = 64 << 20  # where no page took too long: a reply that is lost is waited for as long
_MOST_ENTRIES = 1 << 16

# KEYS: journal. ARGV: an id. What it shows has no payload, which may have tens of megabytes.
_FIRST_ID = b"""#!lua flags=no-writes
local found = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', 1)
return found[1] and found[1][1] or false
"""

# Asks for so many entries behind one that was read, or for the first ones.
Ask = Callable[[EntryId | None, int], Packed]


class EntryPages:
    """Pages by one link, for one reader. Remembers how long they were, so that the next one has the time it needs."""

    def __init__(self, link: StoreLink, journal: str) -> None:
        """`journal`: its key."""
        self._link = link
        self._is_there = pack("EXISTS", journal)
        self._most = _MOST_ENTRIES  # in one answer
        self._more_bytes = 0  # that each answer may have until all is read, since one took too long
        self._mean_bytes = 0  # of an entry of the last page
        self._look_bytes = 0  # that a look at ids has time for: the server copies the entries before it leaves them out

    async def read(
        self, ask: Ask, entries_of: Callable[[Any], list[Any]], limit: int, *, is_urgent: bool = False
    ) -> Sequence[StoredEntry]:
        """Read up to `limit` entries; fewer are all there are.

        `entries_of` finds the entries in a reply. `is_urgent`: raise StoreTimeoutError for a page that takes too long,
        of which less is asked next time. Raises StoreUnavailableError.
        """
        found: list[StoredEntry] = []
        while len(found) < limit:
            num_asked = min(limit - len(found), self._most)
            command = ask(found[-1].entry_id if found else None, num_asked)
            try:
                reply = await self._link.call(command, answer_bytes=self._answer_bytes(num_asked))
            except StoreTimeoutError:
                await self._link.call(self._is_there)  # who does not answer this does not send a long page either
                if not self._ask_less(num_asked) or is_urgent:
                    raise
                continue
            page = [stored_entry(*item) for item in entries_of(reply)]
            self._record(page)
            found += page
            if len(page) < num_asked:
                break
        self._more_bytes = 0
        return found

    async def look(self, command: Packed) -> Any:
        """Reply to a command that shows ids alone. Raises StoreUnavailableError; later looks have longer then."""
        try:
            return await self._link.call(command, answer_bytes=self._look_bytes)
        except StoreTimeoutError:
            await self._link.call(self._is_there)  # a store that does not answer this is not waited for longer
            self._look_bytes = min(max(_FEWER * self._look_bytes, _FIRST_MORE_BYTES), _MOST_EXPECTED_BYTES)
            raise

    def _answer_bytes(self, num_asked: int) -> int:
        return max(self._more_bytes, min(num_asked * self._mean_bytes, _MOST_EXPECTED_BYTES))

    def _ask_less(self, num_asked: int) -> bool:
        """Ask for fewer entries next time, and give them longer. False: it was one entry, with all the time it gets."""
        can_grow = self._answer_bytes(num_asked) < _MOST_BYTES
        grown = max(_FEWER * self._answer_bytes(num_asked), _FIRST_MORE_BYTES)
        self._most, self._more_bytes = max(num_asked // _FEWER, 1), min(grown, _MOST_BYTES)
        return num_asked > 1 or can_grow

    def _record(self, page: Sequence[StoredEntry]) -> None:
        self._most = min(2 * self._most, _MOST_ENTRIES)
        self._mean_bytes = sum(len(each.payload or b"") for each in page) // max(len(page), 1)


def asking_first_id(journal: str, first: EntryId) -> Packed:
    """Ask for the id of the first entry from `first` on, itself included."""
    return pack("EVAL", _FIRST_ID, 1, journal, str(first))


def stored_entry(name: bytes, flat_fields: list[Any]) -> StoredEntry:
    fields = dict(zip(flat_fields[::2], flat_fields[1::2], strict=True))
    return StoredEntry(entry_id_of(name), fields.get(b"e"), fields.get(b"c"))


def entry_id_of(name: bytes) -> EntryId:
    epoch, _, seq = name.partition(b"-")
    return EntryId(int(epoch), int(seq))
