"""Moments of steps, as the worker and the scheduler note them each in a file of its own, and what follows from both.

All moments are of one machine's monotonic clock, in nanoseconds, so that those of two processes can be compared.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar


class WorkerMoments(NamedTuple):
    """One step at the worker."""

    step_id: int
    num_rows: int
    num_tokens: int
    num_samples: int
    began_ns: int  # of its execution, behind its check
    ended_ns: int


class SchedulerMoments(NamedTuple):
    """One step at the scheduler."""

    step_id: int
    sent_ns: int  # decided, and about to be encoded
    taken_ns: int  # its result came to the loop
    exec_ns: int  # as the worker says
    cpu_ns: int  # of the process, until gRPC had sent it


M = TypeVar("M", WorkerMoments, SchedulerMoments)


class StepTrace(Generic[M]):
    """Steps in order. Costs an append of a few integers for each."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def add(self, moments: M) -> None:
        self._numbers.extend(moments)

    def write(self, path: Path) -> None:
        path.write_bytes(self._numbers.tobytes())


def read_trace(kind: type[M], path: Path) -> list[M]:
    """Read the file that `StepTrace.write` wrote."""
    numbers = array("q")
    numbers.frombytes(path.read_bytes())
    width = len(kind._fields)
    return [kind(*numbers[start : start + width]) for start in range(0, len(numbers), width)]


class NotSteadyError(Exception):
    """Failure to find enough consecutive steps of the requested kind."""


@dataclass(frozen=True, slots=True)
class SteadySteps:
    """Steps in a row that decode one token for each of the same number of sequences, from both sides."""

    worker: Sequence[WorkerMoments]
    scheduler: Sequence[SchedulerMoments]  # beside worker

    def __len__(self) -> int:
        return len(self.worker)

    @property
    def idle_ns(self) -> list[int]:
        """Time from the end of one execution to the start of the next: the cost of an iteration at the worker."""
        return [after.began_ns - before.ended_ns for before, after in pairwise(self.worker)]

    @property
    def overhead_ns(self) -> list[int]:
        """Time from result to result, without the execution: an iteration at the scheduler."""
        return [after.taken_ns - before.taken_ns - after.exec_ns for before, after in pairwise(self.scheduler)]

    @property
    def cpu_ns(self) -> list[int]:
        """CPU of the scheduler's process from step to step, all threads."""
        return [after.cpu_ns - before.cpu_ns for before, after in pairwise(self.scheduler)]

    @property
    def answer_ns(self) -> list[int]:
        """Time from the end of an execution to its result at the scheduler."""
        return [step.taken_ns - at.ended_ns for at, step in zip(self.worker, self.scheduler, strict=True)]

    @property
    def turn_ns(self) -> list[int]:
        """Time from a result to the sending of the next step. Negative at depth 2, if that was sent before."""
        return [after.sent_ns - before.taken_ns for before, after in pairwise(self.scheduler)]

    @property
    def delivery_ns(self) -> list[int]:
        """Time from the sending of a step to its execution; at depth 2 it waits for the step before."""
        return [at.began_ns - step.sent_ns for at, step in zip(self.worker, self.scheduler, strict=True)]


def steady_steps(
    worker: Sequence[WorkerMoments], scheduler: Sequence[SchedulerMoments], *, batch: int, warm_up: int, num_steps: int
) -> SteadySteps:
    """The longest run of pure decode steps with `batch` rows: `num_steps` of it after `warm_up`.

    Raises NotSteadyError if it is shorter.
    """
    start = length = index = 0
    while index < len(worker):
        end = index
        while end < len(worker) and worker[end].num_rows == worker[end].num_tokens == batch:
            end += 1
        if end - index > length:
            start, length = index, end - index
        index = end + 1
    if length < warm_up + num_steps:
        raise NotSteadyError(f"only {length} consecutive steps had {batch} rows of one token; measure more steps")
    chosen = worker[start + warm_up : start + warm_up + num_steps]
    by_id = {step.step_id: step for step in scheduler}
    return SteadySteps(chosen, [by_id[step.step_id] for step in chosen])
