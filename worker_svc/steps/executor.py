"""Executes steps in order and answers them in order: fencing, failures and times around the runner.

Knows neither the content of a step, which is for the runner, nor its caller, which is for the servicer.
"""

import asyncio
import time
from collections.abc import Callable

from common.native_faults import CONTROL_FLOW
from common.step import Step, StepResult, StepStatus
from worker_svc.steps.completion import LaunchedStep, StepCompletion, failed_result
from worker_svc.steps.step_fence import StepFence
from worker_svc.steps.step_limits import InvalidStepError, MissingBlocksError
from worker_svc.steps.step_progress import StepProgress
from worker_svc.steps.step_runner import AnnouncingRunner, StepRunner
from worker_svc.steps.task_thread import TaskThread

MAX_QUEUED_STEPS = 8  # a scheduler has two in flight


class StepExecutor:
    """Runs one runner on one thread. A step that raises is answered with FAILED; the worker goes on.

    A pending step is waited for on another thread, and the next one is launched meanwhile. If it fails, the steps that
    were already launched behind it are answered with NEED_SNAPSHOT.
    """

    def __init__(
        self,
        runner: StepRunner,
        thread: TaskThread,
        on_device_lost: Callable[[], None],
        on_answer: Callable[[StepResult], None] = lambda result: None,
    ) -> None:
        """Take a runner.

        Args:
            runner: executes the steps.
            thread: the thread that it is called on.
            on_device_lost: called, on any thread, when the runner's device is lost.
            on_answer: called with each answer, on the loop.
        """
        self.progress = StepProgress()
        self._runner = runner
        self._thread = thread
        self._on_answer = on_answer
        self._on_device_lost = on_device_lost
        # An answer wakes the loop, which takes the interpreter's lock from a step that is being prepared. A runner that
        # announces when it no longer needs the lock has the answer of the step before sent then.
        holds_answers = isinstance(runner, AnnouncingRunner)
        self._completion = StepCompletion(on_device_lost, holds_answers=holds_answers)
        if isinstance(runner, AnnouncingRunner):
            runner.before_pass = thread.when_idle = self._completion.release_held
        self._room = asyncio.Semaphore(MAX_QUEUED_STEPS)
        # For the execution thread alone:
        self._fence = StepFence()
        self._last: LaunchedStep | None = None  # the last step that was executed

    async def submit(
        self, step: Step | StepResult, deliver: Callable[[StepResult], None], *, may_repeat: bool = False
    ) -> None:
        """Queues a step, waiting while the queue is full; `deliver` gets the answer, on the loop.

        A StepResult in place of a step is delivered in its turn. With `may_repeat`, the last executed step is not
        executed again but answered with its stored answer.
        """
        received_ns = time.perf_counter_ns()
        await self._room.acquire()

        def delivered(result: StepResult) -> None:
            self._room.release()
            result.total_ns = time.perf_counter_ns() - received_ns
            self._on_answer(result)
            deliver(result)

        self._thread.submit(lambda: self._execute(step, received_ns, may_repeat, delivered))

    async def answer(self, step: Step | StepResult) -> StepResult:
        """Executes one step, unless it repeats the last one, and waits for the answer."""
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

        def deliver(result: StepResult) -> None:
            if not future.done():  # the waiting call may have been cancelled
                future.set_result(result)

        await self.submit(step, deliver, may_repeat=True)
        return await future

    def follow_epoch(self, epoch: int) -> None:
        """Executes no more steps of an earlier epoch, except those already queued.

        The epoch may be lower than the highest seen, if no scheduler leads with that any more.
        """

        def follow() -> None:
            self._fence.follow_epoch(epoch)
            self.progress.follow_epoch(epoch)

        self._thread.submit(follow)

    async def drain(self) -> None:
        """Waits until every step queued so far is answered."""
        await self._thread.call(self._completion.release_held)
        await self._completion.drain()

    async def close(self) -> None:
        """Answers every step queued so far, and accepts no more."""
        await self.drain()
        await self._completion.close()

    def _execute(
        self, step: Step | StepResult, received_ns: int, may_repeat: bool, deliver: Callable[[StepResult], None]
    ) -> None:
        if self._completion.wait_for_room():
            self._fence.require_snapshot()
        self._completion.add_answer(self._answer(step, received_ns, may_repeat), deliver)

    def _answer(self, step: Step | StepResult, received_ns: int, may_repeat: bool) -> StepResult | LaunchedStep:
        if isinstance(step, StepResult):
            return step
        if may_repeat and self._last is not None and self._is_repetition(step, self._last):
            return self._last
        began_ns = time.perf_counter_ns()
        answer = self._fence.refusal(step) or self._launch(step, received_ns, began_ns)
        result = answer if isinstance(answer, StepResult) else answer.result
        if result is not None:
            result.queue_ns = began_ns - received_ns
            result.exec_ns = time.perf_counter_ns() - began_ns
        return answer

    def _launch(self, step: Step, received_ns: int, began_ns: int) -> StepResult | LaunchedStep:
        launched = LaunchedStep(step, received_ns, began_ns)
        self.progress.begin_step(step)
        try:
            answer = self._runner.launch(step)
        except (InvalidStepError, MissingBlocksError) as error:
            status = StepStatus.INVALID if isinstance(error, InvalidStepError) else StepStatus.NEED_SNAPSHOT
            return StepResult(epoch=step.epoch, step_id=step.step_id, status=status, error=str(error))
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # native libraries raise others than Exception
            launched.result = failed_result(step, error, self._on_device_lost)
            self._fence.require_snapshot()
        else:
            if isinstance(answer, StepResult):
                launched.result = answer
            else:
                launched.pending = answer
            self._fence.record_executed(step)
        self._last = launched
        return launched

    def _is_repetition(self, step: Step, last: LaunchedStep) -> bool:
        if last.result is not None and last.result.status is StepStatus.NEED_SNAPSHOT:
            return False  # a step before it failed, and it may be executed now
        return last.step == step and step.epoch == self._fence.epoch
