"""Steps and their answers as bytes on a StepStream, each with its checksum behind it.

It knows bytes, not what a step means.
"""

import grpc

from common.bounds_check import check_of
from quire.checksum import is_intact, sealed, tag_of
from quire.errors import DataLossError
from quire.v1 import worker_pb2 as pb

STEP_KEY = "quire-step-key"  # metadata: the secret that a worker told the schedulers that it registers with
STEP_STREAM = f"/{pb.DESCRIPTOR.services_by_name['Worker'].full_name}/StepStream"

_STEP_CHECK = check_of(pb.StepRequest.DESCRIPTOR)
REQUEST_TAG, RESPONSE_TAG = tag_of(pb.StepRequest.DESCRIPTOR), tag_of(pb.StepResponse.DESCRIPTOR)


def seal_request(message: pb.StepRequest) -> bytes:
    """The bytes of a step that has no checksum yet, with it."""
    return sealed(message, REQUEST_TAG)


def seal_response(message: pb.StepResponse) -> bytes:
    """The bytes of an answer that has no checksum yet, with it."""
    return sealed(message, RESPONSE_TAG)


def open_request(data: bytes) -> pb.StepRequest:
    """The step that was sealed. Raises DataLossError if these are not the bytes, DecodeError if they are none.

    Raises InvalidRequestError for more slots than any worker has.
    """
    _check(data, REQUEST_TAG)
    _STEP_CHECK.scan(data)
    return pb.StepRequest.FromString(data)


def open_response(data: bytes) -> pb.StepResponse:
    """The answer that was sealed. Raises as `open_request`."""
    _check(data, RESPONSE_TAG)
    return pb.StepResponse.FromString(data)


def open_any_request(data: bytes) -> pb.StepRequest:
    """A step that need not be sealed: a checksum is checked if it is there. Raises as `open_request`."""
    _STEP_CHECK.scan(data)
    message = pb.StepRequest.FromString(data)
    if message.checksum:
        _check(data, REQUEST_TAG)
    return message


def open_step_stream(
    channel: grpc.aio.Channel, step_key: str = ""
) -> "grpc.aio.StreamStreamCall[pb.StepRequest, bytes]":
    """A stream of steps to a worker, with the key that it asks for. Its answers come as bytes, for `open_response`."""
    return channel.stream_stream(STEP_STREAM, request_serializer=seal_request)(metadata=((STEP_KEY, step_key),))


def _check(data: bytes, tag: int) -> None:
    if not is_intact(data, tag):
        raise DataLossError(f"a message of {len(data):,} bytes does not match its checksum, or has none")
