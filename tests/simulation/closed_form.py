"""Expected output of a request without disturbance, and the check of observed output against it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from statistics import fmean

from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.beam_search import BeamSearch, BeamSearchParams, Candidate
from scheduler_svc.requests.params.request_params import EARLY_STOPPING, num_sequences_of
from tests.simulation import toy_model as model


@dataclass(slots=True)
class SeenSample:
    """Sample as far as it was seen."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish: pb.SampleFinish | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Undisturbed, to its end; `finish` has no score."""

    token_ids: list[int]
    checksums: list[int]  # from which each token came
    finish: pb.SampleFinish


class ClosedForm:
    """Expected output of one request; computed when it is first asked for."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._prompt_checksum = _checksum(list(request.token_ids.ids))
        self._ends = {*request.stopping.stop_token_ids, *(() if request.stopping.ignore_eos else (model.EOS,))}
        self._samples: dict[int, Sample] = {}

    def faults_of(self, samples: Sequence[SeenSample], *, is_whole: bool) -> list[str]:
        """List what is wrong with the observed samples; `is_whole` if the request ended by itself."""
        if self._request.HasField("beam"):
            return self._faults_of_beams(samples, is_whole=is_whole)
        num_drawn, num_returned = num_sequences_of(self._request), self._request.sampling.n or 1
        if is_whole and len(samples) != num_returned:
            return [f"{len(samples)} samples came, {num_returned} were asked for"]
        order = list(range(num_returned))
        if num_drawn > num_returned:
            if not is_whole:
                order = [each.finish.sample_index if each.finish is not None else 0 for each in samples]
            else:
                order = self._ranking(num_drawn)[:num_returned]
        faults = []
        for index, (seen, drawn) in enumerate(zip(samples, order, strict=False)):
            faults += [f"sample {index}: {fault}" for fault in self._faults_of_sample(seen, drawn, is_whole=is_whole)]
        return faults

    def prompt_logprobs(self) -> list[tuple[int, float]]:
        """Log-probabilities of the prompt's tokens from the second on."""
        told, checksum = [], model.START
        ids = self._request.token_ids.ids
        for token_id, next_id in pairwise(ids):
            checksum = model.extended(checksum, token_id)
            told.append((next_id, model.logprob(checksum, next_id)))
        return told

    def _faults_of_sample(self, seen: SeenSample, index: int, *, is_whole: bool) -> list[str]:
        sample, num_seen = self._sample(index), len(seen.token_ids)
        if seen.token_ids != sample.token_ids[:num_seen]:
            return [f"{seen.token_ids} came, where {sample.token_ids} was due"]
        faults = []
        if self._request.output.HasField("logprobs"):
            told = [(each.token_id, each.logprob) for each in seen.logprobs]
            pairs = zip(sample.token_ids[:num_seen], sample.checksums[:num_seen], strict=True)
            due = [(token_id, model.logprob(checksum, token_id)) for token_id, checksum in pairs]
            if told != due:
                faults.append(f"log-probabilities {told} came, where {due} were due")
        if is_whole:
            finish = pb.SampleFinish()
            finish.CopyFrom(seen.finish or finish)
            finish.ClearField("score")
            if num_seen < len(sample.token_ids) or finish != sample.finish:
                faults.append(f"it ended with {num_seen} tokens and {finish}, where {sample} was due")
        return faults

    def _sample(self, index: int) -> Sample:
        if index not in self._samples:
            self._samples[index] = self._run_sample(index)
        return self._samples[index]

    def _run_sample(self, index: int) -> Sample:
        request, checksum = self._request, self._prompt_checksum
        sampling, stopping = request.sampling, request.stopping
        noise_index = sampling.first_sample_index + index
        is_greedy = sampling.HasField("temperature") and sampling.temperature == 0.0
        token_ids: list[int] = []
        checksums: list[int] = []
        finish = pb.SampleFinish(sample_index=noise_index)
        while not finish.reason:
            barred = self._ends if len(token_ids) < stopping.min_tokens else ()
            token_id = model.drawn(checksum, sampling.seed, noise_index, barred, is_greedy=is_greedy)
            token_ids.append(token_id)
            checksums.append(checksum)
            checksum = model.extended(checksum, token_id)
            if token_id in self._ends:
                finish.reason = pb.FINISH_REASON_STOP
                if token_id == model.EOS and not stopping.ignore_eos:
                    finish.eos_token_id = token_id
                else:
                    finish.stop_token_id = token_id
            elif len(token_ids) == stopping.max_tokens:
                finish.reason = pb.FINISH_REASON_LENGTH
        return Sample(token_ids, checksums, finish)

    def _ranking(self, num_drawn: int) -> list[int]:
        def mean(index: int) -> float:
            sample = self._sample(index)
            pairs = zip(sample.checksums, sample.token_ids, strict=True)
            return fmean(model.logprob(checksum, token_id) for checksum, token_id in pairs)

        return sorted(range(num_drawn), key=mean, reverse=True)

    def _faults_of_beams(self, samples: Sequence[SeenSample], *, is_whole: bool) -> list[str]:
        came = [tuple(sample.token_ids) for sample in samples]
        search = self._search()
        if is_whole:
            while not search.search.is_done:
                search.step()
            due = [each.token_ids for each in search.search.finish()]
            return [] if came == due else [f"hypotheses {came} came, where {due} were due"]
        if len(came) <= 1 and not (came and samples[0].finish is not None and came[0]):
            return []  # it was cut before there was an end to compare
        while True:
            if [each.token_ids for each in search.search.finish()] == came:
                return []
            if search.search.is_done:
                return [f"hypotheses {came} came, which were the best after no step"]
            search.step()

    def _search(self) -> "_Search":
        request = self._request
        params = BeamSearchParams(
            beam_width=request.beam.beam_width,
            max_tokens=request.stopping.max_tokens,
            eos_token_ids=frozenset(self._ends),
            num_return=request.sampling.n or 1,
            length_penalty=request.beam.length_penalty if request.beam.HasField("length_penalty") else 1.0,
            early_stopping=EARLY_STOPPING[request.beam.early_stopping],
        )
        return _Search(self._prompt_checksum, params, request.stopping.min_tokens)


class _Search:
    """`BeamSearch` without scheduler, worker or wire."""

    def __init__(self, checksum: int, params: BeamSearchParams, min_tokens: int) -> None:
        self.search = BeamSearch(params)
        self._params = params
        self._min_tokens = min_tokens
        self._checksums = [checksum]  # of each live beam
        self._num_steps = 0

    def step(self) -> None:
        barred = self._params.eos_token_ids if self._num_steps < self._min_tokens else frozenset[int]()
        num_wanted = self.search.num_candidates
        given = [
            [Candidate(*each) for each in model.candidates(checksum, num_wanted, barred)]
            for checksum in self._checksums
        ]
        survivors = self.search.advance(given)
        self._checksums = [model.extended(self._checksums[each.parent], each.token_id) for each in survivors]
        self._num_steps += 1


def _checksum(token_ids: list[int]) -> int:
    return _checksum_of(tuple(token_ids))


@lru_cache(maxsize=1000)
def _checksum_of(token_ids: tuple[int, ...]) -> int:
    checksum = model.START
    for token_id in token_ids:
        checksum = model.extended(checksum, token_id)
    return checksum
