"""Journal entries as bytes: what piles up until the next write, and how it is read back.

The checksum is made and stored beside the payload by the store; here it is verified.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from zlib import crc32

from google.protobuf.message import DecodeError

from common.arrays import pack_int32, pack_int64
from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.store import JOURNAL_START, EntryId, JournalDamagedError, Store, StoredEntry

_READ_ENTRIES = 64  # an entry may have a megabyte
_DELTA_BYTES = 12
_LOGPROBS_BYTES = 128  # a rough guess; counting them exactly costs more than it is worth


class PendingEntry:
    """All that will be one entry. Holds who is to be told when it is durable, in order.

    `needed`: keys of what can be read from this entry on.
    """

    __slots__ = ("_entry", "_num_restated", "_sequences", "_tokens", "accepted", "needed", "num_bytes", "on_durable")

    def __init__(self) -> None:
        self._entry = pb.JournalEntry()
        self._sequences = array("q")
        self._tokens = array("i")
        self._num_restated = 0  # records that are there again
        self.num_bytes = 0  # about; without what is restated
        self.needed: list[Hashable] = []
        self.accepted: list[asyncio.Future[None]] = []
        self.on_durable: list[Callable[[], None]] = []

    @property
    def num_records(self) -> int:
        """Admissions, tokens, decisions of beam searches, preemptions, pauses, pins, and finishes, that are news."""
        entry = self._entry
        num_ends = len(entry.sample_finishes) + len(entry.finishes)
        num_decisions = len(entry.beam_steps) + len(entry.preemptions) + len(entry.pauses) + len(entry.pins)
        return len(entry.admissions) + len(self._tokens) + num_decisions + num_ends - self._num_restated

    def add_admission(self, admission: pb.Admission, accepted: "asyncio.Future[None]") -> None:
        """Copies the admission; `accepted` is for the caller of the journal to wait on."""
        self._entry.admissions.append(admission)
        self.num_bytes += admission.ByteSize()
        self.needed.append(admission.sequence)
        self.accepted.append(accepted)

    def add_deltas(self, sequences: Sequence[int], tokens: Sequence[int]) -> None:
        """Adds one token per sequence named. Raises OverflowError or TypeError for what is no int64, or no int32."""
        assert len(sequences) == len(tokens)
        more_sequences, more_tokens = array("q", sequences), array("i", tokens)
        self._sequences.extend(more_sequences)
        self._tokens.extend(more_tokens)
        self.num_bytes += _DELTA_BYTES * len(tokens)

    def add_logprobs(self, logprobs: Sequence[pb.DeltaLogprobs], first_delta: int) -> None:
        """Copies them; their `delta` counts from `first_delta` of this entry."""
        kept = self._entry.delta_logprobs
        start = len(kept)
        kept.extend(logprobs)
        for each in kept[start:]:
            each.delta += first_delta
        self.num_bytes += _LOGPROBS_BYTES * len(logprobs)

    def add_prompt_logprobs(self, prompts: Sequence[pb.PromptTokenLogprobs]) -> None:
        """Copies them."""
        self._entry.prompt_logprobs.extend(prompts)
        self.num_bytes += sum(prompt.ByteSize() for prompt in prompts)

    def add_beam_steps(self, steps: Sequence[pb.BeamStep]) -> None:
        """Copies them."""
        self._entry.beam_steps.extend(steps)
        self.num_bytes += sum(step.ByteSize() for step in steps)

    def add_pauses(self, pauses: Sequence[pb.PauseChange]) -> None:
        """Copies them."""
        self._entry.pauses.extend(pauses)
        self.num_bytes += sum(pause.ByteSize() for pause in pauses)

    def add_sample_finishes(self, finishes: Sequence[pb.SampleEnd]) -> None:
        """Copies them."""
        self._entry.sample_finishes.extend(finishes)
        self.num_bytes += sum(finish.ByteSize() for finish in finishes)

    def add_preemptions(self, preemptions: Sequence[pb.Preemption]) -> None:
        """Copies them."""
        self._entry.preemptions.extend(preemptions)
        self.num_bytes += sum(preemption.ByteSize() for preemption in preemptions)

    def add_finishes(self, finishes: Sequence[pb.Finish]) -> None:
        """Copies them."""
        self._entry.finishes.extend(finishes)
        self.num_bytes += sum(finish.ByteSize() for finish in finishes)

    def add_pins(self, changes: Sequence[pb.PinChange]) -> None:
        """Copies them."""
        self._entry.pins.extend(changes)
        self.num_bytes += sum(change.ByteSize() for change in changes)

    @property
    def ends_epoch(self) -> bool:
        """Whether it is a LeaderEnd, which stands alone."""
        return self._entry.HasField("leader_end")

    def set_leader_end(self, leader_id: str, is_durable: "asyncio.Future[None]") -> None:
        """Makes this the entry that ends an epoch; nothing else may be in it."""
        self._entry.leader_end.leader_id = leader_id
        self.accepted.append(is_durable)

    def restate(self, write: Callable[[pb.JournalEntry], list[Hashable]]) -> None:
        """Lets `write` put in front what is said again; it returns the keys. Once all before this entry is durable."""
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
        """The payload."""
        self._entry.delta_sequences = pack_int64(self._sequences)
        self._entry.delta_tokens = pack_int32(self._tokens)
        return self._entry.SerializeToString()


async def read_journal(
    store: Store, from_id: EntryId = JOURNAL_START
) -> AsyncIterator[tuple[EntryId, pb.JournalEntry]]:
    """Yields every entry from `from_id` on, itself included. Raises JournalDamagedError at one that is damaged."""
    while True:
        page = await store.read_entries(from_id, _READ_ENTRIES)
        for stored in page:
            yield stored.entry_id, decode(stored)
        if len(page) < _READ_ENTRIES:
            return
        last = page[-1].entry_id
        from_id = EntryId(last.epoch, last.seq + 1)


def is_news(entry: pb.JournalEntry) -> bool:
    """Whether its leader was ready: an entry that is neither the beginning of an epoch nor says things again."""
    if entry.HasField("leader_start"):
        return False
    is_new = bool(entry.admissions or entry.delta_tokens or entry.beam_steps)
    return is_new or not (entry.restatements or entry.pins)


def begins_again(entry_id: EntryId, entry: pb.JournalEntry) -> bool:
    """Whether a leader begins here to say everything again, since the store had lost something."""
    return entry.HasField("leader_start") and (entry.leader_start.says_all_again or entry_id.seq > 0)


def decode(stored: StoredEntry) -> pb.JournalEntry:
    """What an entry says. Raises JournalDamagedError if it is damaged."""
    if stored.payload is None or stored.checksum is None:
        raise JournalDamagedError(f"journal entry {stored.entry_id} has no payload or no checksum")
    if stored.checksum != b"%08x" % crc32(stored.payload):
        raise JournalDamagedError(f"journal entry {stored.entry_id} is damaged: its checksum does not match")
    try:
        return pb.JournalEntry.FromString(stored.payload)
    except DecodeError as error:
        raise JournalDamagedError(f"journal entry {stored.entry_id} cannot be decoded: {error}") from error
