"""Ways to read another worker's blocks. There is one now, over gRPC; NIXL or NCCL would be another `BlockSource`."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

import grpc

from common.block_reads import BlockFrame, open_frame
from common.peer_tls import PeerTls, certificate_fault, open_peer_channel
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

    def __init__(self, tls: PeerTls | None = None) -> None:
        """`tls`: certificates between this worker and others; None: nothing is encrypted."""
        self._tls = tls

    async def frames(self, address: str, request: pb.ReadBlocksRequest) -> AsyncGenerator[BlockFrame]:
        """See BlockSource.frames."""
        async with open_peer_channel(address, self._tls, channel_options(CLUSTER_MESSAGE_BYTES)) as channel:
            read: Any = channel.unary_stream(
                _READ_BLOCKS, request_serializer=pb.ReadBlocksRequest.SerializeToString, response_deserializer=None
            )
            try:
                async for data in read(request):
                    yield open_frame(data)
            except grpc.aio.AioRpcError as error:
                raise await self._error_of(error, address) from error

    async def _error_of(self, error: grpc.aio.AioRpcError, address: str) -> QuireError:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return UnknownCallerError(f"the worker at {address} refuses to be read: {error.details()}")
        said = server_error_of(error)
        if isinstance(said, FailedPreconditionError | InvalidRequestError):
            return said
        is_doubtful = said is None and self._tls is not None  # without, the scheduler has said it of that worker
        fault = await certificate_fault(address, self._tls) if is_doubtful else ""
        return UnavailableError(
            f"the worker at {address} cannot be read: {fault or error.details() or error.code().name}"
        )
