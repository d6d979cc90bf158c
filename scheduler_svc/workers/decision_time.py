"""Time to decide a worker's next step: late, so that new requests are in it, and early enough to arrive in time.

Pure: gets plans, durations, and the time that steps waited at the worker. Knows no clock and no worker.
"""

from collections import deque
from typing import Literal

from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.workers.step_expectations import Kind, Work, measure

Decide = Literal["auto", "early", "late"]  # auto: late for workers on a CPU

NUM_REMEMBERED = 8  # steps of each kind; the next one is taken to be as short as the shortest of them
MIN_REMEMBERED = 3  # before anything is foreseen
MIN_DELAY_NS = 2_000_000  # a shorter wait is not worth a timer

# The lead is how long before the foreseen end of the running step the next one leaves. A step that found the worker
# idle raises it at once, one that was in time lowers it a little, so that about one in 50 comes late.
LATE_BELOW_NS = 200_000  # a step that waited less at the worker may have come after the end of the one before
FIRST_LEAD_NS = 4_000_000
MIN_LEAD_NS = 1_000_000
MAX_LEAD_NS = 100_000_000
RAISE_NS = 1_000_000
LOWER_NS = RAISE_NS // 49


class DecisionTime:
    """Decision times of one worker, since its link was opened."""

    def __init__(self) -> None:
        self.lead_ns = FIRST_LEAD_NS
        self._seen: dict[Kind, deque[tuple[Work, int]]] = {}
        self._delayed_step_id: int | None = None  # the last step that was decided late

    def delay_ns(self, running: StepPlan, has_run_ns: int) -> int:
        """Wait before deciding the step behind `running`, which has run for so long. 0: decide now."""
        shortest_ns = self._shortest_ns(running)
        if shortest_ns is None:
            return 0
        delay_ns = int(shortest_ns) - self.lead_ns - has_run_ns
        return delay_ns if delay_ns >= MIN_DELAY_NS else 0

    def record_delayed(self, step_id: int) -> None:
        """Record a step decided after a delay: if it arrives too late, the lead is too short."""
        self._delayed_step_id = step_id

    def learn(self, plan: StepPlan, exec_ns: int, queue_ns: int) -> None:
        """Learn from a step that was executed `queue_ns` after it had reached the worker."""
        kind, work = measure(plan)
        self._seen.setdefault(kind, deque(maxlen=NUM_REMEMBERED)).append((work, exec_ns))
        if plan.step_id == self._delayed_step_id and queue_ns < LATE_BELOW_NS:
            self.lead_ns = min(self.lead_ns + RAISE_NS, MAX_LEAD_NS)
        else:
            self.lead_ns = max(self.lead_ns - LOWER_NS, MIN_LEAD_NS)

    def _shortest_ns(self, plan: StepPlan) -> float | None:
        """Shortest recent time of such a step; less for a smaller step, in proportion to what has shrunk the most."""
        kind, work = measure(plan)
        seen = self._seen.get(kind, ())
        if len(seen) < MIN_REMEMBERED:
            return None
        return min(exec_ns * _times_smaller(work, known) for known, exec_ns in seen)


def _times_smaller(work: Work, known: Work) -> float:
    return min(1.0, work.num_rows / max(known.num_rows, 1), work.num_tokens / max(known.num_tokens, 1))
