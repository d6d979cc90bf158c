"""A request from its admission to its end, as the engine holds it.

Knows how to describe itself to the journal, to the record store and to a worker; decides nothing.
"""

import asyncio
from dataclasses import dataclass, field

from common.arrays import pack_int32, unpack_int32
from common.slot_sampling import SlotSampling
from protos import inference_pb2 as pb
from protos import journal_pb2
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.requests.output_stream import OutputStream, RecordedText
from scheduler_svc.requests.request_params import RequestParams
from scheduler_svc.text.output_text import OutputText
from scheduler_svc.text.tokenizer import ModelTokenizer

PROMPT_TAIL_TOKENS = 16  # context in which the first output token is spelled

FINISH_REASON_OF_STATE = {
    pb.REQUEST_STATE_CANCELLED: pb.FINISH_REASON_CANCELLED,
    pb.REQUEST_STATE_EXPIRED: pb.FINISH_REASON_DEADLINE,
    pb.REQUEST_STATE_FAILED: pb.FINISH_REASON_FAILED,
}


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """Moments of a request, by the monotonic clock, in nanoseconds; None while they have not come."""

    arrived_ns: int
    arrived_unix_ns: int
    accepted_ns: int | None = None
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None

    def to_pb(self) -> pb.Timings:
        def since(moment_ns: int | None) -> int:
            return moment_ns - self.arrived_ns if moment_ns is not None else 0

        return pb.Timings(
            accepted_ns=since(self.accepted_ns),
            first_scheduled_ns=since(self.first_scheduled_ns),
            first_token_ns=since(self.first_token_ns),
            finished_ns=since(self.finished_ns),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """One request. `stream.token_ids` holds the tokens that were settled: their text made, handed to the journal."""

    params: RequestParams
    digest: bytes
    sequence: Sequence
    slot_sampling: SlotSampling
    text: OutputText
    stream: OutputStream
    times: RequestTimes
    ended_state: pb.RequestState.ValueType | None = None  # decided, though perhaps not yet durable
    finish: pb.SampleFinish | None = None
    error: str = ""
    num_failed_steps: int = 0  # in a row
    num_tokens_at_failure: int = 0  # output at the last of them
    deadline: asyncio.TimerHandle | None = None
    abandonment: asyncio.TimerHandle | None = None  # runs while no reader is there
    pending_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # of tokens not yet settled

    @property
    def request_id(self) -> str:
        return self.params.request_id

    @property
    def checks_stop_strings(self) -> bool:
        return bool(self.params.stop)

    @property
    def state(self) -> pb.RequestState.ValueType:
        """The state that clients may know of: an end counts once it is durable."""
        if self.stream.finished is not None:
            return self.stream.finished.state
        if self.ended_state is not None and self.times.first_scheduled_ns is not None:
            return pb.REQUEST_STATE_RUNNING
        running = self.sequence.status is SequenceStatus.RUNNING
        return pb.REQUEST_STATE_RUNNING if running else pb.REQUEST_STATE_WAITING

    def count_failed_step(self) -> int:
        """How many steps with this request have failed since it last got a token."""
        num_tokens = self.sequence.num_output_tokens
        self.num_failed_steps = self.num_failed_steps + 1 if num_tokens == self.num_tokens_at_failure else 1
        self.num_tokens_at_failure = num_tokens
        return self.num_failed_steps

    def drop_tokens_without_text(self) -> None:
        """Forgets tokens behind the last one that has its text; the request must have ended."""
        assert self.ended_state is not None
        del self.sequence.token_ids[self.sequence.num_prompt_tokens + len(self.text.released_ends) :]
        del self.pending_logprobs[self.sequence.num_output_tokens - len(self.stream.token_ids) :]

    def usage(self) -> pb.Usage:
        sequence = self.sequence
        return pb.Usage(
            prompt_tokens=sequence.num_prompt_tokens,
            completion_tokens=self.stream.num_released,
            cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
        )

    def to_finished(self) -> pb.Finished:
        """The end as readers see it; `ended_state` must be decided."""
        assert self.ended_state is not None
        return pb.Finished(state=self.ended_state, usage=self.usage(), timings=self.times.to_pb(), error=self.error)

    def to_finish_entry(self) -> journal_pb2.Finish:
        """The end as the journal keeps it; `ended_state` must be decided."""
        assert self.ended_state is not None
        return journal_pb2.Finish(sequence=self.sequence.seq_id, state=self.ended_state, error=self.error)

    def to_response(self) -> pb.GetRequestResponse:
        """What readers may know by now."""
        stream = self.stream
        sample = pb.SampleOutput(
            text=stream.released_text, token_ids=stream.token_ids[: stream.num_released], finish=stream.finish
        )
        return pb.GetRequestResponse(
            request_id=self.request_id,
            state=self.state,
            samples=[sample],
            usage=self.usage(),
            timings=self.times.to_pb(),
            error=self.error if stream.finished is not None else "",
            created_unix_ns=self.times.arrived_unix_ns,
            seed=self.params.seed,
            tenant=self.params.tenant,
        )

    def to_record(self) -> journal_pb2.RequestRecord:
        """All that a later reader may ask for; the end must be visible."""
        stream = self.stream
        return journal_pb2.RequestRecord(
            response=self.to_response(),
            request_digest=self.digest,
            output=stream.wanted,
            max_tokens=self.sequence.max_tokens,
            samples=[
                journal_pb2.SampleRecord(
                    released_ends=pack_int32(stream.text_log.released_ends), logprobs=stream.logprobs
                )
            ],
            prompt_logprobs=stream.prompt_logprobs,
            num_samples=1,
        )


def new_live_request(
    params: RequestParams,
    token_ids: list[int],
    *,
    digest: bytes,
    seq_id: int,
    max_tokens: int,
    tokenizer: ModelTokenizer | None,
    wanted: pb.OutputParams,
    times: RequestTimes,
) -> LiveRequest:
    """A request about to be admitted: `token_ids` is its prompt, `max_tokens` the bound of its output in force."""
    sequence = Sequence(
        seq_id=seq_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_tokens=max_tokens,
        stop_token_ids=params.stop_token_ids | params.eos_token_ids,
        min_tokens=params.min_tokens,
        hash_seed=f"{len(params.tenant)}:{params.tenant}{params.cache_salt}".encode(),
        use_prefix_cache=params.num_prompt_logprobs is None,
    )
    text = OutputText(
        tokenizer,
        token_ids[-PROMPT_TAIL_TOKENS:],
        stop=params.stop,
        min_tokens=params.min_tokens,
        include_stop=params.include_stop,
        keep_special_tokens=params.keep_special_tokens,
    )
    accepted = pb.Accepted(
        request_id=params.request_id, num_prompt_tokens=len(token_ids), max_tokens=max_tokens, seed=params.seed
    )
    return LiveRequest(
        params=params,
        digest=digest,
        sequence=sequence,
        slot_sampling=params.slot_sampling(len(token_ids)),
        text=text,
        stream=OutputStream(accepted, wanted, text),
        times=times,
    )


def stream_of_record(record: journal_pb2.RequestRecord) -> OutputStream:
    """The output of a request that has ended, from its record."""
    response, sample = record.response, record.response.samples[0]
    accepted = pb.Accepted(
        request_id=response.request_id,
        num_prompt_tokens=response.usage.prompt_tokens,
        max_tokens=record.max_tokens,
        seed=response.seed,
        attached=True,
    )
    text_log = RecordedText(sample.text, unpack_int32(record.samples[0].released_ends).tolist())
    stream = OutputStream(accepted, record.output, text_log, list(sample.token_ids))
    stream.logprobs = list(record.samples[0].logprobs)
    stream.prompt_logprobs = list(record.prompt_logprobs)
    finished = pb.Finished(state=response.state, usage=response.usage, timings=response.timings, error=response.error)
    stream.close(sample.finish, finished)
    return stream
