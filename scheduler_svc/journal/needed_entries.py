"""Entries that the journal has to keep: for each live request and pin, the one from which on it can be read.

A request or pin is restated when too much has been written behind its entry, so that older entries can be trimmed.
Knows them by their keys alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.store import EntryId

# Writes the durable state of a key into an entry, as if no entry before it existed.
Restate = Callable[[pb.JournalEntry], None]

_RESTATED_AT_ONCE = 4
_RESTATED_BYTES = 256 << 10  # in one entry, unless a single key takes more
_LONG_BYTES = 16 << 20  # in one entry after a loss, unless a single key takes more


@dataclass(slots=True)
class _Needed:
    entry_id: EntryId
    restate: Restate
    num_entries: int  # that had been written up to its own
    num_bytes: int  # likewise
    restated_bytes: int = 0  # that it took when it was restated last


class NeededEntries:
    """Needed keys in the order of their entries. A key whose first entry is in flight is known, and not yet durable."""

    def __init__(self, *, restate_entries: int, restate_bytes: int) -> None:
        """A key is restated when so many entries, or bytes of news, have been written behind its own."""
        self.num_restated = 0
        self._restate_entries = restate_entries
        self._restate_bytes = restate_bytes
        self._coming: dict[Hashable, Restate] = {}
        # The first key is looked up at every write; a plain dict would scan over the deleted ones before it.
        self._durable: OrderedDict[Hashable, _Needed] = OrderedDict()
        self._num_entries = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._coming) + len(self._durable)

    @property
    def oldest(self) -> EntryId | None:
        """First entry that is needed; None if no durable entry is."""
        return next((each.entry_id for each in self._durable.values()), None)

    def add_coming(self, key: Hashable, restate: Restate) -> None:
        """Add a key whose first entry is in flight."""
        self._coming[key] = restate

    def keep_entry(self, key: Hashable, entry_id: EntryId, restate: Restate) -> None:
        """Add a key whose state is in an entry of an earlier leader."""
        self._durable[key] = _Needed(entry_id, restate, 0, 0)

    def count_read(self, num_bytes: int) -> None:
        """Count an entry of an earlier leader. Call it before anything is written."""
        self._num_entries += 1
        self._num_bytes += num_bytes

    def sort(self) -> None:
        """Sort the kept keys by entry. Call it before anything is written."""
        self._durable = OrderedDict(sorted(self._durable.items(), key=lambda item: item[1].entry_id))

    def restate_by(self, key: Hashable, restate: Restate) -> None:
        """Restate a key by this function from now on."""
        self._durable[key].restate = restate

    def forget(self, key: Hashable) -> None:
        """Forget a key that is not needed any more. Harmless if it is unknown."""
        self._coming.pop(key, None)
        self._durable.pop(key, None)

    def record_written(self, keys: list[Hashable], entry_id: EntryId, num_bytes: int = 0) -> None:
        """Record a durable entry, with so many bytes of news. These keys can be read from it on."""
        self._num_entries += 1
        self._num_bytes += num_bytes
        for key in keys:
            restate, restated_bytes = self._coming.pop(key, None), 0
            if restate is None:
                known = self._durable.pop(key, None)
                if known is None:  # forgotten meanwhile
                    continue
                restate, restated_bytes = known.restate, known.restated_bytes
            self._durable[key] = _Needed(entry_id, restate, self._num_entries, self._num_bytes, restated_bytes)

    def restate_due(self, entry: pb.JournalEntry) -> list[Hashable]:
        """Restate the keys that keep the journal from being trimmed, a few at a time. Returns these keys.

        A long one, which takes as long to restate, is due only behind about as many bytes of news as it took last time.
        """
        due: list[Hashable] = []
        num_before = 0  # bytes of the entry
        for key, each in self._durable.items():
            num_bytes = self._num_bytes - each.num_bytes
            is_due = num_bytes >= self._restate_bytes or self._num_entries - each.num_entries >= self._restate_entries
            is_worth = num_bytes + _RESTATED_BYTES >= each.restated_bytes
            if not is_due or not is_worth or len(due) == _RESTATED_AT_ONCE or num_before >= _RESTATED_BYTES:
                break
            due.append(key)
            each.restate(entry)
            num_after = entry.ByteSize()
            each.restated_bytes, num_before = num_after - num_before, num_after
        self.num_restated += len(due)
        return due

    def restate_all(self) -> Iterator[tuple[pb.JournalEntry, list[Hashable]]]:
        """Restate every durable key, in entries of bounded size; yields each with its keys."""
        entry, keys, num_bytes = pb.JournalEntry(), list[Hashable](), 0
        for key, each in list(self._durable.items()):
            restated = pb.JournalEntry()
            each.restate(restated)
            entry.MergeFrom(restated)
            keys.append(key)
            each.restated_bytes = restated.ByteSize()  # that of the entry, again and again, would take long
            num_bytes += each.restated_bytes
            if num_bytes >= (_RESTATED_BYTES if len(keys) % _RESTATED_AT_ONCE == 0 else _LONG_BYTES):
                yield entry, keys
                entry, keys, num_bytes = pb.JournalEntry(), [], 0
        if keys:
            yield entry, keys


def restating_alone(admission: pb.Admission) -> Restate:
    """Restatement of a request of which only the admission is durable."""

    def restate(entry: pb.JournalEntry) -> None:
        entry.restatements.add(admission=admission)

    return restate
