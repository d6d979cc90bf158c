"""Journal entries as bytes: an entry that gathers records until the next write, and reading entries back.

The store computes the checksum and keeps it beside the payload; here it is verified.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from zlib import crc32

from google.protobuf.message import DecodeError, Message

from common.arrays import pack_int32, pack_int64
from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.store import JOURNAL_START, EntryId, JournalDamagedError, Store, StoredEntry

_READ_ENTRIES = 64  # an entry may have a megabyte
_DELTA_BYTES = 12
_STRING_BYTES = 3  # beside its own
_LOGPROBS_BYTES = 128  # a rough guess: an exact count costs more than it is worth


class PendingEntry:
    """Records of one entry, and the callbacks for when it is durable, in order.

    `needed`: keys of requests and pins whose state can be read from this entry on.
    """

    __slots__ = ("_entry", "_num_restated", "_sequences", "_tokens", "accepted", "needed", "num_bytes", "on_durable")

    def __init__(self) -> None:
        self._entry = pb.JournalEntry()
        self._sequences = array("q")
        self._tokens = array("i")
        self._num_restated = 0  # records that are restatements
        self.num_bytes = 0  # about; without restatements
        self.needed: list[Hashable] = []
        self.accepted: list[asyncio.Future[None]] = []
        self.on_durable: list[Callable[[], None]] = []

    @property
    def num_records(self) -> int:
        """Number of new admissions, tokens, steps of beam searches, preemptions, pauses, pins, finishes, deletions."""
        entry = self._entry
        num_ends = len(entry.sample_finishes) + len(entry.finishes) + len(entry.deletions)
        num_decisions = len(entry.beam_steps) + len(entry.preemptions) + len(entry.pauses) + len(entry.pins)
        return len(entry.admissions) + len(self._tokens) + num_decisions + num_ends - self._num_restated

    def add_admission(self, admission: pb.Admission, accepted: "asyncio.Future[None]") -> None:
        """Copy an admission; the caller of the journal waits on `accepted`."""
        self._entry.admissions.append(admission)
        self.num_bytes += admission.ByteSize()
        self.needed.append(admission.sequence)
        self.accepted.append(accepted)

    def add_deltas(self, sequences: Sequence[int], tokens: Sequence[int]) -> None:
        """Add one token for each sequence. Raises OverflowError or TypeError for values that are no int64 or int32."""
        assert len(sequences) == len(tokens)
        more_sequences, more_tokens = array("q", sequences), array("i", tokens)
        self._sequences.extend(more_sequences)
        self._tokens.extend(more_tokens)
        self.num_bytes += _DELTA_BYTES * len(tokens)

    def add_logprobs(self, logprobs: Sequence[pb.DeltaLogprobs], first_delta: int) -> None:
        """Copy log-probabilities; their `delta` counts from `first_delta` of this entry."""
        kept = self._entry.delta_logprobs
        start = len(kept)
        kept.extend(logprobs)
        for each in kept[start:]:
            each.delta += first_delta
        self.num_bytes += _LOGPROBS_BYTES * len(logprobs)

    def add_records(self, name: str, records: Sequence[Message]) -> None:
        """Copy records into the field of this name."""
        getattr(self._entry, name).extend(records)
        self.num_bytes += sum(record.ByteSize() for record in records)

    def add_deletions(self, request_ids: Sequence[str]) -> None:
        """Add requests whose records are deleted."""
        self._entry.deletions.extend(request_ids)
        self.num_bytes += sum(_STRING_BYTES + len(each.encode()) for each in request_ids)

    @property
    def ends_epoch(self) -> bool:
        """True if it is a LeaderEnd, which is alone in its entry."""
        return self._entry.HasField("leader_end")

    def set_leader_end(self, leader_id: str, is_durable: "asyncio.Future[None]") -> None:
        """Make this the entry that ends an epoch; it must have no other record."""
        self._entry.leader_end.leader_id = leader_id
        self.accepted.append(is_durable)

    def restate(self, write: Callable[[pb.JournalEntry], list[Hashable]]) -> None:
        """Let `write` put restatements in front; it returns their keys. Every earlier entry must be durable."""
        restated = pb.JournalEntry()
        keys = write(restated)
        if keys:
            num_records = self.num_records
            restated.MergeFrom(self._entry)
            self._entry = restated
            self._num_restated = self.num_records - num_records
            self.needed = [*keys, *self.needed]

    @property
    def num_deltas(self) -> int:
        return len(self._tokens)

    def encode(self) -> bytes:
        """Encode the payload."""
        self._entry.delta_sequences = pack_int64(self._sequences)
        self._entry.delta_tokens = pack_int32(self._tokens)
        return self._entry.SerializeToString()


async def read_journal(
    store: Store, from_id: EntryId = JOURNAL_START
) -> AsyncIterator[tuple[EntryId, pb.JournalEntry]]:
    """Yield every entry from `from_id` on, itself included. Raises JournalDamagedError at a damaged one."""
    while True:
        page = await store.read_entries(from_id, _READ_ENTRIES)
        for stored in page:
            yield stored.entry_id, decode(stored)
        if len(page) < _READ_ENTRIES:
            return
        last = page[-1].entry_id
        from_id = EntryId(last.epoch, last.seq + 1)


def is_news(entry: pb.JournalEntry) -> bool:
    """True if its leader was ready: the entry neither begins an epoch nor restates."""
    if entry.HasField("leader_start"):
        return False
    is_new = bool(entry.admissions or entry.delta_tokens or entry.beam_steps)
    return is_new or not (entry.restatements or entry.pins)


def begins_again(entry_id: EntryId, entry: pb.JournalEntry) -> bool:
    """True if a leader begins here to restate everything, since the store had lost something."""
    return entry.HasField("leader_start") and (entry.leader_start.says_all_again or entry_id.seq > 0)


def decode(stored: StoredEntry) -> pb.JournalEntry:
    """Decode an entry. Raises JournalDamagedError if it is damaged."""
    if stored.payload is None or stored.checksum is None:
        raise JournalDamagedError(f"journal entry {stored.entry_id} has no payload or no checksum")
    if stored.checksum != b"%08x" % crc32(stored.payload):
        raise JournalDamagedError(f"journal entry {stored.entry_id} is damaged: its checksum does not match")
    try:
        return pb.JournalEntry.FromString(stored.payload)
    except DecodeError as error:
        raise JournalDamagedError(f"journal entry {stored.entry_id} cannot be decoded: {error}") from error
