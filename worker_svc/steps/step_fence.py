"""Which step may be executed next: epochs and step ids as `protos/quire/v1/worker.proto` states them. Pure."""

from common.step import Step, StepResult, StepStatus


class StepFence:
    """The highest epoch seen, and the step_id that comes next in it; none until a snapshot."""

    def __init__(self) -> None:
        self.epoch = 0
        self._next_step_id: int | None = None

    def follow(self, epoch: int) -> None:
        """Refuse steps of earlier epochs from now on; this one may be lower than the highest seen."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._next_step_id = None

    def refusal(self, step: Step) -> StepResult | None:
        """The answer to a step that must not be executed; None if it may be. Notes a higher epoch."""
        if step.epoch < self.epoch:
            return StepResult(
                epoch=self.epoch,
                step_id=step.step_id,
                status=StepStatus.STALE_EPOCH,
                error=f"epoch {step.epoch} has been followed by {self.epoch}",
            )
        self.follow(step.epoch)  # a higher one: its sender was let in, and the registration has yet to hear of it
        if step.snapshot or step.step_id == self._next_step_id:
            return None
        return StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            status=StepStatus.NEED_SNAPSHOT,
            error=self._why_snapshot(step),
        )

    def executed(self, step: Step) -> None:
        self._next_step_id = step.step_id + 1

    def failed(self) -> None:
        """A step broke off: what the worker remembers is in an unknown state."""
        self._next_step_id = None

    def _why_snapshot(self, step: Step) -> str:
        if self._next_step_id is None:
            return f"step {step.step_id} of epoch {step.epoch} builds on a state that this worker does not have"
        return f"step {step.step_id} came where {self._next_step_id} was due"
