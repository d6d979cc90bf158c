"""Publisher: make the text of new tokens, journal them in one record, release them when it is acknowledged.

Decides nothing: the engine says which samples have news, and handles text that cannot be made. Knows no scheduler and
no worker.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from quire.v1 import journal_pb2
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.records import Records
from scheduler_svc.requests.live.distributions import DistributionRecorder
from scheduler_svc.requests.live.live_request import OWN_ENDS, LiveRequest
from scheduler_svc.requests.live.live_sample import LiveSample
from scheduler_svc.requests.live.request_record import record_of

Delivery = Literal["durable", "relaxed"]


@dataclass(slots=True)
class _News:
    """News of one journal entry, released once that is durable."""

    requests: dict[LiveRequest, None] = field(default_factory=dict)  # that have any
    num_tokens: dict[LiveSample, int] = field(default_factory=dict)  # settled, of samples that gained some
    ended_samples: list[LiveSample] = field(default_factory=list)
    ended: list[tuple[LiveRequest, journal_pb2.Finish]] = field(default_factory=list)
    beam_steps: list[tuple[LiveRequest, tuple[journal_pb2.BeamStep, ...]]] = field(default_factory=list)
    with_prompt_logprobs: list[LiveRequest] = field(default_factory=list)
    preempted: list[tuple[LiveRequest, int]] = field(default_factory=list)  # and how often so far


class Publisher:
    """One per engine. `push_text` makes the text of a sample's new tokens. `on_closed` is called for each request whose
    end is durable. `delivery`: "durable" if readers wait for the acknowledgement of each token, "relaxed" if only for
    that of ends.
    """

    def __init__(
        self,
        journal: Journal,
        records: Records,
        *,
        push_text: Callable[[LiveRequest, LiveSample], object],
        on_closed: Callable[[LiveRequest], None],
        delivery: Delivery,
        distributions: DistributionRecorder,
    ) -> None:
        self._journal = journal
        self._records = records
        self._push_text = push_text
        self._on_closed = on_closed
        self._is_relaxed = delivery == "relaxed"
        self._distributions = distributions
        self._unsettled: dict[LiveSample, LiveRequest] = {}
        self._ended: list[LiveRequest] = []

    def add_news(self, samples: Mapping[LiveSample, LiveRequest]) -> None:
        """Add samples, with their requests, that may have unsettled tokens or an unsettled end."""
        self._unsettled.update(samples)

    def add_end(self, request: LiveRequest) -> None:
        """Add a request whose end is decided. Each of its samples must have been added."""
        self._ended.append(request)

    @property
    def has_news(self) -> bool:
        """True if anything added is not settled."""
        return bool(self._unsettled or self._ended)

    def settle(self) -> int:
        """Hand the news to the journal. Returns the number of samples that had any."""
        if not self.has_news:
            return 0
        sequences: list[int] = []
        tokens: list[int] = []
        logprobs: list[journal_pb2.DeltaLogprobs] = []
        prompt_logprobs: list[journal_pb2.PromptTokenLogprobs] = []
        beam_steps: list[journal_pb2.BeamStep] = []
        sample_finishes: list[journal_pb2.SampleEnd] = []
        preemptions: list[journal_pb2.Preemption] = []
        news = _News()
        for sample, request in self._each_unsettled():
            self._push_text(request, sample)
            fresh = sample.settle_tokens()
            fresh_logprobs = sample.settle_logprobs() if sample.pending_logprobs else ()
            sequence, finish = sample.sequence, sample.finish
            if request.stream.prompt_logprobs and not request.are_prompt_logprobs_settled:
                prompt_logprobs.append(_prompt_logprobs(request))
                news.with_prompt_logprobs.append(request)
            if request.group.num_preemptions != request.num_settled_preemptions:
                preemptions += _preemptions(request)
                news.preempted.append((request, request.num_settled_preemptions))
            if sequence is not None:  # beams are journaled as the candidates that decided them
                if fresh_logprobs:
                    logprobs += [
                        journal_pb2.DeltaLogprobs(delta=len(tokens) + i, logprobs=each)
                        for i, each in enumerate(fresh_logprobs)
                    ]
                tokens += fresh
                sequences += [sequence.seq_id] * len(fresh)
                if finish is not None and finish.reason in OWN_ENDS:
                    sample_finishes.append(journal_pb2.SampleEnd(sequence=sequence.seq_id, finish=finish))
            elif request.pending_beam_steps:
                beam_steps += request.pending_beam_steps
                news.beam_steps.append((request, request.pending_beam_steps))
                request.pending_beam_steps = ()
            if finish is not None:
                sample.is_end_settled = True
                news.ended_samples.append(sample)
            news.num_tokens[sample] = len(sample.stream.token_ids)
            news.requests[request] = None
        ended, self._ended = self._ended, []
        for request in ended:
            request.settle_outcome()
            news.ended.append((request, request.to_finish_entry()))
        self._journal.append(
            sequences=sequences,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            beam_steps=beam_steps,
            sample_finishes=sample_finishes,
            preemptions=preemptions,
            finishes=[finish for _, finish in news.ended],
            on_durable=partial(self._release, news),
        )
        if self._is_relaxed:
            self._notify(news, self._release_tokens(news))
        return len(news.num_tokens)

    def _each_unsettled(self) -> Iterator[tuple[LiveSample, LiveRequest]]:
        """Unsettled samples, those added meanwhile included: text that cannot be made ends its whole request."""
        while self._unsettled:
            unsettled, self._unsettled = self._unsettled, {}
            for sample, request in unsettled.items():
                if not sample.is_end_settled:
                    yield sample, request

    def _release(self, news: _News) -> None:
        _record_durable(news)
        silent = self._release_tokens(news)
        for sample in news.ended_samples:
            assert sample.finish is not None
            sample.stream.close(sample.finish)
        for request, _ in news.ended:
            request.stream.samples.extend(request.choose_samples()[len(request.stream.samples) :])
        self._notify(news, silent)
        for request, _ in news.ended:
            self._close(request)

    def _close(self, request: LiveRequest) -> None:
        assert request.outcome is not None
        request.stream.close(request.outcome)
        finish, number = request.durable.finish, request.number
        assert finish is not None
        self._records.put(
            request.request_id,
            record_of(request).SerializeToString(),
            lambda _: self._journal.forget(number),
            tenant=request.params.tenant,
            ended_unix_ns=finish.finished_unix_ns,
            replaces=request.replaces_record,
        )
        self._on_closed(request)

    def _release_tokens(self, news: _News) -> list[LiveRequest]:
        """Release the settled tokens, before an end releases them without counting. Return requests silent so far."""
        now_ns = time.monotonic_ns()
        silent = [request for request in news.requests if not request.has_output]
        for sample, num_tokens in news.num_tokens.items():
            num_new = num_tokens - sample.stream.num_released
            if num_new <= 0:
                continue
            if sample.released_ns is not None:
                self._distributions.token_s.observe((now_ns - sample.released_ns) / 1e9 / num_new, num_new)
            sample.released_ns = now_ns
            sample.stream.num_released = num_tokens
        return silent

    def _notify(self, news: _News, silent: Iterable[LiveRequest]) -> None:
        """Notify readers. A request that a new leader went on with is not silent: its first token was seen before."""
        now_ns = time.monotonic_ns()
        for request in silent:
            if request.has_output:
                self._distributions.first_token_s.observe((now_ns - request.times.arrived_ns) / 1e9)
                request.times.first_token_ns = now_ns  # an outcome that came in one piece has the decision's
        for request in news.requests:
            request.stream.notify()


def _record_durable(news: _News) -> None:
    for sample, num_tokens in news.num_tokens.items():
        sample.num_durable = num_tokens
    for sample in news.ended_samples:
        sample.is_end_durable = True
    for request, steps in news.beam_steps:
        request.durable.beam_steps += steps
    for request in news.with_prompt_logprobs:
        request.durable.has_prompt_logprobs = True
    for request, num_preemptions in news.preempted:
        request.durable.num_preemptions = num_preemptions
    for request, finish in news.ended:
        request.durable.finish = finish


def _preemptions(request: LiveRequest) -> list[journal_pb2.Preemption]:
    num_new = request.group.num_preemptions - request.num_settled_preemptions
    request.num_settled_preemptions = request.group.num_preemptions
    return [journal_pb2.Preemption(sequence=request.number) for _ in range(num_new)]


def _prompt_logprobs(request: LiveRequest) -> journal_pb2.PromptTokenLogprobs:
    request.are_prompt_logprobs_settled = True
    return journal_pb2.PromptTokenLogprobs(sequence=request.number, logprobs=request.stream.prompt_logprobs)
