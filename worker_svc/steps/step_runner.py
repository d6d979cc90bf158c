"""Interface between the executor and its runner, which is a model or a simulation of one.

A runner without a device of its own has finished a step when `launch` returns; one with a device has only queued it.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from common.step import Step, StepResult


class DeviceLostError(RuntimeError):
    """The device does not answer this process any more: only another process can use it again."""


class PendingStep(Protocol):
    """A step that the device has not finished."""

    def wait(self) -> StepResult:
        """Waits for the device, without the interpreter's lock. Called once, on another thread than `launch`.

        Any error means that this step and those launched after it broke off; DeviceLostError, that all later ones will.
        """


class StepRunner(Protocol):
    """Executes steps on one thread. At most MAX_LAUNCHED_STEPS are launched and not waited for."""

    def launch(self, step: Step) -> StepResult | PendingStep:
        """Begins a step, and returns its result if it is finished at once.

        Raises InvalidStepError if no part of the step was executed, DeviceLostError if the device is lost, any other
        error if the step broke off.
        """


@runtime_checkable
class AnnouncingRunner(Protocol):
    """A runner that finishes each step in `launch`, and announces when it begins to compute, or to swap blocks before.

    It does both without the interpreter's lock, and needs the lock until then: tasks that wake other threads should
    wait until it calls `before_pass`, which it may do twice in a step.
    """

    before_pass: Callable[[], None]


@runtime_checkable
class PassCountingRunner(Protocol):
    """A runner that counts its passes by how they were launched. Any thread may read the counts."""

    @property
    def graph_passes(self) -> Mapping[str, int]:
        """Passes that were one graph, by kind."""

    @property
    def kernel_passes(self) -> Mapping[str, int]:
        """Passes that were launched kernel by kernel, by reason."""


def result_of(launched: StepResult | PendingStep) -> StepResult:
    """The result of a launched step; waits for a pending one."""
    return launched if isinstance(launched, StepResult) else launched.wait()
