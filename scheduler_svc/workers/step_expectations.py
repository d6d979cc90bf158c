"""Expected time of a worker's step, from its earlier steps: a step that takes far longer hangs.

Pure: gets plans and times. The expectation of a step unlike all earlier ones is None.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.step_plan import StepPlan

AVERAGE_WEIGHT = 0.05  # of the newest step
MIN_STEPS = 3  # of a kind, before anything is expected of one: the first may compile kernels
MAX_TIMES_LARGER = 16  # than the average of its kind; beyond that a step is unlike those


class Kind(NamedTuple):
    """Kind of a step. Steps of different kinds are not compared."""

    prefills: bool
    ranks_candidates: bool
    moves_blocks: bool  # swaps and copies


class Work(NamedTuple):
    """Amounts of work in a step. Its time grows at most in proportion to the amount that has grown the most."""

    num_rows: int
    num_tokens: int
    num_attended: int  # tokens, by all tokens together
    num_moved_blocks: int


@dataclass(slots=True)
class Average:
    """Average work and time of the steps of one kind."""

    work: list[float]
    duration_s: float
    num_steps: int = 1

    def add(self, work: Work, duration_s: float) -> None:
        self.num_steps += 1
        weight = max(AVERAGE_WEIGHT, 1 / self.num_steps)
        self.duration_s += (duration_s - self.duration_s) * weight
        self.work = [known + (new - known) * weight for known, new in zip(self.work, work, strict=True)]


@dataclass(slots=True)
class StepExpectations:
    """Expectations of one worker, since it came."""

    _averages: dict[Kind, Average] = field(default_factory=dict)

    def learn(self, plan: StepPlan, duration_s: float) -> None:
        """Learn from an executed step."""
        kind, work = measure(plan)
        average = self._averages.get(kind)
        if average is None:
            self._averages[kind] = Average([float(each) for each in work], duration_s)
        else:
            average.add(work, duration_s)

    def expected_s(self, plan: StepPlan) -> float | None:
        """Upper estimate of a step's time: the average, scaled by its work. None: nothing comparable was seen."""
        kind, work = measure(plan)
        average = self._averages.get(kind)
        if average is None or average.num_steps < MIN_STEPS:
            return None
        times_larger = max(new / max(known, 1.0) for known, new in zip(average.work, work, strict=True))
        if times_larger > MAX_TIMES_LARGER:
            return None
        return average.duration_s * max(1.0, times_larger)


def measure(plan: StepPlan) -> tuple[Kind, Work]:
    """Kind and work of a plan."""
    num_rows, num_tokens = len(plan.num_tokens), sum(plan.num_tokens)
    num_moved = (len(plan.swap_out) + len(plan.swap_in) + len(plan.copies)) // 2 + len(plan.placed) // 3
    num_attended = num_tokens + sum(plan.positions)
    if num_tokens > num_rows:
        rows = zip(plan.positions, plan.num_tokens, strict=True)
        num_attended = sum(count * (position + count) for position, count in rows)
    kind = Kind(num_tokens > num_rows, bool(plan.candidate_rows), num_moved > 0)
    return kind, Work(num_rows, num_tokens, num_attended, num_moved)
