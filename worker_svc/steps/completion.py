"""Answers in the order of their steps: waits for launched steps on a thread of its own, while others are launched.

What is done at once and has nothing before it does not take the way through that thread, and may be held back for a
moment. A failure spoils the steps that were launched behind it; it knows nothing of what steps may come next.
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

# One runs, one waits behind it on the device, one is being answered: a scheduler has two on the way. A runner keeps
# memory for as many.
MAX_LAUNCHED_STEPS = 3

log = structlog.get_logger()


@dataclass(slots=True)
class LaunchedStep:
    """A step that a runner took, and its result as soon as that is there. Added again, it is answered again."""

    step: Step
    received_ns: int
    began_ns: int
    pending: PendingStep | None = None
    result: StepResult | None = None  # one of the two is there from the beginning
    is_settled: bool = False  # the result is final


class Completion:
    """`add`, `release` and `wait_for_room` belong to the execution thread."""

    def __init__(self, abandon: Callable[[], None], *, holds: bool = False) -> None:
        """`holds`: answers that are done at once wait for `release`, or for one that is not."""
        self._abandon = abandon  # the process, whose device is lost
        self._holds = holds
        self._held: deque[tuple[Callable[[StepResult], None], StepResult]] = deque()
        self._thread = TaskThread("completion")
        self._changed = threading.Condition()
        # Changed under the condition. Only `add` counts up, so while its thread finds nothing unfinished it is alone.
        self._num_unfinished = 0  # on the way through the thread
        self._num_pending = 0  # of them, those that the device has to do
        # Whoever settles a step owns these: the completion thread, or the execution thread while nothing is unfinished.
        self._is_broken = False  # a step failed, and the execution thread has not taken note of it
        self._completed_ns = 0  # when the device was done with the last step that was waited for

    def wait_for_room(self) -> bool:
        """Waits until another step may be launched.

        Returns whether a launched step has failed since the last call; then all that were launched are over.
        """
        if self._num_unfinished == 0 and not self._is_broken:
            return False
        with self._changed:
            self._changed.wait_for(self._has_room)
            was_broken, self._is_broken = self._is_broken, False
            return was_broken

    def add(self, answer: StepResult | LaunchedStep, deliver: Callable[[StepResult], None]) -> None:
        """Takes an answer, or a step whose answer it will be; `deliver` gets it on the loop, in the order of `add`."""
        is_pending = isinstance(answer, LaunchedStep) and answer.result is None
        if self._num_unfinished == 0 and not is_pending:
            self._held.append((deliver, self._settled(answer)))
            if not self._holds:
                self.release()
            return
        self.release()
        with self._changed:
            self._num_unfinished += 1
            self._num_pending += is_pending
        self._thread.submit(lambda: self._finish(answer, is_pending, deliver))

    def release(self) -> None:
        """Delivers what is held."""
        while self._held:
            self._thread.deliver(*self._held.popleft())

    async def drain(self) -> None:
        """Waits until all that was added, and is not held, is delivered."""
        await self._thread.call(lambda: None)

    async def close(self) -> None:
        """Ends the thread after what was added."""
        await self._thread.close()

    def _has_room(self) -> bool:
        return self._num_unfinished == 0 if self._is_broken else self._num_pending < MAX_LAUNCHED_STEPS

    def _finish(
        self, answer: StepResult | LaunchedStep, was_pending: bool, deliver: Callable[[StepResult], None]
    ) -> None:
        self._thread.deliver(deliver, self._settled(answer))
        with self._changed:  # not before it is delivered: what is answered at once must not overtake it
            self._num_unfinished -= 1
            self._num_pending -= was_pending
            self._changed.notify()

    def _settled(self, answer: StepResult | LaunchedStep) -> StepResult:
        if isinstance(answer, StepResult):
            return answer
        if not answer.is_settled:
            result = self._waited_for(answer)
            if self._is_broken:
                result = _spoiled(answer.step, result)
            elif answer.pending is not None and result.status is StepStatus.FAILED:
                with self._changed:
                    self._is_broken = True
            answer.result, answer.pending, answer.is_settled = result, None, True
        assert answer.result is not None
        return answer.result

    def _waited_for(self, launched: LaunchedStep) -> StepResult:
        if launched.pending is None:
            assert launched.result is not None
            return launched.result
        try:
            result = launched.pending.wait()
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # of a native library, too
            result = failure(launched.step, error, self._abandon)
        # The device takes steps in order, and what it spent on the one before is not this one's.
        began_ns = max(launched.began_ns, self._completed_ns)
        self._completed_ns = time.perf_counter_ns()
        result.queue_ns = began_ns - launched.received_ns
        result.exec_ns = self._completed_ns - began_ns
        return result


def failure(step: Step, error: BaseException, abandon: Callable[[], None]) -> StepResult:
    """The answer to a step that broke off. Called where the exception is being handled, which is logged."""
    log.exception("step failed", epoch=step.epoch, step_id=step.step_id)
    if isinstance(error, DeviceLostError):
        log.critical("device lost: this process can do nothing more with it, and ends")
        abandon()
    return StepResult(
        epoch=step.epoch, step_id=step.step_id, status=StepStatus.FAILED, error=f"{type(error).__name__}: {error}"
    )


def _spoiled(step: Step, result: StepResult) -> StepResult:
    return StepResult(
        epoch=step.epoch,
        step_id=step.step_id,
        status=StepStatus.NEED_SNAPSHOT,
        error=f"step {step.step_id} of epoch {step.epoch} was launched behind one that failed",
        queue_ns=result.queue_ns,
        exec_ns=result.exec_ns,
    )
