"""One scheduler's stream: passes steps to the executor in the order of arrival, and answers in the same order.

Reading and answering run side by side, so that the next step is here before the last is answered. Knows nothing of
other streams: the servicer ends a stream that was replaced.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from common.native_faults import CONTROL_FLOW
from common.step import Step, StepResult, StepStatus
from common.step_codec import result_to_pb, step_from_pb
from quire.errors import QuireError
from quire.v1 import worker_pb2 as pb
from worker_svc.steps.executor import StepExecutor

_MAX_UNANSWERED = 8  # steps that were read and not answered; a client that reads no answers is read no further


class StreamReplacedError(QuireError):
    """A newer stream has taken this one's place."""

    code = grpc.StatusCode.ABORTED
    reason = "STREAM_REPLACED"


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Reason of a stream's end: an error for the client, or None after the last step."""

    error: BaseException | None = None
    at_once: bool = False  # drop the answers that are still to come


class SchedulerStream:
    """Reader and answers of one stream. `on_step` is called with each step's epoch before the step is executed."""

    def __init__(self, executor: StepExecutor, on_step: Callable[["SchedulerStream", int], None]) -> None:
        self.epoch = 0  # the highest of its steps
        self._executor = executor
        self._on_step = on_step
        self._outbox: asyncio.Queue[StepResult | StreamEnd] = asyncio.Queue()
        self._window = asyncio.Semaphore(_MAX_UNANSWERED)
        self._unanswered = 0
        self._reader: asyncio.Task[None] | None = None

    async def answers(self, requests: AsyncIterator[pb.StepRequest]) -> AsyncIterator[pb.StepResponse]:
        """Reads `requests` and yields the answers. Raises the error that ends the stream."""
        self._reader = asyncio.create_task(self._read(requests))
        try:
            end: StreamEnd | None = None
            while end is None or (self._unanswered and not end.at_once):
                item = await self._outbox.get()
                if isinstance(item, StreamEnd):
                    end = item
                    continue
                self._unanswered -= 1
                yield result_to_pb(item)
                self._window.release()
            if end.error is not None:
                raise end.error
        finally:
            self._reader.cancel()

    def end(self, end: StreamEnd) -> None:
        """Stops reading, and ends the answers."""
        if self._reader is not None:
            self._reader.cancel()
        self._outbox.put_nowait(end)

    async def _read(self, requests: AsyncIterator[pb.StepRequest]) -> None:
        try:
            async for request in requests:
                await self._window.acquire()
                step = decode(request)
                self.epoch = max(self.epoch, step.epoch)
                self._on_step(self, step.epoch)
                await self._executor.submit(step, self._outbox.put_nowait)
                self._unanswered += 1  # only now: the wait for room may be cancelled
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # caused by the client's bytes: ends this stream alone
            self._outbox.put_nowait(StreamEnd(error))
        else:
            self._outbox.put_nowait(StreamEnd())


def decode(request: pb.StepRequest) -> Step | StepResult:
    """The step, or an INVALID answer if the message cannot be decoded."""
    try:
        return step_from_pb(request)
    except ValueError as error:
        return StepResult(epoch=request.epoch, step_id=request.step_id, status=StepStatus.INVALID, error=str(error))
