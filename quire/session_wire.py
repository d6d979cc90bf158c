"""The client's side of a `Session` stream: messages are numbered and sealed when sent, and checked when received."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quire.checksum import has_seal, is_intact, sealed, tag_of
from quire.credentials import Metadata
from quire.errors import DataLossError
from quire.v1 import inference_pb2 as pb

SESSION = f"/{pb.DESCRIPTOR.services_by_name['Inference'].full_name}/Session"

_REQUEST_TAG = tag_of(pb.SessionRequest.DESCRIPTOR)
_RESPONSE_TAG = tag_of(pb.SessionResponse.DESCRIPTOR)


def open_session(
    channel: grpc.aio.Channel, requests: AsyncIterator[pb.SessionRequest], metadata: Metadata
) -> "grpc.aio.StreamStreamCall[pb.SessionRequest, bytes]":
    """Open a stream of numbered and sealed requests. Its answers come as bytes, for a `ResponseReader`."""
    return channel.stream_stream(SESSION, request_serializer=_seal_request)(_numbered(requests), metadata=metadata)


class ResponseReader:
    """Reader of one stream's answers. A server seals and numbers all of them, or, in an earlier version, none."""

    def __init__(self) -> None:
        self._is_sealed = False
        self._num_read = 0

    def read(self, data: bytes) -> pb.SessionResponse:
        """Check and parse an answer. Raises DataLossError if it is damaged, or not the next one."""
        if self._is_sealed or has_seal(data, _RESPONSE_TAG):
            if not is_intact(data, _RESPONSE_TAG):
                raise DataLossError(f"a message of {len(data):,} bytes does not match its checksum")
            self._is_sealed = True
        try:
            response = pb.SessionResponse.FromString(data)
        except DecodeError as error:
            raise DataLossError(f"a message of {len(data):,} bytes cannot be parsed") from error
        self._num_read += 1
        if response.number and response.number != self._num_read:
            raise DataLossError(f"message {self._num_read} was due and {response.number} came")
        return response


async def _numbered(requests: AsyncIterator[pb.SessionRequest]) -> AsyncIterator[pb.SessionRequest]:
    number = 0
    async for request in requests:
        number += 1
        request.number = number
        yield request


def _seal_request(request: Any) -> bytes:
    return sealed(request, _REQUEST_TAG)
