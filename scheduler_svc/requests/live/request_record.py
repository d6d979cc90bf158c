"""Record of an ended request: made from the live request, and read back as an output that has ended.

Knows no store, and not when a record is written or how long it is kept.
"""

from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError

from common.arrays import pack_int32, unpack_int32
from quire.errors import FailedPreconditionError
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.requests.live.live_request import LiveRequest
from scheduler_svc.requests.live.output_stream import OutputStream, RecordedText, SampleStream


def record_of(request: LiveRequest) -> journal_pb2.RequestRecord:
    """Record with everything that a later reader may ask for. The end must be visible."""
    stream = request.stream
    has_logprobs = stream.wanted.HasField("logprobs")  # else they were computed to rank the samples
    return journal_pb2.RequestRecord(
        response=request.to_response(),
        request_digest=request.digest,
        output=stream.wanted,
        max_tokens=request.max_tokens,
        samples=[
            journal_pb2.SampleRecord(
                released_ends=pack_int32(sample.text_log.released_ends),
                logprobs=sample.logprobs if has_logprobs else (),
            )
            for sample in stream.samples
        ],
        prompt_logprobs=stream.prompt_logprobs,
        num_samples=stream.accepted.num_samples,
    )


def parsed_record(request_id: str, payload: bytes) -> journal_pb2.RequestRecord:
    """Parse a record as the store has it. Raises FailedPreconditionError if that is damaged."""
    try:
        return journal_pb2.RequestRecord.FromString(payload)
    except DecodeError as error:
        raise FailedPreconditionError(
            f"the record of request {request_id!r} is damaged in the store; send the request again under another id"
        ) from error


def deleted_record(record: journal_pb2.RequestRecord) -> journal_pb2.RequestRecord:
    """Record that takes the place of a deleted one: the end alone. No request has its digest, so its id stays taken."""
    response = record.response
    return journal_pb2.RequestRecord(
        response=pb.GetRequestResponse(
            request_id=response.request_id,
            state=response.state,
            timings=response.timings,
            created_unix_ns=response.created_unix_ns,
            tenant=response.tenant,
        ),
        deleted=True,
    )


def stream_of_record(record: journal_pb2.RequestRecord) -> OutputStream:
    """Output of an ended request, from its record."""
    response = record.response
    accepted = pb.Accepted(
        request_id=response.request_id,
        num_prompt_tokens=response.usage.prompt_tokens,
        max_tokens=record.max_tokens,
        seed=response.seed,
        attached=True,
        num_samples=record.num_samples,
        in_reasoning=response.in_reasoning,
        created_unix_ns=response.created_unix_ns,
    )
    samples = []
    for sample, kept in zip(response.samples, record.samples, strict=True):
        text_log = RecordedText(sample.text, unpack_int32(kept.released_ends).tolist())
        samples.append(SampleStream(text_log, list(sample.token_ids), list(kept.logprobs)))
        samples[-1].close(sample.finish)
    return OutputStream(
        accepted,
        record.output,
        samples,
        list(record.prompt_logprobs),
        pb.Finished(
            state=response.state,
            usage=response.usage,
            timings=response.timings,
            error=response.error,
            memory=response.memory,
        ),
    )


class RecordedOutputs:
    """Outputs of recorded requests that have readers: each once, so that one more reader costs no memory here either.

    A record takes up to nine times as much memory once it can be read from any position.
    """

    def __init__(self) -> None:
        self._open: WeakValueDictionary[tuple[str, int], OutputStream] = WeakValueDictionary()

    def output_of(self, record: journal_pb2.RequestRecord) -> OutputStream:
        """Output of a record that was read from the store."""
        key = record.response.request_id, record.response.created_unix_ns  # an id is free again when its record expires
        stream = self._open.get(key)
        if stream is None:
            stream = self._open[key] = stream_of_record(record)
        return stream
