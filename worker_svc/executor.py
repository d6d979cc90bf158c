"""Steps in, answers out, in order: fencing, failures and times around whatever executes a step.

What a step does is the runner's business; where it came from is the servicer's.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from common.step import Step, StepResult, StepStatus
from worker_svc.execution_thread import ExecutionThread
from worker_svc.step_fence import StepFence
from worker_svc.step_limits import InvalidStepError

MAX_QUEUED_STEPS = 8  # a scheduler has two on the way

log = structlog.get_logger()


class StepRunner(Protocol):
    """What executes a step: a model, or a simulation of one."""

    def execute(self, step: Step) -> StepResult:
        """Raises InvalidStepError if nothing of the step was done, anything else if it broke off."""


class StepExecutor:
    """Feeds one runner on one thread. A step that raises is answered with FAILED and kills nothing."""

    def __init__(self, runner: StepRunner, thread: ExecutionThread) -> None:
        self._runner = runner
        self._thread = thread
        self._room = asyncio.Semaphore(MAX_QUEUED_STEPS)
        # Of the execution thread:
        self._fence = StepFence()
        self._last: tuple[Step, StepResult] | None = None  # the last step that was executed

    async def submit(
        self, step: Step | StepResult, deliver: Callable[[StepResult], None], *, may_repeat: bool = False
    ) -> None:
        """Queues a step, waiting while the queue is full; `deliver` gets the answer, on the loop.

        A StepResult given in place of a step is an answer already, which just waits for its turn. With
        `may_repeat`, the last step executed is not executed again but answered with the answer it got.
        """
        received_ns = time.perf_counter_ns()
        await self._room.acquire()

        def delivered(result: StepResult) -> None:
            self._room.release()
            result.total_ns = time.perf_counter_ns() - received_ns
            deliver(result)

        self._thread.submit(lambda: self._timed(step, received_ns, may_repeat), delivered)

    async def answer(self, step: Step | StepResult) -> StepResult:
        """Executes one step, unless it is the last one sent again, and waits for the answer."""
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

        def deliver(result: StepResult) -> None:
            if not future.done():  # its waiter may have gone
                future.set_result(result)

        await self.submit(step, deliver, may_repeat=True)
        return await future

    async def drain(self) -> None:
        """Waits until everything queued so far is answered."""
        await self._thread.call(lambda: None)

    def _timed(self, step: Step | StepResult, received_ns: int, may_repeat: bool) -> StepResult:
        began_ns = time.perf_counter_ns()
        if isinstance(step, StepResult):
            return step
        if may_repeat and self._last is not None and self._last[0] == step and step.epoch == self._fence.epoch:
            return self._last[1]
        result = self._fence.refusal(step) or self._execute(step)
        result.queue_ns = began_ns - received_ns
        result.exec_ns = time.perf_counter_ns() - began_ns
        return result

    def _execute(self, step: Step) -> StepResult:
        try:
            result = self._runner.execute(step)
        except InvalidStepError as error:
            return _unsuccessful(step, StepStatus.INVALID, str(error))
        except Exception as error:
            log.exception("step failed", epoch=step.epoch, step_id=step.step_id)
            self._fence.failed()
            result = _unsuccessful(step, StepStatus.FAILED, f"{type(error).__name__}: {error}")
        else:
            self._fence.executed(step)
        self._last = (step, result)
        return result


def _unsuccessful(step: Step, status: StepStatus, error: str) -> StepResult:
    return StepResult(epoch=step.epoch, step_id=step.step_id, status=status, error=error)
