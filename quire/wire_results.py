"""Decodes answers from protobuf into plain data."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
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
Plain = TypeVar("Plain")

_REASONS = {pb.FinishReason.Value(f"FINISH_REASON_{each.name}"): each for each in FinishReason}
_STATES = {pb.RequestState.Value(f"REQUEST_STATE_{each.name}"): each for each in RequestState}
_LIVE_STATES = {pb.LiveState.Value(f"LIVE_STATE_{each.name}"): each for each in LiveState}


def accepted_from_pb(message: pb.Accepted) -> Accepted:
    """Decodes an acceptance."""
    return plain(Accepted, message, created_unix_s=message.created_unix_ns / 1e9)


def chunk_from_pb(message: pb.Chunk) -> Chunk:
    """Decodes a chunk."""
    return Chunk(
        index=message.index,
        position=message.position,
        num_tokens=message.num_tokens,
        text=message.text,
        token_ids=tuple(message.token_ids) if message.token_ids else (),
        logprobs=_logprobs(message.logprobs) if message.logprobs else (),
        prompt_logprobs=_logprobs(message.prompt_logprobs) if message.prompt_logprobs else (),
        finish=_finish(message.finish) if message.HasField("finish") else None,
        text_ends=tuple(message.text_ends) if message.text_ends else (),
    )


def outcome_from_pb(message: pb.Finished) -> Outcome:
    """Decodes a terminal state."""
    return plain(Outcome, message, state=state_from_pb(message.state), **_accounts(message))


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
    return plain(
        RequestRecord,
        message,
        state=state_from_pb(message.state),
        samples=tuple(_sample(index, each) for index, each in enumerate(message.samples)),
        **_accounts(message),
        created_unix_s=message.created_unix_ns / 1e9,
        waiting_for=message.waiting_for or None,
    )


def request_page_from_pb(message: pb.ListRequestsResponse) -> RequestPage:
    """Decodes one page of a listing of requests."""
    return RequestPage(
        requests=tuple(_request_summary(each) for each in message.requests),
        next_page_token=message.next_page_token or None,
    )


def _request_summary(message: pb.RequestSummary) -> RequestSummary:
    return plain(
        RequestSummary,
        message,
        state=_known(_LIVE_STATES, message.state, "state"),
        beam_width=message.beam_width or None,
        age_s=message.age_ms / 1e3,
        worker_id=message.worker_id or None,
        waiting_for=message.waiting_for or None,
    )


def prefix_from_pb(message: pb.PinnedPrefix, *, created: bool = False) -> PinnedPrefix:
    """Decodes a pin."""
    return plain(PinnedPrefix, message, worker_ids=tuple(message.worker_ids), created=created)


def model_from_pb(message: pb.GetModelResponse) -> Model:
    """Decodes a model's description."""
    defaults = {field.name: value for field, value in message.sampling_defaults.ListFields()}
    return plain(
        Model,
        message,
        eos_token_ids=tuple(message.eos_token_ids),
        tool_parser=message.tool_parser or None,
        reasoning_parser=message.reasoning_parser or None,
        sampling_defaults=SamplingParams(**defaults),
    )


def plain(kind: type[Plain], message: Message, **converted: Any) -> Plain:
    """Decodes into a dataclass: `converted` has the fields that differ, the others are copied from the message."""
    copied = {name: getattr(message, name) for name in kind.__annotations__ if name not in converted}
    return kind(**copied, **converted)


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


def _accounts(message: pb.Finished | pb.GetRequestResponse) -> dict[str, Any]:
    """Fields for the tokens, times and memory of a request."""
    return {
        "usage": plain(Usage, message.usage),
        "timings": _timings(message.timings),
        "memory": plain(RequestMemory, message.memory),
    }


def _timings(message: pb.Timings) -> Timings:
    return Timings(
        accepted_s=message.accepted_ns / 1e9,
        first_scheduled_s=seconds_or_none(message.first_scheduled_ns),
        first_token_s=seconds_or_none(message.first_token_ns),
        finished_s=seconds_or_none(message.finished_ns),
    )


def seconds_or_none(nanoseconds: int) -> float | None:
    """Seconds of a time that the wire gives in nanoseconds; None for 0, which is no time."""
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
