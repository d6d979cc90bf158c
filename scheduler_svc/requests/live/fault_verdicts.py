"""Failed steps and lost workers: report each to the scheduler, and fail the requests that it finds guilty.

The scheduler's `isolation` decides who is guilty; here the reason becomes a message for the client. Knows no worker and
no text.
"""

import time
from collections.abc import Callable, Collection, Iterable

from scheduler_svc.core.isolation import Verdict
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan


class FaultVerdicts:
    """`fail_group` fails the request or computation of a group with an error; `wake` wakes the workers."""

    def __init__(
        self, scheduler: Scheduler, fail_group: Callable[[SequenceGroup, str], None], wake: Callable[[], None]
    ) -> None:
        self._scheduler = scheduler
        self._fail_group = fail_group
        self._wake = wake

    def record_failed_step(self, plans: Iterable[StepPlan], error: str) -> None:
        """Record plans whose execution raised. Their groups are tried apart; one that fails alone too often is failed.

        The plans are rolled back already, or their worker is about to be removed.
        """
        self._fail_guilty(self._scheduler.record_failed_step(plans), error)

    def record_disbelieved_step(
        self, plans: Iterable[StepPlan], error: str, suspects: Collection[SequenceGroup] | None = None
    ) -> None:
        """Record plans whose answers cannot be believed, as `record_failed_step`. Only `suspects` are concerned."""
        self._fail_guilty(self._scheduler.record_failed_step(plans, suspects=suspects, is_disbelieved=True), error)

    def lose_worker(self, worker_id: str, reason: str, *, is_proven: bool) -> list[Sequence]:
        """Remove a lost worker. Returns the sequences that ran there; they wait again.

        A request that crashed workers too often while running alone is failed. `is_proven`: its process need not have
        ended for that; see `Scheduler.record_return`.
        """
        guilty = self._scheduler.record_worker_loss(worker_id, time.monotonic(), is_proven=is_proven)
        lost = self._scheduler.workers.remove_worker(worker_id)
        for each in guilty:
            lone = each.num_lone_losses
            last = f"last {lone}" if lone > 1 else "last"
            crashes = f"request crashed its worker {each.num_losses} times, the {last} while running alone"
            self._fail_group(each.group, f"{crashes}; send another prompt or other parameters: {reason}")
        return lost

    def _fail_guilty(self, verdicts: Iterable[Verdict], error: str) -> None:
        for guilty in verdicts:
            attempts = f"{guilty.num_failed_steps} attempts, the last while running alone"
            self._fail_group(guilty.group, f"the request made the model fail in {attempts}: {error}")
        self._wake()  # another worker may try the groups of the step
