"""Times of steps: moving averages, and bounds for the times that a worker reports."""

from dataclasses import dataclass

from common.step import StepResult

AVERAGE_WEIGHT = 0.05  # of the newest value in a moving average
CLOCK_MARGIN_NS = 1_000_000_000  # by which a worker's clock may differ from ours over one step


@dataclass(slots=True)
class StepTimes:
    """Moving averages over a worker's steps, in nanoseconds."""

    num_steps: int = 0
    exec_ns: float = 0.0
    overhead_ns: float = 0.0  # of an iteration, the part in which the worker did not execute

    def add(self, exec_ns: int, overhead_ns: int | None) -> None:
        """Add a step; `overhead_ns`: None if the worker had been idle before it."""
        self.num_steps += 1
        weight = max(AVERAGE_WEIGHT, 1 / self.num_steps)
        self.exec_ns += (exec_ns - self.exec_ns) * weight
        if overhead_ns is not None:
            self.overhead_ns += (overhead_ns - self.overhead_ns) * weight


def bound_times(result: StepResult, waited_ns: int) -> None:
    """Bound the times of an answer by the time that we waited for it.

    Averages, expectations and costs are learnt from them: one answer with 2^64 would spoil them for ever.
    """
    most_ns = max(0, waited_ns) + CLOCK_MARGIN_NS
    result.exec_ns = min(result.exec_ns, most_ns)
    result.swap_ns = min(result.swap_ns, most_ns)
    result.queue_ns = min(result.queue_ns, most_ns)
    result.total_ns = min(result.total_ns, most_ns)
