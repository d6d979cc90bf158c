"""Steps and their answers as bytes on a StepStream, each with its checksum behind it.

The checksum is a field of the message, the last one on the wire: it is appended to the serialised message and looked
for in the raw bytes, so that nothing is serialised twice and nothing damaged is parsed. CRC-32 finds every single
flipped bit. It knows bytes, not what a step means.
"""

import struct
from zlib import crc32

import grpc

from common.bounds_check import check_of
from quire.errors import DataLossError
from quire.v1 import worker_pb2 as pb

STEP_KEY = "quire-step-key"  # metadata: the secret that a worker told the schedulers that it registers with
STEP_STREAM = f"/{pb.DESCRIPTOR.services_by_name['Worker'].full_name}/StepStream"

_STEP_CHECK = check_of(pb.StepRequest.DESCRIPTOR)
_FIXED32 = 5  # the wire type
_CHECKSUM = struct.Struct("<BI")  # the field's tag, one byte below number 16, and its value
REQUEST_TAG, RESPONSE_TAG = (
    message.DESCRIPTOR.fields_by_name["checksum"].number << 3 | _FIXED32
    for message in (pb.StepRequest, pb.StepResponse)
)


def seal_request(message: pb.StepRequest) -> bytes:
    """The bytes of a step that has no checksum yet, with it."""
    return _sealed(message.SerializeToString(), REQUEST_TAG)


def seal_response(message: pb.StepResponse) -> bytes:
    """The bytes of an answer that has no checksum yet, with it."""
    return _sealed(message.SerializeToString(), RESPONSE_TAG)


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


def _sealed(data: bytes, tag: int) -> bytes:
    return data + _CHECKSUM.pack(tag, crc32(data))


def _check(data: bytes, tag: int) -> None:
    covered = len(data) - _CHECKSUM.size
    if covered < 0 or _CHECKSUM.unpack_from(data, covered) != (tag, crc32(memoryview(data)[:covered])):
        raise DataLossError(f"a message of {len(data):,} bytes does not match its checksum, or has none")
