"""What a loaded worker consists of, be it a model or a simulation of one."""

from dataclasses import dataclass

from worker_svc.description import WorkerDescription
from worker_svc.steps.step_runner import StepRunner


@dataclass(frozen=True, slots=True)
class Engine:
    """A runner, and what there is to say of it."""

    runner: StepRunner
    description: WorkerDescription
