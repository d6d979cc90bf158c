"""Ways to read another worker's blocks. There is one now, over gRPC; NIXL or NCCL would be another `BlockSource`."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

import grpc

from common.block_reads import BlockFrame, open_frame
from common.rpc import CLUSTER_MESSAGE_BYTES
from quire.errors import FailedPreconditionError, InvalidRequestError, QuireError, UnavailableError
from quire.rpc import channel_options, server_error_of
from quire.v1 import worker_pb2 as pb
from worker_svc.service.caller_check import UnknownCallerError

_READ_BLOCKS = f"/{pb.DESCRIPTOR.services_by_name['Worker'].full_name}/ReadBlocks"


class BlockSource(Protocol):
    """A way to the blocks of other workers."""

    def frames(self, address: str, request: pb.ReadBlocksRequest) -> AsyncGenerator[BlockFrame]:
        """Yield the blocks of a request in its order.

        Raises DataLossError for what was damaged; FailedPreconditionError, InvalidRequestError or UnknownCallerError if
        the source refuses; and UnavailableError if there is nobody at the address, or the source fails on the way.
        """


class GrpcBlockSource:
    """Reads by `ReadBlocks`. Frames are checked; they arrive without protobuf's copies."""

    async def frames(self, address: str, request: pb.ReadBlocksRequest) -> AsyncGenerator[BlockFrame]:
        """See BlockSource.frames."""
        options = channel_options(CLUSTER_MESSAGE_BYTES)
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            read: Any = channel.unary_stream(
                _READ_BLOCKS, request_serializer=pb.ReadBlocksRequest.SerializeToString, response_deserializer=None
            )
            try:
                async for data in read(request):
                    yield open_frame(data)
            except grpc.aio.AioRpcError as error:
                raise _error_of(error, address) from error


def _error_of(error: grpc.aio.AioRpcError, address: str) -> QuireError:
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return UnknownCallerError(f"the worker at {address} refuses to be read: {error.details()}")
    said = server_error_of(error)
    if isinstance(said, FailedPreconditionError | InvalidRequestError):
        return said
    return UnavailableError(f"the worker at {address} cannot be read: {error.details() or error.code().name}")
