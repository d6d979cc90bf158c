"""What executes a step: a model, or a simulation of one, seen from the executor.

A runner without a device of its own is done when it returns; one with a device has only queued the work.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from common.step import Step, StepResult


class DeviceLostError(RuntimeError):
    """The device answers nothing any more, whoever asks it in this process: only another process can use it again."""


class PendingStep(Protocol):
    """A step that the device has yet to do."""

    def wait(self) -> StepResult:
        """Waits for the device, without the interpreter's lock. Called once, on another thread than `launch`.

        Whatever it raises, the step broke off, and so did those that were launched after it; DeviceLostError says
        that all later ones will.
        """


class StepRunner(Protocol):
    """Takes steps on one thread. At most MAX_LAUNCHED_STEPS are launched and not waited for."""

    def launch(self, step: Step) -> StepResult | PendingStep:
        """Begins a step, and gives its result if it is done at once.

        Raises InvalidStepError if nothing of the step was done, DeviceLostError if none will be done any more, anything
        else if it broke off.
        """


@runtime_checkable
class AnnouncingRunner(Protocol):
    """A runner that is done when it returns, and that says when it begins to compute, without the interpreter's lock.

    Until then it needs the lock for itself: what would wake other threads is better done when `before_pass` is called.
    """

    before_pass: Callable[[], None]


def result_of(launched: StepResult | PendingStep) -> StepResult:
    """The result, waited for if need be."""
    return launched if isinstance(launched, StepResult) else launched.wait()
