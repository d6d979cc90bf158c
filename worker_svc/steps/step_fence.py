"""Fencing of steps by epoch and step id, as `protos/quire/v1/worker.proto` defines it. Pure."""

from common.step import Step, StepResult, StepStatus


class StepFence:
    """The followed epoch, and the step_id that comes next in it; None until a snapshot."""

    def __init__(self) -> None:
        self.epoch = 0
        self._next_step_id: int | None = None

    def follow_epoch(self, epoch: int) -> None:
        """Refuse steps of earlier epochs from now on; `epoch` may be lower than the highest seen."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._next_step_id = None

    def refusal(self, step: Step) -> StepResult | None:
        """The answer to a step that must not be executed; None if it may be. Follows a higher epoch."""
        if step.epoch < self.epoch:
            return StepResult(
                epoch=self.epoch,
                step_id=step.step_id,
                status=StepStatus.STALE_EPOCH,
                error=f"epoch {step.epoch} has been followed by {self.epoch}",
            )
        self.follow_epoch(step.epoch)  # a higher one, from a permitted caller, before the registration has seen it
        if step.snapshot or step.step_id == self._next_step_id:
            return None
        return StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            status=StepStatus.NEED_SNAPSHOT,
            error=self._why_snapshot(step),
        )

    def record_executed(self, step: Step) -> None:
        self._next_step_id = step.step_id + 1

    def require_snapshot(self) -> None:
        """Refuse every step but a snapshot: after a step that broke off, the seats are in an unknown state."""
        self._next_step_id = None

    def _why_snapshot(self, step: Step) -> str:
        if self._next_step_id is None:
            return f"step {step.step_id} of epoch {step.epoch} builds on a state that this worker does not have"
        return f"step {step.step_id} came when step {self._next_step_id} was expected"
