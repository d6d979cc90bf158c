"""Refusals of calls, as a client of the wire gets them."""

from collections.abc import Awaitable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status


async def refusal_of(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    """The error with which a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def code_of(call: Awaitable[object]) -> grpc.StatusCode:
    """The code with which a call is refused."""
    return (await refusal_of(call)).code()


def retry_delay_s(error: grpc.RpcError) -> float | None:
    """Delay after which the client may retry."""
    info = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    found = status is not None and any(detail.Unpack(info) for detail in status.details)
    return float(info.retry_delay.ToTimedelta().total_seconds()) if found else None
