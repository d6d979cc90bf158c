"""A client's channel to its server: made in the running loop at first use, with calls that retry what may pass.

Knows addresses, statuses and deadlines of calls; nothing of requests.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import NotFoundError, QuireError, RequestExpiredError, RetryableError, UnavailableError
from common.rpc import PUBLIC_MESSAGE_BYTES, channel_options, error_of
from protos import cluster_pb2_grpc, inference_pb2_grpc
from quire.absence import unreachable
from quire.params import ClientOptions
from quire.results import Health
from quire.session import Session

INFERENCE_SERVICE = "quire.v1.Inference"
JOURNAL_SERVICE = "quire.v1.Journal"  # by health alone: NOT_SERVING while the journal's store does not answer
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 0.5

_HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_SCHEMES = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:")
_LOOPBACK = ("127.", "localhost:", "[::1]:", "unix")

Response = TypeVar("Response")


def check_address(address: str) -> str:
    """The address, if it can be one. Raises ValueError if it is neither host:port nor a gRPC target."""
    if address.startswith(_SCHEMES):
        return address
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"{address!r} is not an address; write host:port, such as 127.0.0.1:7847")
    return address


class Connection:
    """Channel, stubs and session of one client. Belongs to the event loop it was made in."""

    def __init__(self, address: str, options: ClientOptions) -> None:
        self._address = address
        self._options = options
        channel_args: list[tuple[str, Any]] = list(channel_options(PUBLIC_MESSAGE_BYTES))
        if address.startswith(_LOOPBACK):  # a proxy of the environment cannot reach this machine's loopback
            channel_args.append(("grpc.enable_http_proxy", 0))
        self._channel = grpc.aio.insecure_channel(address, options=channel_args)
        self.inference: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self.cluster: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self.session = Session(self.inference, address, options)

    async def close(self) -> None:
        """Ends the session, then the channel."""
        await self.session.close()
        await self._channel.close()

    async def call(
        self, method: Callable[..., Awaitable[Response]], request: Message, timeout_s: float | None = None
    ) -> Response:
        """Makes one idempotent call; tries again what is refused for now, and what finds no server at first.

        Args:
            method: of a stub.
            request: its argument.
            timeout_s: longest wait for each answer; None: `call_timeout_s` of the client.
        """
        timeout_s = self._options.call_timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        backoff_s = FIRST_BACKOFF_S
        num_refusals = 0
        while True:
            try:
                return await method(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as rpc_error:
                error = self._error_of(rpc_error)
                refused = bool(rpc_error.trailing_metadata())
                delay_s = backoff_s
                if refused and isinstance(error, RetryableError):
                    num_refusals += 1
                    delay_s = error.retry_after_s
                late = loop.time() + delay_s - started_s > self._options.connect_timeout_s
                give_up = num_refusals > self._options.retries if refused else late
                if give_up or not isinstance(error, RetryableError):
                    raise error from rpc_error
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            await asyncio.sleep(delay_s)

    async def health(self, service: str) -> Health:
        """Asks once, with no retry. Raises UnavailableError if nothing answers, NotFoundError on an unknown name."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await self._health.Check(request, timeout=self._options.connect_timeout_s)
        except grpc.aio.AioRpcError as rpc_error:
            error = self._error_of(rpc_error)
            if isinstance(error, NotFoundError):
                error = NotFoundError(f"the server at {self._address} has no service {service!r}")
            raise error from rpc_error
        names = {1: Health.SERVING, 2: Health.NOT_SERVING}
        return names.get(answer.status, Health.UNKNOWN)

    def _error_of(self, rpc_error: grpc.aio.AioRpcError) -> QuireError:
        error = error_of(rpc_error)
        if isinstance(error, UnavailableError) and not rpc_error.trailing_metadata():
            return unreachable(self._address, rpc_error)
        if isinstance(error, RequestExpiredError):
            return UnavailableError(f"the server at {self._address} did not answer in time")
        return error
