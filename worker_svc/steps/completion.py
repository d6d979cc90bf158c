"""Answers steps in order: waits for launched steps on a thread of its own, while others are launched.

An answer that is ready at once, with none before it, is not passed through that thread, and may be held back for a
moment. After a failure, steps that were launched behind it are answered with NEED_SNAPSHOT. Knows nothing of fencing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from common.native_faults import CONTROL_FLOW
from common.step import Step, StepResult, StepStatus
from worker_svc.steps.step_runner import DeviceLostError, PendingStep
from worker_svc.steps.task_thread import TaskThread

# One runs, one is queued on the device, one is being answered: a scheduler has two in flight. A runner keeps memory for
# as many.
MAX_LAUNCHED_STEPS = 3

log = structlog.get_logger()


@dataclass(slots=True)
class LaunchedStep:
    """A step that a runner has accepted, and its result once known. If it is added again, it is answered again."""

    step: Step
    received_ns: int
    began_ns: int
    pending: PendingStep | None = None
    result: StepResult | None = None  # always this or `pending`
    is_settled: bool = False  # the result is final


class StepCompletion:
    """Delivers answers in order. Only the execution thread may `add_answer`, `release_held` and `wait_for_room`."""

    def __init__(self, on_device_lost: Callable[[], None], *, holds_answers: bool = False) -> None:
        """`holds_answers`: an answer that is ready at once waits for `release_held`, or for one that is pending."""
        self._on_device_lost = on_device_lost
        self._holds_answers = holds_answers
        self._held: deque[tuple[Callable[[StepResult], None], StepResult]] = deque()
        self._thread = TaskThread("completion")
        self._changed = threading.Condition()
        # Changed under the condition. Only `add_answer` counts up: while its thread sees 0, the other thread is idle.
        self._num_unfinished = 0  # answers passed to the completion thread
        self._num_pending = 0  # of these, steps that the device has yet to execute
        # Owned by the thread that settles steps: the completion thread, or the execution thread while 0 are unfinished.
        self._is_broken = False  # a step failed, and the execution thread does not know it yet
        self._completed_ns = 0  # when the device had executed the last pending step

    def wait_for_room(self) -> bool:
        """Waits until another step may be launched.

        Returns True if a launched step has failed since the last call; then no launched step is left.
        """
        if self._num_unfinished == 0 and not self._is_broken:
            return False
        with self._changed:
            self._changed.wait_for(self._has_room)
            was_broken, self._is_broken = self._is_broken, False
            return was_broken

    def add_answer(self, answer: StepResult | LaunchedStep, deliver: Callable[[StepResult], None]) -> None:
        """Adds an answer, or the step that gives it; `deliver` gets it on the loop, in the order of these calls."""
        is_pending = isinstance(answer, LaunchedStep) and answer.result is None
        if self._num_unfinished == 0 and not is_pending:
            self._held.append((deliver, self._settle(answer)))
            if not self._holds_answers:
                self.release_held()
            return
        self.release_held()
        with self._changed:
            self._num_unfinished += 1
            self._num_pending += is_pending
        self._thread.submit(lambda: self._finish(answer, is_pending, deliver))

    def release_held(self) -> None:
        """Delivers the held answers."""
        while self._held:
            self._thread.deliver(*self._held.popleft())

    async def drain(self) -> None:
        """Waits until every added answer is delivered, except held ones."""
        await self._thread.call(lambda: None)

    async def close(self) -> None:
        """Ends the thread after the answers that were added."""
        await self._thread.close()

    def _has_room(self) -> bool:
        return self._num_unfinished == 0 if self._is_broken else self._num_pending < MAX_LAUNCHED_STEPS

    def _finish(
        self, answer: StepResult | LaunchedStep, was_pending: bool, deliver: Callable[[StepResult], None]
    ) -> None:
        self._thread.deliver(deliver, self._settle(answer))
        with self._changed:  # only after delivery: an answer that is ready at once must not overtake this one
            self._num_unfinished -= 1
            self._num_pending -= was_pending
            self._changed.notify()

    def _settle(self, answer: StepResult | LaunchedStep) -> StepResult:
        if isinstance(answer, StepResult):
            return answer
        if not answer.is_settled:
            result = self._wait_for_result(answer)
            if self._is_broken:
                result = _result_behind_failure(answer.step, result)
            elif answer.pending is not None and result.status is StepStatus.FAILED:
                with self._changed:
                    self._is_broken = True
            answer.result, answer.pending, answer.is_settled = result, None, True
        assert answer.result is not None
        return answer.result

    def _wait_for_result(self, launched: LaunchedStep) -> StepResult:
        if launched.pending is None:
            assert launched.result is not None
            return launched.result
        try:
            result = launched.pending.wait()
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # native libraries raise others than Exception
            result = failed_result(launched.step, error, self._on_device_lost)
        # The device executes steps in order: its time for the step before does not count for this one.
        began_ns = max(launched.began_ns, self._completed_ns)
        self._completed_ns = time.perf_counter_ns()
        result.queue_ns = began_ns - launched.received_ns
        result.exec_ns = self._completed_ns - began_ns
        return result


def failed_result(step: Step, error: BaseException, on_device_lost: Callable[[], None]) -> StepResult:
    """The FAILED answer to a step that raised. Call it while the exception is being handled; it is logged."""
    log.exception("step failed", epoch=step.epoch, step_id=step.step_id)
    if isinstance(error, DeviceLostError):
        log.critical("device lost: this process cannot use it any more, and ends")
        on_device_lost()
    return StepResult(
        epoch=step.epoch, step_id=step.step_id, status=StepStatus.FAILED, error=f"{type(error).__name__}: {error}"
    )


def _result_behind_failure(step: Step, result: StepResult) -> StepResult:
    return StepResult(
        epoch=step.epoch,
        step_id=step.step_id,
        status=StepStatus.NEED_SNAPSHOT,
        error=f"step {step.step_id} of epoch {step.epoch} was launched behind one that failed",
        queue_ns=result.queue_ns,
        exec_ns=result.exec_ns,
    )
