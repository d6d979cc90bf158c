"""From decided tokens to durable output: text, one journal record for all that is new, release on its acknowledgement.

It decides nothing: which samples have news comes from the engine, and so does what becomes of a text that cannot be
made. Knows no scheduler and no worker.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import structlog

from protos import inference_pb2 as pb
from protos import journal_pb2
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.records import Records
from scheduler_svc.requests.live_request import LiveRequest
from scheduler_svc.requests.live_sample import LiveSample
from scheduler_svc.requests.request_record import record_of

log = structlog.get_logger()

_OWN_ENDS = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)


class _Release(NamedTuple):
    """What a reader may see of a sample once its journal entry is durable."""

    request: LiveRequest
    sample: LiveSample
    num_tokens: int
    is_end: bool


class Publisher:
    """`push_text` brings a sample's text up to its tokens. `on_durable` is called with each acknowledgement, and
    `on_closed` of each request whose end is durable.
    """

    def __init__(
        self,
        journal: Journal,
        records: Records,
        *,
        push_text: Callable[[LiveRequest, LiveSample], object],
        on_durable: Callable[[], None],
        on_closed: Callable[[LiveRequest], None],
    ) -> None:
        self._journal = journal
        self._records = records
        self._push_text = push_text
        self._on_durable = on_durable
        self._on_closed = on_closed
        self._unsettled: dict[LiveSample, LiveRequest] = {}
        self._ended: list[LiveRequest] = []

    def note(self, request: LiveRequest, sample: LiveSample) -> None:
        """The sample may have tokens, or an end, that are not settled."""
        if not sample.is_end_settled:
            self._unsettled[sample] = request

    def note_end(self, request: LiveRequest) -> None:
        """Its end is decided; every sample of it has been noted."""
        self._ended.append(request)

    def settle(self) -> None:
        """Hands all that is new to the journal."""
        if not self._unsettled and not self._ended:
            return
        sequences: list[int] = []
        tokens: list[int] = []
        logprobs: list[journal_pb2.DeltaLogprobs] = []
        beam_steps: list[journal_pb2.BeamStep] = []
        sample_finishes: list[journal_pb2.SampleEnd] = []
        releases: list[_Release] = []
        while self._unsettled:
            sample, request = next(iter(self._unsettled.items()))
            del self._unsettled[sample]
            self._push_text(request, sample)
            fresh = sample.settle_tokens()
            fresh_logprobs = sample.settle_logprobs()
            sequence, finish = sample.sequence, sample.finish
            if sequence is not None:  # beams are written as what they were decided from
                logprobs += [
                    journal_pb2.DeltaLogprobs(delta=len(tokens) + i, logprobs=each)
                    for i, each in enumerate(fresh_logprobs)
                ]
                tokens += fresh
                sequences += [sequence.seq_id] * len(fresh)
                if finish is not None and finish.reason in _OWN_ENDS:
                    sample_finishes.append(journal_pb2.SampleEnd(sequence=sequence.seq_id, finish=finish))
            elif request.pending_beam_steps:
                beam_steps += request.pending_beam_steps
                request.pending_beam_steps = []
            sample.is_end_settled = finish is not None
            releases.append(_Release(request, sample, len(sample.stream.token_ids), finish is not None))
        ended, self._ended = self._ended, []
        self._journal.append(
            sequences=sequences,
            tokens=tokens,
            logprobs=logprobs,
            beam_steps=beam_steps,
            sample_finishes=sample_finishes,
            finishes=[request.to_finish_entry() for request in ended],
            on_durable=partial(self._release, releases, ended),
        )

    def _release(self, releases: Iterable[_Release], ended: Iterable[LiveRequest]) -> None:
        now_ns = time.monotonic_ns()
        self._on_durable()
        for request, sample, num_tokens, is_end in releases:
            if request.times.first_token_ns is None and num_tokens:
                request.times.first_token_ns = now_ns
            if is_end:
                assert sample.finish is not None
                sample.stream.close(sample.finish)
            else:
                sample.stream.num_released = num_tokens
            request.stream.notify()
        for request in ended:
            self._close(request)

    def _close(self, request: LiveRequest) -> None:
        stream = request.stream
        stream.samples.extend(request.choose_samples()[len(stream.samples) :])
        stream.close(request.to_finished())
        record = record_of(request).SerializeToString()
        self._records.put(request.request_id, record, partial(self._journal.forget, request.number))
        self._on_closed(request)
