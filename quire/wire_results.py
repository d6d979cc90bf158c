"""Decodes answers from protobuf into plain data."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from quire.errors import DataLossError, QuireError, from_status
from quire.params import SamplingParams
from quire.request_list import LiveState, RequestPage, RequestSummary
from quire.results import (
    Accepted,
    Chunk,
    Finish,
    FinishReason,
    Model,
    Outcome,
    PinnedPrefix,
    RequestMemory,
    RequestRecord,
    RequestState,
    SampleOutput,
    StopCause,
    Timings,
    TokenLogprobs,
    Usage,
)
from quire.v1 import inference_pb2 as pb

Number = TypeVar("Number", bound=int)
Word = TypeVar("Word")

_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    pb.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
    pb.FINISH_REASON_FAILED: FinishReason.FAILED,
}
_STATES = {
    pb.REQUEST_STATE_WAITING: RequestState.WAITING,
    pb.REQUEST_STATE_RUNNING: RequestState.RUNNING,
    pb.REQUEST_STATE_PAUSED: RequestState.PAUSED,
    pb.REQUEST_STATE_FINISHED: RequestState.FINISHED,
    pb.REQUEST_STATE_FAILED: RequestState.FAILED,
    pb.REQUEST_STATE_CANCELLED: RequestState.CANCELLED,
    pb.REQUEST_STATE_EXPIRED: RequestState.EXPIRED,
}
_LIVE_STATES = {
    pb.LIVE_STATE_ENTERING: LiveState.ENTERING,
    pb.LIVE_STATE_QUEUED: LiveState.QUEUED,
    pb.LIVE_STATE_RUNNING: LiveState.RUNNING,
    pb.LIVE_STATE_PREEMPTED: LiveState.PREEMPTED,
    pb.LIVE_STATE_SWAPPED: LiveState.SWAPPED,
    pb.LIVE_STATE_PAUSED: LiveState.PAUSED,
    pb.LIVE_STATE_RECOVERING: LiveState.RECOVERING,
    pb.LIVE_STATE_ENDING: LiveState.ENDING,
}


def accepted_from_pb(message: pb.Accepted) -> Accepted:
    """Decodes an acceptance."""
    return Accepted(
        request_id=message.request_id,
        num_prompt_tokens=message.num_prompt_tokens,
        max_tokens=message.max_tokens,
        seed=message.seed,
        attached=message.attached,
        num_samples=message.num_samples,
    )


def chunk_from_pb(message: pb.Chunk) -> Chunk:
    """Decodes a chunk."""
    return Chunk(
        index=message.index,
        position=message.position,
        num_tokens=message.num_tokens,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs) if message.logprobs else (),
        prompt_logprobs=_logprobs(message.prompt_logprobs) if message.prompt_logprobs else (),
        finish=_finish(message.finish) if message.HasField("finish") else None,
    )


def outcome_from_pb(message: pb.Finished) -> Outcome:
    """Decodes a terminal state."""
    return Outcome(
        state=state_from_pb(message.state),
        usage=_usage(message.usage),
        timings=_timings(message.timings),
        memory=_memory(message.memory),
        error=message.error,
    )


def error_from_pb(message: pb.Error) -> QuireError:
    """Decodes a refusal, with its details where the server sent any."""
    try:
        status = status_pb2.Status.FromString(message.status)
    except DecodeError:
        status = status_pb2.Status()
    if status.code == 0:
        status = status_pb2.Status(code=message.code, message=message.message)
    return from_status(status)


def _known(words: Mapping[Number, Word], number: Number, what: str) -> Word:
    """Meaning of a number of an enum. Raises DataLossError for an unknown one."""
    try:
        return words[number]
    except KeyError:
        raise DataLossError(
            f"the server's answer has a {what} that this client does not know ({number}); a newer client may"
        ) from None


def state_from_pb(state: pb.RequestState.ValueType) -> RequestState:
    """Decodes a state."""
    return _known(_STATES, state, "state")


def record_from_pb(message: pb.GetRequestResponse) -> RequestRecord:
    """Decodes a request's record."""
    return RequestRecord(
        request_id=message.request_id,
        state=state_from_pb(message.state),
        samples=tuple(_sample(index, each) for index, each in enumerate(message.samples)),
        usage=_usage(message.usage),
        timings=_timings(message.timings),
        memory=_memory(message.memory),
        error=message.error,
        created_unix_s=message.created_unix_ns / 1e9,
        seed=message.seed,
        tenant=message.tenant,
        waiting_for=message.waiting_for or None,
    )


def request_page_from_pb(message: pb.ListRequestsResponse) -> RequestPage:
    """Decodes one page of a listing of requests."""
    return RequestPage(
        requests=tuple(_request_summary(each) for each in message.requests),
        next_page_token=message.next_page_token or None,
    )


def _request_summary(message: pb.RequestSummary) -> RequestSummary:
    return RequestSummary(
        request_id=message.request_id,
        tenant=message.tenant,
        state=_known(_LIVE_STATES, message.state, "state"),
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        num_samples=message.num_samples,
        beam_width=message.beam_width or None,
        priority=message.priority,
        age_s=message.age_ms / 1e3,
        worker_id=message.worker_id or None,
        waiting_for=message.waiting_for or None,
    )


def prefix_from_pb(message: pb.PinnedPrefix, *, created: bool = False) -> PinnedPrefix:
    """Decodes a pin."""
    return PinnedPrefix(
        name=message.name,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        num_tokens=message.num_tokens,
        num_blocks=message.num_blocks,
        worker_ids=tuple(message.worker_ids),
        created=created,
    )


def model_from_pb(message: pb.GetModelResponse) -> Model:
    """Decodes a model's description."""
    return Model(
        name=message.name,
        fingerprint=message.fingerprint,
        architecture=message.architecture,
        dtype=message.dtype,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
        sampling_defaults=_sampling_defaults(message.sampling_defaults),
    )


def _sampling_defaults(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(**{field.name: value for field, value in message.ListFields()})


def _finish(message: pb.SampleFinish) -> Finish:
    cause = message.WhichOneof("cause")
    return Finish(
        reason=_known(_REASONS, message.reason, "reason of an end"),
        cause=StopCause(**{cause: getattr(message, cause)}) if cause else None,
        score=message.score if message.HasField("score") else None,
        sample_index=message.sample_index,
    )


def _sample(index: int, message: pb.SampleOutput) -> SampleOutput:
    return SampleOutput(
        index=index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish=_finish(message.finish) if message.HasField("finish") else None,
    )


def _usage(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        num_preemptions=message.num_preemptions,
    )


def _memory(message: pb.RequestMemory) -> RequestMemory:
    return RequestMemory(
        blocks=message.blocks,
        shared_blocks=message.shared_blocks,
        saved_blocks=message.saved_blocks,
        host_blocks=message.host_blocks,
        copied_blocks=message.copied_blocks,
        swapped_out_blocks=message.swapped_out_blocks,
        swapped_in_blocks=message.swapped_in_blocks,
        recomputed_tokens=message.recomputed_tokens,
    )


def _timings(message: pb.Timings) -> Timings:
    return Timings(
        accepted_s=message.accepted_ns / 1e9,
        first_scheduled_s=_seconds(message.first_scheduled_ns),
        first_token_s=_seconds(message.first_token_ns),
        finished_s=_seconds(message.finished_ns),
    )


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None


def _logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token_id=each.token_id,
            logprob=each.logprob,
            rank=each.rank,
            top=tuple(zip(each.top_token_ids, each.top_logprobs, strict=True)),
        )
        for each in messages
    )
