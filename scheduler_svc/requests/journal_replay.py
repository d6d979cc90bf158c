"""The journal's entries, one after another, to requests as a new leader finds them.

Pure, and a reader of entries alone: it knows no model, no text, no store and no clock. Beam searches are kept as the
decisions that they are replayed from.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.arrays import INT32_BYTES, unpack_int32, unpack_int64
from protos import inference_pb2 as pb
from protos import journal_pb2
from scheduler_svc.journal.store import DataLossError, EntryId
from scheduler_svc.requests.request_params import num_sequences_of


@dataclass(slots=True, eq=False)
class JournaledSample:
    """A sample that is drawn. `finish` if it ended by itself."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish: pb.SampleFinish | None = None


@dataclass(slots=True, eq=False)
class JournaledRequest:
    """One request; of a beam search `samples` are empty."""

    entry_id: EntryId  # of its admission
    admission: journal_pb2.Admission
    samples: list[JournaledSample]
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    beam_steps: list[journal_pb2.BeamStep] = field(default_factory=list)
    finish: journal_pb2.Finish | None = None

    @property
    def number(self) -> int:
        return self.admission.sequence

    @property
    def request_id(self) -> str:
        return self.admission.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.admission.prompt_token_ids) // INT32_BYTES

    @property
    def has_output(self) -> bool:
        return bool(self.beam_steps) or any(sample.token_ids for sample in self.samples)


class JournalReplay:
    """All requests whose admissions are in the entries applied so far, in the order of their admission."""

    def __init__(self) -> None:
        self.requests: dict[int, JournaledRequest] = {}  # by number
        self.highest_number = 0  # of any sequence
        self.num_unreadable = 0  # admissions by a version from which nobody can go on
        self._sample_of: dict[int, JournaledSample] = {}  # by number of its sequence

    def apply(self, entry_id: EntryId, entry: journal_pb2.JournalEntry) -> None:
        """Takes the next entry. Raises DataLossError if it cannot follow those before it."""
        try:
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
            for each in entry.sample_finishes:
                if each.sequence in self._sample_of:
                    self._sample_of[each.sequence].finish = each.finish
            for finish in entry.finishes:
                self._finish(finish)
        except ValueError as error:
            raise DataLossError(f"journal entry {entry_id} contradicts itself: {error}") from error

    def owners(self) -> Iterable[JournaledRequest]:
        """Of each request_id the last that has it, in order, unless it was withdrawn."""
        last = {request.request_id: request for request in self.requests.values()}
        return [request for request in self.requests.values() if last[request.request_id] is request]

    def disowned(self) -> Iterable[JournaledRequest]:
        """Requests without an end whose clients were told to come back, and have come back under the same id."""
        owners = set(self.owners())
        return [each for each in self.requests.values() if each.finish is None and each not in owners]

    def forget(self, number: int) -> None:
        """Lets go of a request that nobody will need."""
        self._drop(number)

    def _admit(self, entry_id: EntryId, admission: journal_pb2.Admission) -> None:
        if not admission.model_fingerprint:
            self.num_unreadable += 1
            return
        number, num_sequences = admission.sequence, num_sequences_of(admission.request)
        if number in self.requests or number in self._sample_of:
            raise ValueError(f"sequence {number} is admitted twice")
        self.highest_number = max(self.highest_number, number + num_sequences - 1)
        num_drawn = 0 if admission.request.HasField("beam") else num_sequences
        samples = [JournaledSample() for _ in range(num_drawn)]
        self.requests[number] = JournaledRequest(entry_id, admission, samples)
        for index, sample in enumerate(samples):
            self._sample_of[number + index] = sample

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
            self._drop(finish.sequence)
        elif finish.sequence in self.requests:
            self.requests[finish.sequence].finish = finish

    def _drop(self, number: int) -> None:
        request = self.requests.pop(number, None)
        for index in range(len(request.samples) if request is not None else 0):
            del self._sample_of[number + index]
