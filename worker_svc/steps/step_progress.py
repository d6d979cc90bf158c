"""Progress of the steps, for who waits on the event loop until one has been executed.

A `StepCount` is steps that count on from a snapshot within an epoch: what a block holds is known within one alone.
Knows neither steps' content nor their answers.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.step import Step, StepResult, StepStatus


class StepsReplacedError(Exception):
    """The worker follows another epoch, or its steps are counted anew: the steps that were meant are gone."""


@dataclass(frozen=True, slots=True)
class StepCount:
    """Steps of one epoch, numbered upwards from a snapshot."""

    epoch: int = 0
    number: int = 0  # of counts so far


class StepProgress:
    """Created on the event loop. The execution thread tells of begins, the loop of answers, each in order."""

    def __init__(self) -> None:
        self.count = StepCount()  # of the last step that was begun; each replaces the one before
        self.on_epoch: Callable[[int], None] = lambda epoch: None  # called on the execution thread
        self._begun = 0  # the last step
        self._executed = (0, 0)  # epoch and number of the last step that was answered with OK
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[None]] = []

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

    def record_answer(self, result: StepResult) -> None:
        """An answer is sent, on the loop."""
        if result.status is StepStatus.OK:
            self._executed = (result.epoch, result.step_id)
            if self._waiting:
                self._wake_all()

    async def wait_executed(self, epoch: int, step_id: int) -> StepCount:
        """Wait until a step has been executed. Returns the count that it is of.

        Raises StepsReplacedError if this is not the epoch that is followed, or the count ends meanwhile.
        """
        count = self.count
        while True:
            if count.epoch != epoch or not self.is_current(count):
                raise StepsReplacedError
            if not step_id or (self._executed[0] == epoch and self._executed[1] >= step_id):
                return count
            changed = self._loop.create_future()
            self._waiting.append(changed)
            try:
                await changed
            finally:
                if changed in self._waiting:
                    self._waiting.remove(changed)

    @property
    def num_waiting(self) -> int:
        """Number of waits that go on."""
        return len(self._waiting)

    def is_current(self, count: StepCount) -> bool:
        """True if no step after this count has been begun."""
        return self.count is count

    def _begin_count(self, epoch: int) -> None:
        self.count = StepCount(epoch, self.count.number + 1)
        self._begun = 0
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)
