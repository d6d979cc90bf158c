"""A reader of the journal that knows nothing but its entries: what became of each request, as a new leader would learn.

Applies an entry in the order that `journal.proto` gives: admissions, deltas and beam steps, finishes of samples,
finishes. Texts are left out: they follow from the tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import NoReturn, cast

from common.arrays import unpack_float32, unpack_int32, unpack_int64
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.beam_search import BeamSearch, Candidate
from scheduler_svc.requests.live.live_request import FINISH_REASON_OF_STATE, set_token_stop
from scheduler_svc.requests.params.prompt_checks import ModelLimits
from scheduler_svc.requests.params.request_params import settle

LIMITS = ModelLimits(
    vocab_size=100_000,
    max_model_len=65_536,
    eos_token_ids=frozenset({99_999}),
    has_tokenizer=True,
    has_chat_template=False,
)


@dataclass(slots=True)
class ReplayedSample:
    """`finish` without the score of a ranked one until the request has ended."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish: pb.SampleFinish | None = None


class ReplayedRequest:
    """One request, by its entries alone."""

    def __init__(self, admission: journal_pb2.Admission) -> None:
        self.request_id = admission.request.request_id
        self.prompt = unpack_int32(admission.prompt_token_ids).tolist()
        self.params = settle(admission.request, LIMITS, draw_seed=_never, make_id=_never)
        assert self.params.max_tokens is not None
        self.drawn = [] if self.params.beam else [ReplayedSample() for _ in range(self.params.num_sequences)]
        self.search = BeamSearch(self.params.beam_params(self.params.max_tokens)) if self.params.beam else None
        self.end: journal_pb2.Finish | None = None

    @property
    def samples(self) -> list[ReplayedSample]:
        """Samples that a client may know of by now, in its order."""
        if self.search is not None:
            return self._hypotheses(self.search)
        if not self.params.is_ranked:
            return [self._ended(sample, index) for index, sample in enumerate(self.drawn)]
        if self.end is None:
            return []
        samples = [self._ended(sample, index) for index, sample in enumerate(self.drawn)]
        samples.sort(key=_mean_logprob, reverse=True)
        for sample in samples:
            assert sample.finish is not None
            if sample.logprobs:
                sample.finish.score = _mean_logprob(sample)
        return samples[: self.params.num_samples]

    def take_beam_step(self, step: journal_pb2.BeamStep) -> None:
        assert self.search is not None
        details: list[object] = list(step.token_logprobs) or [None] * (len(step.token_ids) // 4)
        flat = [
            Candidate(*each)
            for each in zip(unpack_int32(step.token_ids), unpack_float32(step.logprobs), details, strict=True)
        ]
        given, start = [], 0
        for count in unpack_int32(step.num_candidates):
            given.append(flat[start : start + count])
            start += count
        assert start == len(flat)
        self.search.advance(given)

    def _ended(self, sample: ReplayedSample, index: int) -> ReplayedSample:
        finish = pb.SampleFinish()
        if sample.finish is not None:
            finish.CopyFrom(sample.finish)
        elif self.end is not None:
            finish.reason = FINISH_REASON_OF_STATE[self.end.state]
            finish.sample_index = self.params.sampling.sample_index + index
        return ReplayedSample(sample.token_ids, sample.logprobs, finish if finish.reason else None)

    def _hypotheses(self, search: BeamSearch) -> list[ReplayedSample]:
        common = ReplayedSample(list(search.common_prefix()), _logprobs(search.common_details()))
        if self.end is None:
            return [common]
        found = []
        for each in search.finish():
            finish = pb.SampleFinish(score=each.score)
            if each.finish == "eos":
                set_token_stop(finish, self.params, each.token_ids[-1])
            elif each.finish == "length":
                finish.reason = pb.FINISH_REASON_LENGTH
            else:
                finish.reason = FINISH_REASON_OF_STATE[self.end.state]
            found.append(ReplayedSample(list(each.token_ids), _logprobs(each.details), finish))
        if not found:
            common.finish = pb.SampleFinish(reason=FINISH_REASON_OF_STATE[self.end.state])
            found.append(common)
        return found


class Replay:
    """Replay of all requests in a journal, as far as it was read."""

    def __init__(self) -> None:
        self.requests: dict[str, ReplayedRequest] = {}
        self._by_number: dict[int, tuple[ReplayedRequest, int]] = {}  # with the index of the sequence

    def apply(self, entry: journal_pb2.JournalEntry) -> None:
        for admission in entry.admissions:
            self._admit(admission)
        logprobs = {each.delta: each.logprobs for each in entry.delta_logprobs}
        assert len(logprobs) == len(entry.delta_logprobs), "two of one token"
        deltas = zip(unpack_int64(entry.delta_sequences), unpack_int32(entry.delta_tokens), strict=True)
        for delta, (number, token_id) in enumerate(deltas):
            request, index = self._by_number[number]
            assert request.end is None, "a token behind the end"
            sample = request.drawn[index]
            assert sample.finish is None, "a token behind the finish of its sample"
            sample.token_ids.append(token_id)
            if delta in logprobs:
                sample.logprobs.append(logprobs.pop(delta))
                assert sample.logprobs[-1].token_id == token_id
        assert not logprobs, "log-probabilities of no token"
        for step in entry.beam_steps:
            self._by_number[step.sequence][0].take_beam_step(step)
        for each in entry.sample_finishes:
            request, index = self._by_number[each.sequence]
            assert request.end is None and request.drawn[index].finish is None, "a second finish of a sample"
            request.drawn[index].finish = each.finish
        for finish in entry.finishes:
            request, index = self._by_number[finish.sequence]
            assert request.end is None and index == 0, "a second end"
            request.end = finish

    def _admit(self, admission: journal_pb2.Admission) -> None:
        request = ReplayedRequest(admission)
        self.requests[request.request_id] = request
        for index in range(request.params.num_sequences):
            assert admission.sequence + index not in self._by_number, "a number used twice"
            self._by_number[admission.sequence + index] = request, index


def replayed(entries: Iterable[journal_pb2.JournalEntry]) -> Replay:
    replay = Replay()
    for entry in entries:
        replay.apply(entry)
    return replay


def merged(entries: Iterable[journal_pb2.JournalEntry]) -> journal_pb2.JournalEntry:
    """The one entry that these would have been, had the store been slower."""
    whole = journal_pb2.JournalEntry()
    for entry in entries:
        first_delta = len(whole.delta_tokens) // 4
        for each in entry.delta_logprobs:
            whole.delta_logprobs.add(delta=first_delta + each.delta, logprobs=each.logprobs)
        whole.delta_sequences += entry.delta_sequences
        whole.delta_tokens += entry.delta_tokens
        whole.admissions.extend(entry.admissions)
        whole.prompt_logprobs.extend(entry.prompt_logprobs)
        whole.beam_steps.extend(entry.beam_steps)
        whole.sample_finishes.extend(entry.sample_finishes)
        whole.finishes.extend(entry.finishes)
    return whole


def _logprobs(details: Iterable[object]) -> list[pb.TokenLogprobs]:
    return [cast(pb.TokenLogprobs, each) for each in details if each is not None]


def _mean_logprob(sample: ReplayedSample) -> float:
    return fmean(each.logprob for each in sample.logprobs) if sample.logprobs else float("-inf")


def _never() -> NoReturn:
    raise AssertionError("the journal leaves nothing open")
