"""The parts of a loaded worker, the same for a model and for a simulation of one."""

from collections.abc import Callable
from dataclasses import dataclass

from worker_svc.description import WorkerDescription
from worker_svc.steps.step_runner import StepRunner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner and the description of its worker."""

    runner: StepRunner
    description: WorkerDescription
    close: Callable[[], None] = lambda: None  # ends the other ranks of a tensor-parallel group
