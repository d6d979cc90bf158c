"""Replay of the journal: entries, one after another, to the requests that a new leader finds.

Pure: knows no model, no text, no store and no clock. Beam searches are kept as the steps from which they are replayed.
A restated request or pin replaces the earlier one; when a leader restates everything, requests that it leaves out have
ended.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from common.arrays import INT32_BYTES, pack_int32, unpack_int32, unpack_int64
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.journal_entry import begins_again, is_news
from scheduler_svc.journal.store import EntryId, JournalDamagedError
from scheduler_svc.requests.params.request_params import num_sequences_of


@dataclass(slots=True, eq=False)
class JournaledSample:
    """Sample that is drawn. `finish`: set if it ended by itself."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish: pb.SampleFinish | None = None


@dataclass(slots=True, eq=False)
class JournaledRequest:
    """One request as journaled; of a beam search `samples` are empty."""

    entry_id: EntryId  # from which on it can be read: of its admission, or its last restatement
    admission: journal_pb2.Admission
    samples: list[JournaledSample]
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    beam_steps: list[journal_pb2.BeamStep] = field(default_factory=list)
    num_preemptions: int = 0
    is_paused: bool = False
    finish: journal_pb2.Finish | None = None
    replaces_record: bool = False  # that the store has of it, which is damaged

    @property
    def number(self) -> int:
        return self.admission.sequence

    @property
    def request_id(self) -> str:
        return self.admission.request.request_id

    @property
    def num_numbers(self) -> int:
        """Count of numbers of its sequences, from `number` on."""
        return max(1, len(self.samples))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.admission.prompt_token_ids) // INT32_BYTES

    def restate(self, entry: journal_pb2.JournalEntry) -> None:
        """Add this request to an entry that restates requests."""
        entry.restatements.add(
            admission=self.admission,
            samples=[
                journal_pb2.RestatedSample(
                    token_ids=pack_int32(each.token_ids), logprobs=each.logprobs, finish=each.finish
                )
                for each in self.samples
            ],
            beam_steps=self.beam_steps,
            prompt_logprobs=self.prompt_logprobs,
            num_preemptions=self.num_preemptions,
            pause=journal_pb2.PauseChange(sequence=self.number, paused=True) if self.is_paused else None,
        )
        if self.finish is not None:
            entry.finishes.append(self.finish)


@dataclass(slots=True, eq=False)
class JournaledPin:
    """Pinned prefix as journaled."""

    entry_id: EntryId  # that stated it last
    change: journal_pb2.PinChange

    def restate(self, entry: journal_pb2.JournalEntry) -> None:
        """Add the pin to an entry that restates pins."""
        entry.pins.append(self.change)


class BegunReplay(NamedTuple):
    """Replay of the first part of a journal."""

    replay: "JournalReplay"
    from_id: EntryId  # where the rest begins
    is_whole: bool = True  # False: the store has lost some of what was read
    # Is told each entry that the replay takes from here on.
    note_read: Callable[[EntryId, journal_pb2.JournalEntry], None] = lambda *_: None


class JournalReplay:
    """Requests and pins that were admitted or restated in the entries applied so far."""

    def __init__(self) -> None:
        self.requests: dict[int, JournaledRequest] = {}  # by number
        self.pins: dict[tuple[str, str], JournaledPin] = {}  # by tenant and name
        self.highest_number = 0  # of any sequence
        self.num_unreadable = 0  # admissions of an older version, which cannot be continued
        self.is_settled = False  # its last leader was ready: it had restated what it knew, and that is here
        self._last_id: EntryId | None = None  # of the entries applied
        # The store was emptied under the last leader: its epoch's first entries are missing behind another leader's,
        # where no trimming can have been.
        self._is_partial = False
        self._was_cut_short = False  # a leader that restated everything was followed before it had finished
        self._sample_of: dict[int, JournaledSample] = {}  # by number of its sequence
        self._numbers_of: dict[str, list[int]] = {}  # by request_id, of its requests
        # While a leader restates everything: keys not restated yet. They are needed if it dies before the end.
        self._unsaid: set[int | tuple[str, str]] | None = None

    @property
    def is_cut_short(self) -> bool:
        """True if the last leader that had to restate everything did not finish, and no later one did."""
        return self._was_cut_short or self._unsaid is not None

    def apply(self, entry_id: EntryId, entry: journal_pb2.JournalEntry) -> None:
        """Apply the next entry. Raises JournalDamagedError if it cannot follow those before it."""
        try:
            self._track_gap(entry_id)
            self._track_restating(entry_id, entry)
            for restatement in entry.restatements:
                self._restate(entry_id, restatement)
            for admission in entry.admissions:
                self._admit(entry_id, admission)
            for prompt in entry.prompt_logprobs:
                if prompt.sequence in self.requests:
                    self.requests[prompt.sequence].prompt_logprobs = list(prompt.logprobs)
            if entry.delta_sequences:
                self._append(entry)
            for step in entry.beam_steps:
                if step.sequence in self.requests:
                    self.requests[step.sequence].beam_steps.append(step)
            for preemption in entry.preemptions:
                if preemption.sequence in self.requests:
                    self.requests[preemption.sequence].num_preemptions += 1
            for pause in entry.pauses:
                if pause.sequence in self.requests:
                    self.requests[pause.sequence].is_paused = pause.paused
            for each in entry.sample_finishes:
                if each.sequence in self._sample_of:
                    self._sample_of[each.sequence].finish = each.finish
            for finish in entry.finishes:
                self._finish(finish)
            for request_id in entry.deletions:
                self._forget_deleted(request_id)
            for change in entry.pins:
                self._pin(entry_id, change)
        except ValueError as error:
            raise JournalDamagedError(f"journal entry {entry_id} contradicts itself: {error}") from error

    def owners(self) -> Iterable[JournaledRequest]:
        """Last request of each request_id, in the order of admission; withdrawn ones are left out."""
        requests = [request for _, request in sorted(self.requests.items())]
        last = {request.request_id: request for request in requests}
        return [request for request in requests if last[request.request_id] is request]

    def disowned(self) -> Iterable[JournaledRequest]:
        """Requests without an end whose clients were told to send them again, and did under the same id."""
        owners = set(self.owners())
        return [each for each in self.requests.values() if each.finish is None and each not in owners]

    def forget_request(self, number: int) -> None:
        """Forget a request that is not needed any more; no-op if there is none of this number."""
        request = self.requests.pop(number, None)
        if request is None:
            return
        numbers = self._numbers_of[request.request_id]
        numbers.remove(number)
        if not numbers:
            del self._numbers_of[request.request_id]
        for index in range(len(request.samples)):
            del self._sample_of[number + index]

    def _admit(self, entry_id: EntryId, admission: journal_pb2.Admission) -> None:
        if not admission.model_fingerprint:
            self.num_unreadable += 1
            return
        number = admission.sequence
        for taken in range(number, number + num_sequences_of(admission.request)):
            if taken in self.requests or taken in self._sample_of:
                self._make_room(entry_id, taken)
        self._add(entry_id, admission)
        if self._unsaid is not None:
            self._unsaid.discard(number)

    def _make_room(self, entry_id: EntryId, number: int) -> None:
        """Drop the request that has this number: its entry was read and then lost, or a leader found no trace of it."""
        (known,) = (each for each in self.requests.values() if each.number <= number < each.number + each.num_numbers)
        is_unsaid = self._unsaid is not None and known.number in self._unsaid
        if not is_unsaid and known.finish is None and known.entry_id.epoch >= entry_id.epoch:
            raise ValueError(f"sequence {number} is admitted twice")
        self.forget_request(known.number)

    def _add(self, entry_id: EntryId, admission: journal_pb2.Admission) -> JournaledRequest:
        number, num_sequences = admission.sequence, num_sequences_of(admission.request)
        self.highest_number = max(self.highest_number, number + num_sequences - 1)
        num_drawn = 0 if admission.request.HasField("beam") else num_sequences
        samples = [JournaledSample() for _ in range(num_drawn)]
        request = self.requests[number] = JournaledRequest(entry_id, admission, samples)
        self._numbers_of.setdefault(request.request_id, []).append(number)
        for index, sample in enumerate(samples):
            self._sample_of[number + index] = sample
        return request

    def _restate(self, entry_id: EntryId, restatement: journal_pb2.Restatement) -> None:
        self.forget_request(restatement.admission.sequence)
        request = self._add(entry_id, restatement.admission)
        if restatement.samples:
            for sample, said in zip(request.samples, restatement.samples, strict=True):
                sample.token_ids.extend(unpack_int32(said.token_ids))
                sample.logprobs.extend(said.logprobs)
                sample.finish = said.finish if said.HasField("finish") else None
        request.beam_steps.extend(restatement.beam_steps)
        request.prompt_logprobs.extend(restatement.prompt_logprobs)
        request.num_preemptions = restatement.num_preemptions
        request.is_paused = restatement.pause.paused

    def _pin(self, entry_id: EntryId, change: journal_pb2.PinChange) -> None:
        key = (change.tenant, change.name)
        if change.unpinned:
            self.pins.pop(key, None)
        else:
            self.pins[key] = JournaledPin(entry_id, change)

    def _track_gap(self, entry_id: EntryId) -> None:
        """Track whether the first entries of this epoch are missing, which begins with a LeaderStart.

        Trimming only takes those of the journal.
        """
        if self._last_id is not None and entry_id.epoch != self._last_id.epoch:
            self._is_partial = True
        self._last_id = entry_id

    def _track_restating(self, entry_id: EntryId, entry: journal_pb2.JournalEntry) -> None:
        """Track a leader that restates everything, as its LeaderStart announces, before it goes on."""
        if entry.HasField("leader_start"):
            self.is_settled = self._is_partial = False
            if begins_again(entry_id, entry):
                self._unsaid = {*self.requests, *self.pins}
            elif self._unsaid is not None:
                self._unsaid, self._was_cut_short = None, True
            return
        self.is_settled = not self._is_partial and (self.is_settled or is_news(entry))
        if self._unsaid is not None and (entry.restatements or entry.pins):
            self._unsaid.difference_update(each.admission.sequence for each in entry.restatements)
            self._unsaid.difference_update((each.tenant, each.name) for each in entry.pins)
        elif self._unsaid is not None:
            for key in self._unsaid:
                if isinstance(key, int):
                    self.forget_request(key)
                else:
                    del self.pins[key]
            self._unsaid, self._was_cut_short = None, False

    def _append(self, entry: journal_pb2.JournalEntry) -> None:
        sample_of = self._sample_of
        numbers, token_ids = unpack_int64(entry.delta_sequences), unpack_int32(entry.delta_tokens)
        for number, token_id in zip(numbers, token_ids, strict=True):
            sample = sample_of.get(number)
            if sample is not None:
                sample.token_ids.append(token_id)
        for each in entry.delta_logprobs:
            if each.delta >= len(numbers):
                raise ValueError(f"log-probabilities of token {each.delta}, of {len(numbers)}")
            sample = sample_of.get(numbers[each.delta])
            if sample is not None:
                sample.logprobs.append(each.logprobs)

    def _finish(self, finish: journal_pb2.Finish) -> None:
        if finish.withdrawn:
            self.forget_request(finish.sequence)
        elif finish.sequence in self.requests:
            self.requests[finish.sequence].finish = finish

    def _forget_deleted(self, request_id: str) -> None:
        """Forget the requests of this id, also those that never owned it: none of them may become the owner again.

        Not if the last of them has no end: the record expired while it was being deleted, and the id was free.
        """
        numbers = self._numbers_of.get(request_id, ())
        if numbers and self.requests[max(numbers)].finish is not None:
            for number in list(numbers):
                self.forget_request(number)
