"""Truth of the journal: every entry that the store took, to decide what may be delivered and what must not happen.

It reads entries with its own few lines, not with the replay that it is to judge.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from common.arrays import unpack_int32, unpack_int64
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.store import EntryId
from scheduler_svc.requests.params.request_params import num_sequences_of
from tests.simulation.history import History

_BY_TIME = (pb.REQUEST_STATE_EXPIRED, pb.REQUEST_STATE_CANCELLED)  # by a deadline, or readers that are gone


@dataclass(slots=True)
class Admitted:
    """A request in the journal."""

    number: int
    request_id: str
    tokens: list[list[int]]  # of samples that are drawn
    num_beam_steps: int = 0
    state: pb.RequestState.ValueType | None = None
    ended_s: float = 0.0
    is_withdrawn: bool = False


class Unanswered(NamedTuple):
    """Last entry of a leader, which may not know that it was taken, and then writes it again in a later epoch."""

    epoch: int
    payload: bytes
    admitted: list[Admitted]


@dataclass(slots=True)
class JournalTruth:
    """Entries in the order in which the store took them, whatever it lost later."""

    history: History
    by_number: dict[int, Admitted] = field(default_factory=dict)
    by_id: dict[str, list[Admitted]] = field(default_factory=dict)
    num_entries: int = 0
    epoch: int = 0  # the highest that the store knows of
    news_epoch: int = 0  # of the last entry that is more than the beginning of an epoch
    _last_payload: bytes = b""
    # Perhaps lost before they were acknowledged, with what they admitted: may come again.
    _unsure: dict[bytes, list[Admitted]] = field(default_factory=dict)
    _last_admitted: list[Admitted] = field(default_factory=list)
    _unanswered: dict[str, Unanswered] = field(default_factory=dict)  # by leader
    _ready_epochs: set[int] = field(default_factory=set)
    has_loss: bool = False  # of entries that nobody may have been told of
    _leader_of: dict[int, str] = field(default_factory=dict)  # by epoch, whatever the store has forgotten
    _sample_of: dict[int, list[int]] = field(default_factory=dict)  # tokens, by number of the sequence

    def take(self, entry_id: EntryId, payload: bytes) -> None:
        self._last_payload = payload
        if payload in self._unsure:
            self._last_admitted = self._unsure.pop(payload)
            return
        entry = journal_pb2.JournalEntry.FromString(payload)
        self.num_entries += 1
        if entry_id.epoch < self.epoch:
            self.history.violate(f"P4: entry {entry_id} was taken after epoch {self.epoch} had begun")
        self.epoch = max(self.epoch, entry_id.epoch)
        if entry.HasField("leader_start"):
            leader = self._leader_of.setdefault(entry_id.epoch, entry.leader_start.leader_id)
            if leader != entry.leader_start.leader_id:
                self.history.violate(f"P4: {leader} and {entry.leader_start.leader_id} share epoch {entry_id.epoch}")
        if not entry.HasField("leader_start"):
            self.news_epoch = entry_id.epoch
        if self._comes_again(entry_id.epoch, payload):
            return
        self._last_admitted = [self._admit(admission) for admission in entry.admissions]
        if entry.HasField("leader_ready"):
            self._ready_epochs.add(entry_id.epoch)
        elif entry_id.epoch in self._ready_epochs:
            self._unanswered[self._leader_of[entry_id.epoch]] = Unanswered(entry_id.epoch, payload, self._last_admitted)
        numbers, tokens = unpack_int64(entry.delta_sequences), unpack_int32(entry.delta_tokens)
        for number, token in zip(numbers, tokens, strict=True):
            self._sample_of[number].append(token)
        for step in entry.beam_steps:
            self.by_number[step.sequence].num_beam_steps += 1
        restated = {each.admission.sequence for each in entry.restatements}
        for number in restated & self.by_number.keys():  # by a standby that had not read of the withdrawal
            self.by_number[number].is_withdrawn = False
        for finish in entry.finishes:
            self._finish(finish, is_repeated=finish.sequence in restated)

    def note_loss(self, is_last_unanswered: bool, is_all: bool) -> None:
        """The store has lost entries, perhaps the one that its writer still waits for; with all it knows no epoch."""
        self.has_loss = True
        if is_all:
            self.epoch = 0
        if is_last_unanswered:
            self._unsure[self._last_payload] = self._last_admitted

    def note_answered(self, payload: bytes) -> None:
        """Record that the writer knows that this entry was taken: the same bytes again are a new entry."""
        self._unsure.pop(payload, None)
        for leader, last in list(self._unanswered.items()):
            if last.payload == payload:
                del self._unanswered[leader]

    def _comes_again(self, epoch: int, payload: bytes) -> bool:
        """True if its leader wrote this entry in an earlier epoch, heard nothing, and has begun again since."""
        last = self._unanswered.get(self._leader_of.get(epoch, ""))
        if last is None or last.payload != payload or epoch <= last.epoch:
            return False
        self._last_admitted = last.admitted
        return True

    def unended(self) -> list[Admitted]:
        """Last admission of each id, if it has no end: a lost one may be admitted again.

        One that was lost before its leader knew of it was not accepted: it is owed to nobody, unless it comes again.
        """
        unsure = {id(each) for admitted in self._unsure.values() for each in admitted}
        owners = (self.owner(request_id) for request_id in self.by_id)
        return [each for each in owners if each is not None and each.state is None and id(each) not in unsure]

    def owner(self, request_id: str) -> Admitted | None:
        """The last that was admitted by this id, unless it was withdrawn."""
        kept = [each for each in self.by_id.get(request_id, ()) if not each.is_withdrawn]
        return kept[-1] if kept else None

    def ended_before(self, request_id: str, moment_s: float) -> bool:
        return any(each.state is not None and each.ended_s <= moment_s for each in self.by_id.get(request_id, ()))

    def _admit(self, admission: journal_pb2.Admission) -> Admitted:
        request, number = admission.request, admission.sequence
        num_drawn = 0 if request.HasField("beam") else num_sequences_of(request)
        admitted = Admitted(number, request.request_id, [[] for _ in range(num_drawn)])
        earlier = self.by_number.get(number)
        if earlier is not None and earlier.state is None and not earlier.is_withdrawn and not self.has_loss:
            self.history.violate(f"sequence {number} was admitted twice")
        self.by_number[number] = admitted
        self.by_id.setdefault(request.request_id, []).append(admitted)
        for index, tokens in enumerate(admitted.tokens):
            self._sample_of[number + index] = tokens
        return admitted

    def _finish(self, finish: journal_pb2.Finish, *, is_repeated: bool) -> None:
        admitted = self.by_number[finish.sequence]
        if finish.withdrawn:
            admitted.is_withdrawn = True
        elif admitted.state is None:
            admitted.state, admitted.ended_s = finish.state, self.history.now_s
        elif self.has_loss and finish.state in _BY_TIME:
            return  # the earlier end is lost, and time has passed since
        elif admitted.state != finish.state:
            self.history.violate(
                f"P1: {admitted.request_id} ended as {pb.RequestState.Name(admitted.state)}, and then as "
                f"{pb.RequestState.Name(finish.state)}"
            )
        elif not is_repeated and not self.has_loss:  # what the store lost, its record may tell the next leader
            self.history.violate(f"P1: {admitted.request_id} ended twice")
