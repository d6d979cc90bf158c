"""The edge of a server and the way back: exceptions to statuses, statuses to exceptions, whatever lies between."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from annotated_types import Le

from common.limits import limit_options
from common.peer_limits import EdgeLimits
from common.rpc import Keepalive, server_options
from common.serving import GrpcServer
from quire.errors import (
    NotFoundError,
    OverloadedError,
    QuireError,
    RequestFailedError,
    RequestLostError,
    UnavailableError,
    from_status,
    to_status,
)
from quire.listening import ListenError
from quire.rpc import PUBLIC_MESSAGE_BYTES, error_of
from quire.scheduler_settings import SchedulerSettings
from tests.hostile.raw_connection import RawConnection, message
from tests.patience import patient

ECHO = "test.Echo"
CALM = Keepalive(time_s=3600, timeout_s=3600)  # for peers that answer no ping


def plain(data: bytes) -> bytes:
    return data


async def single(request: bytes, context: Any) -> bytes:
    match request:
        case b"overloaded":
            raise OverloadedError("too much", 2.5)
        case b"fault":
            raise KeyError("a secret of ours")
        case b"abort":
            await abort_by_itself(request, context)
        case b"other details":
            status = to_status(UnavailableError("details of another status")).SerializeToString()
            context.set_trailing_metadata([("grpc-status-details-bin", status)])
            await context.abort(grpc.StatusCode.NOT_FOUND, "changed on the way")
        case b"no details":
            context.set_trailing_metadata([("grpc-status-details-bin", b"\xff\xff\xff")])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "garbled on the way")
    return request


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request
    if request == b"fault":
        raise KeyError("a secret of ours")


async def serve(server: GrpcServer, handlers: "dict[str, grpc.RpcMethodHandler[Any, Any]]") -> str:
    """Start a server with these handlers of ECHO. Returns its address."""
    server.grpc.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(ECHO, handlers)])
    address = server.bind("127.0.0.1:0")
    await server.start()
    return address


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer([ECHO], PUBLIC_MESSAGE_BYTES)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Single": grpc.unary_unary_rpc_method_handler(single, plain, plain),
        "Stream": grpc.unary_stream_rpc_method_handler(stream, plain, plain),
    }
    address = await serve(server, handlers)
    async with grpc.aio.insecure_channel(address) as made:
        yield made
    await server.stop(0)


async def refusal(channel: grpc.aio.Channel, request: bytes) -> QuireError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{ECHO}/Single", plain, plain)(request)
    return error_of(caught.value)


async def test_an_exception_arrives_as_itself(channel: grpc.aio.Channel) -> None:
    error = await refusal(channel, b"overloaded")
    assert isinstance(error, OverloadedError)
    assert (error.message, error.retry_after_s) == ("too much", 2.5)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [(QuireError, QuireError), (RequestFailedError, RequestFailedError), (RequestLostError, RequestFailedError)],
)
def test_the_reason_tells_a_fault_of_the_server_from_a_request_that_failed(
    sent: type[QuireError], kind: type[QuireError]
) -> None:
    status = to_status(sent("what happened"))
    error = from_status(status)
    assert type(error) is kind and error.message == "what happened"
    status.ClearField("details")
    assert type(from_status(status)) is QuireError  # gRPC's own, or a proxy's: of no request


async def test_a_fault_is_internal_and_tells_nothing_of_itself(channel: grpc.aio.Channel) -> None:
    error = await refusal(channel, b"fault")
    assert type(error) is QuireError and "secret" not in error.message  # no request was accepted that could fail
    call = channel.unary_stream(f"/{ECHO}/Stream", plain, plain)(b"fault")
    received = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for each in call:
            received.append(each)  # noqa: PERF401 - an exception ends it
    assert received == [b"fault"]
    assert caught.value.code() is grpc.StatusCode.INTERNAL and "secret" not in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("request_bytes", "kind", "message"),
    [
        (b"other details", NotFoundError, "changed on the way"),
        (b"no details", UnavailableError, "garbled on the way"),
    ],
)
async def test_details_that_do_not_fit_the_status_are_left_out(
    channel: grpc.aio.Channel, request_bytes: bytes, kind: type[QuireError], message: str
) -> None:
    error = await refusal(channel, request_bytes)
    assert type(error) is kind and error.message == message


async def test_what_a_handler_aborts_with_by_itself_stays_as_it_is(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{ECHO}/Single", plain, plain)(b"abort")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND and caught.value.details() == "not here"


async def test_a_method_that_does_not_exist_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{ECHO}/Nothing", plain, plain)(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "no such host:1", "127.0.0.1:", "nonsense"])
async def test_an_address_that_cannot_be_bound_is_refused_with_what_to_do(listen: str) -> None:
    server = GrpcServer([ECHO], PUBLIC_MESSAGE_BYTES)
    with pytest.raises(ListenError, match="choose another with --listen"):
        server.bind(listen)


class Large:
    """A request of which can be seen how long it is kept."""

    made: "list[weakref.ref[Large]]"

    def __init__(self, data: bytes) -> None:
        self.data = data
        Large.made.append(weakref.ref(self))


async def refuse(request: Large, context: Any) -> bytes:
    raise OverloadedError(f"too much: {len(request.data)}")


async def refuse_within(request: Large, context: Any) -> AsyncIterator[bytes]:
    yield b"first"
    await refuse(request, context)


def most_of(name: str) -> float:
    """The greatest value of a scheduler's setting."""
    (most,) = [each.le for each in SchedulerSettings.model_fields[name].metadata if isinstance(each, Le)]
    assert isinstance(most, int | float)
    return most


async def test_the_greatest_settings_of_a_server_are_within_what_grpc_takes() -> None:
    keepalive = Keepalive(time_s=most_of("keepalive_time_s"), timeout_s=most_of("keepalive_timeout_s"))
    limits = EdgeLimits(
        max_connections=int(most_of("max_connections")),
        max_calls_per_connection=int(most_of("max_calls_per_connection")),
    )
    options = [*server_options(PUBLIC_MESSAGE_BYTES, keepalive), *limit_options(limits)]
    await grpc.aio.server(options=options).stop(0)


async def test_a_refused_request_is_not_kept_until_the_next_collection() -> None:
    Large.made = []
    server = GrpcServer([ECHO], PUBLIC_MESSAGE_BYTES)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Single": grpc.unary_unary_rpc_method_handler(refuse, Large, plain),
        "Stream": grpc.unary_stream_rpc_method_handler(refuse_within, Large, plain),
    }
    address = await serve(server, handlers)
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/{ECHO}/Single", plain, plain)(b"large")
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in channel.unary_stream(f"/{ECHO}/Stream", plain, plain)(b"large"):
                    pass
        await server.stop(1)
        async with asyncio.timeout(patient(10)):
            while any(kept() is not None for kept in Large.made):  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
    assert len(Large.made) == 2


def num_call_states() -> int:
    return sum(type(each).__name__ == "RPCState" for each in gc.get_objects())


async def abort_by_itself(request: bytes, context: Any) -> bytes:
    await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
    raise AssertionError("not reached")


@pytest.mark.parametrize("limits", [None, EdgeLimits(body_timeout_s=0.2), EdgeLimits(max_call_rate=0.001)])
async def test_the_state_of_an_aborted_call_is_freed_at_once(limits: EdgeLimits | None) -> None:
    """With it goes what the call received and nobody read: gRPC keeps the abort in the state, and the abort frames."""
    Large.made = []
    server = GrpcServer([ECHO], PUBLIC_MESSAGE_BYTES, limits=limits)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Single": grpc.unary_unary_rpc_method_handler(refuse, Large, plain),
        "Within": grpc.unary_stream_rpc_method_handler(refuse_within, Large, plain),
        "Abort": grpc.unary_unary_rpc_method_handler(abort_by_itself, plain, plain),
    }
    address = await serve(server, handlers)
    await asyncio.sleep(0)
    gc.collect()
    gc.disable()
    num_waiting = num_call_states()
    try:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(patient(20)):
            for method in (*handlers, *handlers):
                call: Any = channel.stream_stream(f"/{ECHO}/{method}", plain, plain)()
                with pytest.raises(grpc.aio.AioRpcError):  # of either, where the call is refused for its rate
                    await call.write(b"anything")
                    async for _ in call:
                        pass
            unfinished: Any = channel.stream_stream(f"/{ECHO}/Single", plain, plain)()
            if limits is None:
                await unfinished.wait_for_connection()
            else:  # refused for its rate, or once its message is late: perhaps with its connection, and perhaps at once
                assert await unfinished.code() is not grpc.StatusCode.OK
            unfinished.cancel()
            while num_call_states() > num_waiting + 1:  # noqa: ASYNC110 - gRPC itself keeps the last one until the next
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
        await server.stop(1)


async def test_who_takes_nothing_of_a_stream_from_the_first_message_on_is_told_so_once_it_reads() -> None:
    has_ended = asyncio.Event()

    async def unread(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield request
        finally:
            has_ended.set()

    server = GrpcServer([ECHO], PUBLIC_MESSAGE_BYTES, slow_reader_timeout_s=0.1, keepalive=CALM)
    address = await serve(server, {"Stream": grpc.unary_stream_rpc_method_handler(unread, plain, plain)})
    with await asyncio.to_thread(RawConnection, address, window_bytes=0) as connection:
        call = connection.open_call(f"/{ECHO}/Stream")
        connection.send(call, message(b"anything"), ends=True)
        await asyncio.wait_for(has_ended.wait(), patient(20))
        connection.open_window(call)
        trailers = await asyncio.to_thread(connection.until_ended, call, patient(20))
    assert trailers["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])
    assert "read nothing for 0.1 s" in trailers["grpc-message"]
    await server.stop(0)


class Panic(BaseException):
    """Exception like that of a panic in a Rust library."""


async def panic(request: bytes, context: Any) -> bytes:
    raise Panic("a secret of ours")


async def panic_within(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request
    raise Panic("a secret of ours")


async def panic_reading(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for _ in requests:
        raise Panic("a secret of ours")
    yield b""


async def test_a_panic_of_a_native_library_is_the_answer_to_its_call_in_every_form() -> None:
    server = GrpcServer([ECHO], PUBLIC_MESSAGE_BYTES)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Single": grpc.unary_unary_rpc_method_handler(panic, plain, plain),
        "Stream": grpc.unary_stream_rpc_method_handler(panic_within, plain, plain),
        "Reading": grpc.stream_stream_rpc_method_handler(panic_reading, plain, plain),
    }
    address = await serve(server, handlers)
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(patient(20)):
        for method in handlers:
            call: Any = channel.stream_stream(f"/{ECHO}/{method}", plain, plain)()
            await call.write(b"anything")
            await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in (await call.details() or "")
    await server.stop(0)
