"""A client's connection to its servers: made in the running loop at first use, with calls that retry passing failures.

Knows addresses, statuses and deadlines of calls; nothing of requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.abandoned_calls import AbandonedCalls
from quire.client_home import CLOSED
from quire.credentials import Credentials
from quire.errors import (
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    NotLeaderError,
    QuireError,
    RequestExpiredError,
    RetryableError,
    ShardsChangedError,
    UnavailableError,
)
from quire.params import ClientOptions
from quire.results import Health
from quire.rpc import PUBLIC_MESSAGE_BYTES, is_cancelled, readable, server_error_of
from quire.server_errors import no_leader_error, said_error, too_large_answer, unreachable_error
from quire.servers import Servers
from quire.session import MAX_UNREADABLE, Placed, Session
from quire.session_entry import Entry
from quire.v1 import cluster_pb2_grpc, inference_pb2_grpc
from quire.v1 import inference_pb2 as pb

INFERENCE_SERVICE = "quire.v1.Inference"
JOURNAL_SERVICE = "quire.v1.Journal"  # by health alone: NOT_SERVING while the journal's store does not answer
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 0.5

Response = TypeVar("Response")


class Connection:
    """Channel, stubs and session of one client. Belongs to the event loop it was made in."""

    def __init__(
        self,
        address: str,
        options: ClientOptions,
        credentials: Credentials,
        shard: int,
        move: Callable[[Entry, ShardsChangedError], Placed],
        on_later_leader: Callable[[], None] | None = None,
    ) -> None:
        """Take addresses, and what to do with what happens at them.

        Args:
            address: of servers.
            options: of the client.
            credentials: key and certificates.
            shard: number of the shard whose leader is called.
            move: of its session, for what it does not take.
            on_later_leader: called once another server is found to lead it, while streams to the last one are open.
        """
        self._address = address
        self._options = options
        self._servers = Servers(address, credentials, shard)
        channel = self._servers.channel
        self.inference: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        self.cluster: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
        self.session = Session(self._servers, address, options, move, on_later_leader)
        self._abandoned = AbandonedCalls()
        self._is_closed = False

    @property
    def server(self) -> str:
        """Address of the server that is called now."""
        return self._servers.current

    async def close(self) -> None:
        """Ends the session, then the channels. Calls that wait for their answer raise RuntimeError."""
        self._is_closed = True
        self._abandoned.close()
        await self.session.close()
        await self._servers.close()

    async def call(
        self,
        method: Callable[..., Awaitable[Response]],
        request: Message,
        timeout_s: float | None = None,
        *,
        is_short: bool = True,
    ) -> Response:
        """Makes one idempotent call; retries it where it breaks, is refused for now or no server leads yet.

        Args:
            method: method of a stub.
            request: the method's argument.
            timeout_s: longest wait for each answer, and for a refusal to pass; None: `call_timeout_s` of the client.
            is_short: what was sent goes on without its caller, if that is cancelled.

        Raises InvalidRequestError for a request that no message holds, FailedPreconditionError for such an answer.
        """
        num_bytes = request.ByteSize()
        if num_bytes > PUBLIC_MESSAGE_BYTES:
            raise InvalidRequestError(f"the call has {num_bytes:,} bytes: give at most {PUBLIC_MESSAGE_BYTES:,}")
        wait_s = self._options.call_timeout_s if timeout_s is None else timeout_s
        with self._closing_told():
            return await self._call(method, request, wait_s, is_short)

    async def _call(
        self, method: Callable[..., Awaitable[Response]], request: Message, timeout_s: float, is_short: bool
    ) -> Response:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        backoff_s = FIRST_BACKOFF_S
        num_refusals = num_unreadable = 0
        while True:
            await self._servers.find_reachable()
            channel = self._servers.current_channel
            try:
                answer = method(request, timeout=timeout_s)
                return readable(await (self._abandoned.wait(answer) if is_short else answer))
            except asyncio.CancelledError:
                if is_cancelled() or self._is_closed:
                    raise
                continue  # it has waited longer than a connection that was given up meanwhile is kept
            except DataLossError as damaged:
                num_unreadable += 1
                delay_s = backoff_s
                self._servers.renew_connection(channel)
                if num_unreadable > MAX_UNREADABLE or loop.time() + delay_s > started_s + timeout_s:
                    raise self._damaged(damaged) from damaged
            except grpc.aio.AioRpcError as rpc_error:
                if (too_large := too_large_answer(self._address, rpc_error)) is not None:
                    raise too_large from rpc_error
                if server_error_of(rpc_error) is None:
                    self._servers.renew_connection(channel)
                error = self._error_of(rpc_error)
                was_reached = bool(rpc_error.trailing_metadata())
                leader_is_known = self._servers.record_failure(error, was_reached=was_reached)
                delay_s = FIRST_BACKOFF_S if leader_is_known else backoff_s
                refused = was_reached and isinstance(error, RetryableError)
                if refused and isinstance(error, RetryableError):
                    num_refusals += 1
                    delay_s = error.retry_after_s
                    if isinstance(error, UnavailableError):
                        self.session.look_for_later_leader()
                late = loop.time() + delay_s - started_s > self._options.connect_timeout_s
                is_hopeless = num_refusals > self._options.retries or loop.time() + delay_s > started_s + timeout_s
                give_up = is_hopeless if refused else late
                if isinstance(error, NotLeaderError) and give_up:
                    raise no_leader_error(self._address, error) from rpc_error
                if give_up or not isinstance(error, RetryableError | NotLeaderError):
                    raise error from rpc_error
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            await asyncio.sleep(delay_s)

    async def find_reachable(self) -> None:
        """Makes a reachable server current, if there are several."""
        await self._servers.find_reachable()

    def renew(self) -> None:
        """Opens a new connection to the current server for later calls: on this one they get no answer."""
        self._servers.renew_connection(self._servers.current_channel)

    async def look_for_leader(self) -> None:
        """Asks the current server for anything that only a leader answers, and follows its hint to the leader."""
        try:
            with self._closing_told():
                await self.inference.GetStats(pb.GetStatsRequest(), timeout=self._options.connect_timeout_s)
        except grpc.aio.AioRpcError as rpc_error:
            self._servers.record_failure(self._error_of(rpc_error), was_reached=bool(rpc_error.trailing_metadata()))

    async def health(self, service: str) -> Health:
        """Asks every server once; one that serves is enough.

        Raises UnavailableError if nothing answers, NotFoundError on an unknown name.
        """
        with self._closing_told():
            return await self._health(service)

    async def _health(self, service: str) -> Health:
        await self._servers.find_reachable()
        asked = (self._health_at(channel, service) for channel in self._servers.all_channels)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for wanted in (Health.SERVING, Health.NOT_SERVING, Health.UNKNOWN):
            if wanted in answers:
                return wanted
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        raise next((error for error in errors if isinstance(error, NotFoundError)), errors[0])

    async def _health_at(self, channel: grpc.aio.Channel, service: str) -> Health:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = readable(await stub.Check(request, timeout=self._options.connect_timeout_s))
        except DataLossError as damaged:
            self._servers.renew_connection(channel)
            raise self._damaged(damaged) from damaged
        except grpc.aio.AioRpcError as rpc_error:
            error = self._error_of(rpc_error)
            if isinstance(error, NotFoundError):
                error = NotFoundError(f"the server at {self._address} has no service {service!r}")
            elif server_error_of(rpc_error) is None:
                self._servers.renew_connection(channel)
            raise error from rpc_error
        names = {1: Health.SERVING, 2: Health.NOT_SERVING}
        return names.get(answer.status, Health.UNKNOWN)

    def _damaged(self, error: DataLossError) -> UnavailableError:
        return UnavailableError(f"no readable answer from the server at {self._address}: {error.message}")

    @contextmanager
    def _closing_told(self) -> Iterator[None]:
        """Raises RuntimeError where a channel was closed under a call: gRPC cancels it, though nobody has."""
        try:
            yield
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if is_cancelled() or not self._is_closed:
                raise
            raise RuntimeError(CLOSED) from None

    def _error_of(self, rpc_error: grpc.aio.AioRpcError) -> QuireError:
        error = said_error(self._address, rpc_error)
        if isinstance(error, UnavailableError) and not rpc_error.trailing_metadata():
            return unreachable_error(self._address, rpc_error)
        if rpc_error.code() is grpc.StatusCode.INTERNAL and server_error_of(rpc_error) is None:
            return UnavailableError(f"a call to the server at {self._address} breaks on its way: {error.message}")
        if isinstance(error, RequestExpiredError):
            return UnavailableError(f"the server at {self._address} did not answer in time")
        return error
