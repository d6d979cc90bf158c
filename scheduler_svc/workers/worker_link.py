"""Link to one worker: a channel, its description, and the stream of steps.

Knows bytes and order, not the purpose of a step. A link is used once: when it breaks, a new one is made.
"""

import asyncio
from collections import deque
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from common.peer_tls import PeerTls, certificate_fault, open_peer_channel
from common.rpc import CLUSTER_MESSAGE_BYTES
from common.step import Step, StepResult
from common.step_codec import result_from_pb, step_to_pb
from common.step_wire import STEP_KEY, open_response, open_step_stream
from quire.errors import DataLossError, FailedPreconditionError, UnavailableError
from quire.rpc import channel_options, error_of
from quire.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.workers.description_check import MAX_DESCRIPTION_BYTES, read_description

log = structlog.get_logger()

DESCRIBE_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 16 << 20  # of one step: log-probabilities of many thousand tokens, 20 each, have some megabytes
FetchCall = grpc.aio.UnaryStreamCall[worker_pb2.FetchBlocksRequest, worker_pb2.FetchBlocksResponse]
_DESCRIBE = f"/{worker_pb2.DESCRIPTOR.services_by_name['Worker'].full_name}/Describe"
_MAX_ERROR_CHARS = 500  # of a worker's error, which goes into logs and into the ends of requests


class WorkerLink:
    """Steps go out, results come back, in order. `news` is set when a result is there or the link broke."""

    def __init__(self, address: str, tls: PeerTls | None = None) -> None:
        """`tls`: certificates between this process and workers; None: nothing is encrypted."""
        self.address = address
        self._tls = tls
        self.news = asyncio.Event()
        self.results: deque[StepResult] = deque()
        self.broken: str | None = None  # why
        self.is_damaged = False  # bytes were changed on the way: that is neither the worker's doing nor a request's
        self.is_unreadable = False  # it broke by an answer that came as it was sent, and is none
        options = dict(channel_options(CLUSTER_MESSAGE_BYTES))
        options["grpc.max_receive_message_length"] = MAX_DESCRIPTION_BYTES  # no answer is longer
        self._channel = open_peer_channel(address, tls, list(options.items()))
        self._reading: asyncio.Task[None] | None = None

    async def describe(self, known_tokenizer_fingerprint: str) -> worker_pb2.DescribeResponse:
        """Ask the worker for its description.

        Raises UnavailableError, or FailedPreconditionError for an answer above its bounds.
        """
        serialize = worker_pb2.DescribeRequest.SerializeToString
        ask: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.DescribeRequest, bytes]
        ask = self._channel.unary_unary(_DESCRIBE, request_serializer=serialize)
        request = worker_pb2.DescribeRequest(known_tokenizer_fingerprint=known_tokenizer_fingerprint)
        try:
            return read_description(await ask(request, timeout=DESCRIBE_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            reason = error_of(error).message[:_MAX_ERROR_CHARS]
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise _unbelievable(self.address, reason) from error
            fault = await certificate_fault(self.address, self._tls)
            raise UnavailableError(f"worker at {self.address}: {fault or reason}") from error
        except ValueError as error:
            raise _unbelievable(self.address, str(error)) from error

    def open(self, step_key: str = "") -> None:
        """Open the stream of steps, with the key that the worker asks for."""
        self._call = open_step_stream(self._channel, step_key)
        self._reading = asyncio.create_task(self._read(), name=f"results from {self.address}")

    def fetch_blocks(self, request: worker_pb2.FetchBlocksRequest, step_key: str) -> FetchCall:
        """Have the worker read blocks of another one, beside the steps."""
        fetch: Any = worker_pb2_grpc.WorkerStub(self._channel).FetchBlocks  # typed as the call of a blocking channel
        call: FetchCall = fetch(request, metadata=((STEP_KEY, step_key),))
        return call

    async def send(self, step: Step) -> None:
        """Send a step. If that fails the link is broken, and `broken` says why."""
        try:
            await self._call.write(step_to_pb(step))
        except (grpc.RpcError, asyncio.InvalidStateError):  # the call has ended; the error shows gRPC's own objects
            self._break(f"a step could not be sent: {await self._why_ended()}")

    async def close(self) -> None:
        """Close the link; idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            self._call.cancel()
        await self._channel.close()

    async def _read(self) -> None:
        try:
            while isinstance(data := await self._call.read(), bytes):
                self.results.append(_result(data))
                self.news.set()
            self._break(await self._why_ended())
        except DataLossError as error:
            self.is_damaged = True
            self._break(f"unreadable answer: {error}")
        except (DecodeError, ValueError) as error:
            self.is_unreadable = True
            self._break(f"unreadable answer: {error}")
        except grpc.RpcError as rpc_error:
            cause = error_of(rpc_error)
            self.is_damaged |= isinstance(cause, DataLossError)
            self._break(cause.message)

    async def _why_ended(self) -> str:
        """The status of the call, which has ended."""
        code = await self._call.code()
        self.is_damaged |= code is grpc.StatusCode.DATA_LOSS
        return f"{code.name}: {await self._call.details()}"

    def _break(self, reason: str) -> None:
        if self.broken is None:
            self.broken = reason[:_MAX_ERROR_CHARS]
        self.news.set()


def _unbelievable(address: str, reason: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the description that the worker at {address} gives cannot be right: {reason}; start it with an undamaged "
        "model folder and version of Quire"
    )


def _result(data: bytes) -> StepResult:
    """Parse a result. Raises DataLossError if its bytes were damaged, DecodeError or ValueError if it is no result."""
    if len(data) > MAX_ANSWER_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, and may have {MAX_ANSWER_BYTES:,}")
    result = result_from_pb(open_response(data))
    result.error = result.error[:_MAX_ERROR_CHARS]
    return result
