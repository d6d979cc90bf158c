"""Steps in, answers out, in order: fencing, failures and times around whatever executes a step.

What a step does is the runner's business; where it came from is the servicer's.
"""

import asyncio
import time
from collections.abc import Callable

from common.native_faults import CONTROL_FLOW
from common.step import Step, StepResult, StepStatus
from worker_svc.steps.completion import Completion, LaunchedStep, failure
from worker_svc.steps.step_fence import StepFence
from worker_svc.steps.step_limits import InvalidStepError
from worker_svc.steps.step_runner import AnnouncingRunner, StepRunner
from worker_svc.steps.task_thread import TaskThread

MAX_QUEUED_STEPS = 8  # a scheduler has two on the way


class StepExecutor:
    """Feeds one runner on one thread. A step that raises is answered with FAILED and kills nothing.

    A step that is launched and not done is waited for elsewhere, and the next one is launched meanwhile. If it fails,
    those launched behind it before that was known are answered with NEED_SNAPSHOT.
    """

    def __init__(self, runner: StepRunner, thread: TaskThread, abandon: Callable[[], None]) -> None:
        """`abandon` is called, on any thread, when the runner's device is lost."""
        self._runner = runner
        self._thread = thread
        self._abandon = abandon
        # An answer wakes the loop, which takes the interpreter's lock from a step that is being prepared: where the
        # runner says when it needs the lock no more, the answer of the step before goes out then.
        holds = isinstance(runner, AnnouncingRunner)
        self._completion = Completion(abandon, holds=holds)
        if isinstance(runner, AnnouncingRunner):
            runner.before_pass = thread.when_idle = self._completion.release
        self._room = asyncio.Semaphore(MAX_QUEUED_STEPS)
        # Of the execution thread:
        self._fence = StepFence()
        self._last: LaunchedStep | None = None  # the last step that was executed

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

        self._thread.submit(lambda: self._take(step, received_ns, may_repeat, delivered))

    async def answer(self, step: Step | StepResult) -> StepResult:
        """Executes one step, unless it is the last one sent again, and waits for the answer."""
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

        def deliver(result: StepResult) -> None:
            if not future.done():  # its waiter may have gone
                future.set_result(result)

        await self.submit(step, deliver, may_repeat=True)
        return await future

    def follow(self, epoch: int) -> None:
        """Executes no step of an earlier epoch any more, but for what is queued already.

        The epoch may be lower than the highest seen, if nobody leads at that any more.
        """
        self._thread.submit(lambda: self._fence.follow(epoch))

    async def drain(self) -> None:
        """Waits until everything queued so far is answered."""
        await self._thread.call(self._completion.release)
        await self._completion.drain()

    async def close(self) -> None:
        """Answers everything queued so far, and takes nothing more."""
        await self.drain()
        await self._completion.close()

    def _take(
        self, step: Step | StepResult, received_ns: int, may_repeat: bool, deliver: Callable[[StepResult], None]
    ) -> None:
        if self._completion.wait_for_room():
            self._fence.failed()
        self._completion.add(self._answer(step, received_ns, may_repeat), deliver)

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
        try:
            answer = self._runner.launch(step)
        except InvalidStepError as error:
            return StepResult(epoch=step.epoch, step_id=step.step_id, status=StepStatus.INVALID, error=str(error))
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # of a native library, too
            launched.result = failure(step, error, self._abandon)
            self._fence.failed()
        else:
            if isinstance(answer, StepResult):
                launched.result = answer
            else:
                launched.pending = answer
            self._fence.executed(step)
        self._last = launched
        return launched

    def _is_repetition(self, step: Step, last: LaunchedStep) -> bool:
        if last.result is not None and last.result.status is StepStatus.NEED_SNAPSHOT:
            return False  # a step before it failed, and it may be executed now
        return last.step == step and step.epoch == self._fence.epoch
