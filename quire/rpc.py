"""gRPC plumbing of callers: options of a channel, and the exception for a failed call.

Knows no service. docs/wire.md has the measured reasons for the options.
"""

import asyncio
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from quire.errors import DataLossError, QuireError, UnavailableError, from_status, to_status

PUBLIC_MESSAGE_BYTES = 16 * 1024 * 1024  # a prompt of the longest context fits several times
CONNECT_TIMEOUT_MS = (
    2000  # of one attempt, to the server's first frame: a far server with TLS, or a busy one, takes long
)
SHARD_KEY = "quire-shard"  # metadata: number of the shard that a call is for

Option = tuple[str, int]
Answer = TypeVar("Answer")


def channel_options(max_message_bytes: int) -> list[Option]:
    """Options of a client channel: a frozen peer is noticed within 2 s, a returning one dialled within 0.5 s."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 800),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.http2.ping_timeout_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]


def is_cancelled() -> bool:
    """True if this task was cancelled; False behind CancelledError: gRPC has closed the channel under the call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def readable(answer: Answer | None) -> Answer:
    """The answer to a unary call. Raises DataLossError if gRPC could not read it, and gave None without any error."""
    if answer is None:
        raise DataLossError("the answer was damaged on its way")
    return answer


def error_of(rpc_error: grpc.RpcError) -> QuireError:
    """The exception for a failed call, with the details that the server sent.

    CANCELLED without details means that the server ended during the call; a caller that cancels gets no status.
    """
    said = server_error_of(rpc_error)
    if said is not None:
        return said
    call: Any = rpc_error
    if call.code() is grpc.StatusCode.CANCELLED:
        return UnavailableError(call.details() or "the server ended during the call")
    bare = type(to_status(QuireError("")))(code=call.code().value[0], message=call.details() or call.code().name)
    return from_status(bare)


def server_error_of(rpc_error: grpc.RpcError) -> QuireError | None:
    """The exception that a Quire server sent; None if the status is gRPC's own, or damaged."""
    call: Any = rpc_error
    try:
        status = rpc_status.from_call(call) if call.trailing_metadata() else None
    except (DecodeError, ValueError):  # unreadable details, or those of another status: damaged in transit
        return None
    return from_status(status) if status is not None else None
