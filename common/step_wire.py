"""Steps and their results as bytes on a StepStream, each followed by its checksum.

Knows bytes, not the meaning of a step.
"""

import grpc

from common.bounds_check import check_of
from quire.checksum import is_intact, sealed, tag_of
from quire.errors import DataLossError
from quire.v1 import worker_pb2 as pb

STEP_KEY = "quire-step-key"  # metadata: the secret that the worker gave the schedulers at its registration
STEP_STREAM = f"/{pb.DESCRIPTOR.services_by_name['Worker'].full_name}/StepStream"

_STEP_CHECK = check_of(pb.StepRequest.DESCRIPTOR)
REQUEST_TAG, RESPONSE_TAG = tag_of(pb.StepRequest.DESCRIPTOR), tag_of(pb.StepResponse.DESCRIPTOR)


def seal_request(message: pb.StepRequest) -> bytes:
    """Serialise a step and append its checksum."""
    return sealed(message, REQUEST_TAG)


def seal_response(message: pb.StepResponse) -> bytes:
    """Serialise a result and append its checksum."""
    return sealed(message, RESPONSE_TAG)


def open_request(data: bytes) -> pb.StepRequest:
    """Check and parse a sealed step. Raises DataLossError if the checksum does not match, DecodeError if it is no step.

    Raises InvalidRequestError for more seats than any worker has.
    """
    _check(data, REQUEST_TAG)
    _STEP_CHECK.scan(data)
    return pb.StepRequest.FromString(data)


def open_response(data: bytes) -> pb.StepResponse:
    """Check and parse a sealed result. Raises as `open_request`."""
    _check(data, RESPONSE_TAG)
    return pb.StepResponse.FromString(data)


def open_any_request(data: bytes) -> pb.StepRequest:
    """Parse a step, and check its checksum if it has one. Raises as `open_request`."""
    _STEP_CHECK.scan(data)
    message = pb.StepRequest.FromString(data)
    if message.checksum:
        _check(data, REQUEST_TAG)
    return message


def open_step_stream(
    channel: grpc.aio.Channel, step_key: str = ""
) -> "grpc.aio.StreamStreamCall[pb.StepRequest, bytes]":
    """Open a stream of steps to a worker, with the worker's key. Results come as bytes, for `open_response`."""
    return channel.stream_stream(STEP_STREAM, request_serializer=seal_request)(metadata=((STEP_KEY, step_key),))


def _check(data: bytes, tag: int) -> None:
    if not is_intact(data, tag):
        raise DataLossError(f"a message of {len(data):,} bytes does not match its checksum, or has none")
