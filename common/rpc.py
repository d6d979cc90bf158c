"""gRPC plumbing of every service: options of a server, and the interceptor at its edge.

Knows no service. What the options are for was measured: see docs/wire.md.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from common.bounds_check import check_of_method, undecodable_request
from common.native_faults import CONTROL_FLOW
from common.sealed_methods import checking_deserializer, checksum_tags_of_method
from quire.checksum import sealed
from quire.errors import QuireError, SlowReaderError, to_status
from quire.rpc import Option

CLUSTER_MESSAGE_BYTES = 128 * 1024 * 1024  # tokenizer files fit

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """Keepalive of a server: the silence after which it pings a client, and the time that the client has to answer."""

    time_s: float
    timeout_s: float


QUICK_KEEPALIVE = Keepalive(time_s=0.8, timeout_s=1.0)  # between our services, whose event loops are never blocked


def server_options(max_message_bytes: int, keepalive: Keepalive = QUICK_KEEPALIVE) -> list[Option]:
    """Options of a server: the other side of `channel_options`; a port in use is an error, never shared.

    A client may ping twice a second, also without a call, whatever the server's own `keepalive` is.
    """
    time_ms, timeout_ms = round(keepalive.time_s * 1000), round(keepalive.timeout_s * 1000)
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.so_reuseport", 0),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message cannot unpack to a large one
    ]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Placeholder for a request whose bytes are not the message that the method takes, with the reason."""

    error: QuireError


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor between the wire and the handlers: handlers just raise.

    Our exceptions become statuses with details. Any other exception, a BaseException of a native library included, is
    logged and becomes INTERNAL without details. Undecodable bytes and requests beyond their bounds become
    INVALID_ARGUMENT, or the exception of their deserialiser, before a handler sees them. Requests that reach a handler
    have no unknown fields. Within a stream of requests the refusal is raised to the handler that reads it, which may go
    on: see `CheckedRequests`. A stream whose reader takes nothing for `slow_reader_timeout_s` is cut; None: never.
    """

    def __init__(self, slow_reader_timeout_s: float | None = None) -> None:
        self._slow_reader_timeout_s = slow_reader_timeout_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers UNIMPLEMENTED
            return None
        return _remake(handler, handler_call_details.method, self._slow_reader_timeout_s)


def _remake(handler: Any, method: str, slow_reader_timeout_s: float | None) -> "grpc.RpcMethodHandler[Any, Any]":
    deserialize, serialize = handler.request_deserializer, handler.response_serializer
    request_tag, response_tag = checksum_tags_of_method(method)
    check = check_of_method(method)
    if deserialize is not None and check is not None:
        deserialize = partial(check.parse, deserialize=deserialize)
    if deserialize is not None and request_tag is not None:
        deserialize = checking_deserializer(deserialize, request_tag)
    if serialize is not None and response_tag is not None:
        serialize = partial(sealed, tag=response_tag)
    make: Callable[..., grpc.RpcMethodHandler[Any, Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(handler.request_streaming, handler.response_streaming)]
    behaviour = _wrap(handler, method, slow_reader_timeout_s)
    return make(behaviour, _careful(deserialize), serialize)


def _careful(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:  # the handler wants bytes, which it does not look into
        return None

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Undecodable(undecodable_request())
        except QuireError as error:
            error.__traceback__ = None  # its frames hold the bytes
            return Undecodable(error)

    return decode


def behaviour_of(handler: Any) -> Behaviour:
    """The function that answers a method's calls, of whichever of the four kinds the method is."""
    found: Behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return found


def _wrap(handler: Any, method: str, slow_reader_timeout_s: float | None) -> Callable[..., Any]:
    inner = behaviour_of(handler)
    request_streaming, response_streaming = handler.request_streaming, handler.response_streaming

    async def behaviour(request: Any, context: Context) -> Any:
        try:
            answer = inner(_checked(request, request_streaming), context)
            if response_streaming and not inspect.isawaitable(answer):
                return await _write_all(answer, context, slow_reader_timeout_s)
            return await answer  # with a stream of responses, of a handler that writes to the context by itself
        except CONTROL_FLOW:
            raise
        except grpc.aio.AbortError as abort:  # the handler's own, which has been sent
            _forget_frames(abort)
        except BaseException as error:  # of a native library, too: whatever a call raises is its answer
            await _abort(context, method, error)

    return behaviour


async def _write_all(
    responses: AsyncGenerator[Any, None], context: Context, slow_reader_timeout_s: float | None
) -> None:
    """Sends a handler's responses, and closes the handler when the client is gone or reads nothing for too long.

    Left to gRPC, a handler whose response cannot be written stays suspended at its `yield` until it is collected.
    One response at most waits for the client, besides what the connection's windows hold.
    """
    async with aclosing(responses):
        has_begun = slow_reader_timeout_s is None
        async for response in responses:
            try:
                async with asyncio.timeout(slow_reader_timeout_s):
                    if not has_begun:  # gRPC can end no call whose headers are on their way together with a message
                        await context.send_initial_metadata(())
                        has_begun = True
                    await context.write(response)
            except TimeoutError:
                waited = f"the client read nothing for {slow_reader_timeout_s:g} s"
                raise SlowReaderError(f"{waited}; attach again from the last position that you have") from None
            except Exception as error:  # gRPC has no public name for it
                raise asyncio.CancelledError from error


async def _abort(context: Context, method: str, error: BaseException) -> None:
    if not isinstance(error, QuireError):
        log.error("call of %s failed", method, exc_info=error)
        error = QuireError("the server failed on an internal error; its log has the reason")
    await abort_call(context, error)


async def abort_call(context: Context, error: QuireError) -> None:
    """End a call with the status of `error`; the handler then returns, whatever it returns.

    gRPC keeps the abort with the call's state and raises it again behind the handler. Raised through the handler, the
    abort would hold its frames, and so the context and the state, in a cycle until the next full collection: with all
    that the call has received, which can be many megabytes.
    """
    try:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))
    except grpc.aio.AbortError as abort:
        _forget_frames(abort)


def _forget_frames(abort: grpc.aio.AbortError) -> None:
    abort.__traceback__ = abort.__context__ = abort.__cause__ = None


def _checked(request: Any, request_streaming: bool) -> Any:
    if request_streaming:
        return CheckedRequests(request)
    if isinstance(request, Undecodable):
        raise request.error
    return request


class CheckedRequests:
    """The requests of a stream. The refusal of one is raised in its place; the stream goes on after it."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._given = requests
        self._requests: AsyncIterator[Any] | None = None  # gRPC's own generator, which is not made unless it is read

    def __aiter__(self) -> "CheckedRequests":
        return self

    async def __anext__(self) -> Any:
        if self._requests is None:
            self._requests = aiter(self._given)
        request = await anext(self._requests)
        if isinstance(request, Undecodable):
            raise request.error
        return request
