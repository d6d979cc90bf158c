"""What the journal has to keep: everything that has not ended, and the entry from which on it can be read.

Each thing can say itself again, so that its older entries need not be kept: this happens when too much has been
written since. Knows nothing of what the things are.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.store import EntryId

# Writes all that is durable of a thing into an entry, as if no entry before it existed.
Restate = Callable[[pb.JournalEntry], None]

_RESTATED_AT_ONCE = 4
_RESTATED_BYTES = 256 << 10  # in one entry, unless a single thing is larger


@dataclass(slots=True)
class _Needed:
    entry_id: EntryId
    restate: Restate
    num_entries: int  # that had been written up to its own
    num_bytes: int


class NeededEntries:
    """By key, in the order of their entries. A thing whose first entry is on its way is known and not yet durable."""

    def __init__(self, *, restate_entries: int, restate_bytes: int) -> None:
        """A thing is restated when so many entries, or bytes of news, have been written behind its own."""
        self.num_restated = 0
        self._restate_entries = restate_entries
        self._restate_bytes = restate_bytes
        self._coming: dict[Hashable, Restate] = {}
        # Its first is asked for at every write; a plain dict would pass over all that went before it.
        self._durable: OrderedDict[Hashable, _Needed] = OrderedDict()
        self._num_entries = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._coming) + len(self._durable)

    @property
    def oldest(self) -> EntryId | None:
        """Nothing before it is needed. None: nothing is needed of what is durable."""
        return next((each.entry_id for each in self._durable.values()), None)

    def expect(self, key: Hashable, restate: Restate) -> None:
        """Its first entry is on its way."""
        self._coming[key] = restate

    def keep(self, key: Hashable, entry_id: EntryId, restate: Restate) -> None:
        """It is in an entry of an earlier leader, somewhere among those that were read."""
        self._durable[key] = _Needed(entry_id, restate, 0, 0)

    def note_read(self, num_bytes: int) -> None:
        """One entry of an earlier leader lies in the journal; before anything is written."""
        self._num_entries += 1
        self._num_bytes += num_bytes

    def sort(self) -> None:
        """Brings what was kept into order; before anything is written."""
        self._durable = OrderedDict(sorted(self._durable.items(), key=lambda item: item[1].entry_id))

    def restate_by(self, key: Hashable, restate: Restate) -> None:
        """From now on this says it again."""
        self._durable[key].restate = restate

    def forget(self, key: Hashable) -> None:
        """It is needed no more. Harmless if it is unknown."""
        self._coming.pop(key, None)
        self._durable.pop(key, None)

    def note_written(self, keys: list[Hashable], entry_id: EntryId, num_bytes: int) -> None:
        """An entry is durable, with this many bytes of news. These things can be read from it on, alone."""
        self._num_entries += 1
        self._num_bytes += num_bytes
        for key in keys:
            restate = self._coming.pop(key, None)
            if restate is None:
                known = self._durable.pop(key, None)
                if known is None:  # forgotten meanwhile
                    continue
                restate = known.restate
            self._durable[key] = _Needed(entry_id, restate, self._num_entries, self._num_bytes)

    def restate_due(self, entry: pb.JournalEntry) -> list[Hashable]:
        """Has those said again that are in the way of trimming, a few at a time. Returns their keys."""
        due: list[Hashable] = []
        for key, each in self._durable.items():
            is_due = (
                self._num_entries - each.num_entries >= self._restate_entries
                or self._num_bytes - each.num_bytes >= self._restate_bytes
            )
            if not is_due or len(due) == _RESTATED_AT_ONCE or (due and entry.ByteSize() >= _RESTATED_BYTES):
                break
            due.append(key)
            each.restate(entry)
        self.num_restated += len(due)
        return due

    def restate_all(self) -> Iterator[tuple[pb.JournalEntry, list[Hashable]]]:
        """Has everything durable said again, in entries of bounded size; gives them with the keys in them."""
        entry, keys = pb.JournalEntry(), list[Hashable]()
        for key, each in list(self._durable.items()):
            each.restate(entry)
            keys.append(key)
            if len(keys) % _RESTATED_AT_ONCE == 0 and entry.ByteSize() >= _RESTATED_BYTES:
                yield entry, keys
                entry, keys = pb.JournalEntry(), []
        if keys:
            yield entry, keys


def restating_alone(admission: pb.Admission) -> Restate:
    """Of a request of which nothing but its admission is durable."""

    def restate(entry: pb.JournalEntry) -> None:
        entry.restatements.add(admission=admission)

    return restate
