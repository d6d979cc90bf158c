"""Progress of the steps: the count that the last one is of, within which alone it is known what a block holds.

Knows neither steps' content nor their answers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class StepCount:
    """Steps of one epoch, numbered upwards from a snapshot."""

    epoch: int = 0


class StepProgress:
    """Told by the execution thread of each step before it is executed; any thread may ask."""

    def __init__(self) -> None:
        self.count = StepCount()  # of the last step that was begun; each replaces the one before
        self.on_epoch: Callable[[int], None] = lambda epoch: None  # called on the execution thread
        self._begun = 0  # the last step

    def follow_epoch(self, epoch: int) -> None:
        """Steps of this epoch come next."""
        if epoch != self.count.epoch:
            self._begin_count(epoch)
            self.on_epoch(epoch)

    def begin_step(self, step: Step) -> None:
        """A step is executed from now on: it may write any block."""
        self.follow_epoch(step.epoch)
        if step.snapshot and step.step_id <= self._begun:
            self._begin_count(step.epoch)
        self._begun = step.step_id

    def is_current(self, count: StepCount) -> bool:
        """True if no step after this count has been begun."""
        return self.count is count

    def _begin_count(self, epoch: int) -> None:
        self.count = StepCount(epoch)
        self._begun = 0
