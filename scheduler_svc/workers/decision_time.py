"""Time to decide a worker's next step: late, so that new requests are in it, and early enough to arrive in time.

Pure: gets plans, durations, and the time that steps waited at the worker. Knows no clock and no worker.
"""

from collections import deque
from typing import Literal

from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.workers.step_expectations import Kind, Work, measure

Decide = Literal["auto", "early", "late"]  # auto: late for workers on a CPU

NUM_REMEMBERED = 8  # steps of each kind and size; the next one is taken to be as short as the shortest of them
MIN_REMEMBERED = 3  # before anything is foreseen
MIN_DELAY_NS = 2_000_000  # a shorter wait is not worth a timer

_MOST_IN_FLIGHT = 8  # more than a worker ever has

# The lead is how long before the foreseen end of the running step the next one leaves. A step that was decided late and
# found the worker idle raises it at once, one that was in time lowers it a little, so that one in eight finds it idle.
# That costs less than a longer lead: part of a millisecond, where a request that arrives within the lead waits for a
# whole step.
LATE_BELOW_NS = 200_000  # a step that waited less at the worker may have come after the end of the one before
FIRST_LEAD_NS = 4_000_000
MIN_LEAD_NS = 1_000_000
MAX_LEAD_NS = 100_000_000
RAISE_NS = 1_000_000
LOWER_NS = RAISE_NS // 7
FADE_NS = RAISE_NS // 49  # what a step lowers it that was decided at once, and so says nothing of the lead


class DecisionTime:
    """Decision times of one worker, since its link was opened."""

    def __init__(self) -> None:
        self.lead_ns = FIRST_LEAD_NS
        # By kind, then by the bit length of the number of tokens: the latest steps, with their times.
        self._seen: dict[Kind, dict[int, deque[tuple[Work, int]]]] = {}
        self._delayed: deque[int] = deque(maxlen=_MOST_IN_FLIGHT)  # ids of steps decided late, without results yet

    def delay_ns(self, running: StepPlan, has_run_ns: int) -> int:
        """Wait before deciding the step behind `running`, which has run for so long. 0: decide now."""
        shortest_ns = self._shortest_ns(running)
        if shortest_ns is None:
            return 0
        delay_ns = int(shortest_ns) - self.lead_ns - has_run_ns
        return delay_ns if delay_ns >= MIN_DELAY_NS else 0

    def record_delayed(self, step_id: int) -> None:
        """Record a step decided after a delay: if it arrives too late, the lead is too short."""
        self._delayed.append(step_id)

    def learn(self, plan: StepPlan, exec_ns: int, queue_ns: int) -> None:
        """Learn from a step that was executed `queue_ns` after it had reached the worker."""
        kind, work = measure(plan)
        sizes = self._seen.setdefault(kind, {})
        sizes.setdefault(_size(work), deque(maxlen=NUM_REMEMBERED)).append((work, exec_ns))
        was_delayed = plan.step_id in self._delayed
        while self._delayed and self._delayed[0] <= plan.step_id:
            self._delayed.popleft()
        if was_delayed and queue_ns < LATE_BELOW_NS:
            self.lead_ns = min(self.lead_ns + RAISE_NS, MAX_LEAD_NS)
        else:
            self.lead_ns = max(self.lead_ns - (LOWER_NS if was_delayed else FADE_NS), MIN_LEAD_NS)

    def _shortest_ns(self, plan: StepPlan) -> float | None:
        """Shortest recent time of such a step. None: nothing comparable was seen.

        A smaller step than those seen takes less, at least in proportion to what has shrunk the most. It takes no less
        than one that is smaller still: few rows take as long as one, since each step reads all weights.
        """
        kind, work = measure(plan)
        size = _size(work)
        known = {each: steps for each, steps in self._seen.get(kind, {}).items() if len(steps) >= MIN_REMEMBERED}
        not_smaller = min((each for each in known if each >= size), default=None)
        smaller = max((each for each in known if each < size), default=None)
        least_ns = min(exec_ns for _, exec_ns in known[smaller]) if smaller is not None else None
        if not_smaller is None:
            return least_ns
        in_proportion_ns = min(exec_ns * _times_smaller(work, seen) for seen, exec_ns in known[not_smaller])
        if least_ns is None:
            return in_proportion_ns
        # The smaller ones may be from a time when the worker was slower.
        return max(in_proportion_ns, min(least_ns, min(exec_ns for _, exec_ns in known[not_smaller])))


def _size(work: Work) -> int:
    return work.num_tokens.bit_length()


def _times_smaller(work: Work, known: Work) -> float:
    return min(1.0, work.num_rows / max(known.num_rows, 1), work.num_tokens / max(known.num_tokens, 1))
