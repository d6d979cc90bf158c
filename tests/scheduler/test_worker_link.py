"""Link to a worker that has gone: why it broke, in words that a log and the end of a request can have."""

import asyncio

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from common.step import Step
from scheduler_svc.workers.worker_link import WorkerLink


class EndedCall:
    """A stream of steps that ends under a write, as gRPC's does whose connection has gone."""

    def __init__(self, error: Exception, code: grpc.StatusCode) -> None:
        self._error = error
        self._code = code

    async def write(self, message: object) -> None:
        raise self._error

    async def read(self) -> None:
        await asyncio.Event().wait()

    async def code(self) -> grpc.StatusCode:
        return self._code

    async def details(self) -> str:
        return "Internal error from Core"

    def cancel(self) -> bool:
        return False


@pytest.mark.parametrize("has_finished", [False, True])
@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS])
async def test_a_step_that_cannot_be_sent_says_how_the_call_ended_in_one_line(
    monkeypatch: pytest.MonkeyPatch, has_finished: bool, code: grpc.StatusCode
) -> None:
    said = 'Failed "execute_batch": (<grpc._cython.cygrpc.SendMessageOperation object at 0x7fdf721dca30>,)'
    error = AioRpcError(code, Metadata(), Metadata(), "Internal error from Core", said)
    finished = asyncio.InvalidStateError("RPC already finished.")
    call = EndedCall(finished if has_finished else error, code)
    monkeypatch.setattr("scheduler_svc.workers.worker_link.open_step_stream", lambda channel, key: call)
    link = WorkerLink("127.0.0.1:1")
    link.open()
    await link.send(Step(step_id=1, epoch=1))
    await link.close()
    assert link.broken == f"a step could not be sent: {code.name}: Internal error from Core"
    assert link.is_damaged == (code is grpc.StatusCode.DATA_LOSS)
