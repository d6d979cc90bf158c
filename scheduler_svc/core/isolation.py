"""Isolation of the request that makes steps fail or ends workers, so that it alone is failed.

Groups in a failed step are suspects. Groups in flight on a worker that is lost become suspects at the second loss: most
losses are caused by no request, and a group that had not yet recomputed up to its position at the first loss did not
cause the second; nor did it cause the loss of a worker whose process comes back, since only the link had broken. Such
excuses hold three times, since a group may also end workers wherever it computes, or break links. Suspects are tried
in cohorts; see `trials`. A cohort that fails is halved. A group that computes past the position of its incident is
cleared. A group that fails alone for the third time in all is guilty.

The fault may be the worker's: a group that failed on one is tried on others that could hold it, and is guilty of failed
steps only after it has failed on each of them, or on four. If a worker's answer could not be believed, and the group
computes past the position on another worker, the first worker is at fault. If other workers also died recently, a group
is guilty only after two consecutive deaths with it alone, since one proves little.

Pure; knows nothing of requests, and decides nothing of memory.
"""

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from scheduler_svc.core.incidents import NUM_LOSSES_OF_SUSPECTS, Incidents, Loss
from scheduler_svc.core.placement import WorkerLimits, has_other_place, may_take
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.trials import Trials
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState

MAX_FAILED_STEPS = 3
MAX_WORKERS_TRIED = 4  # most workers on which a group fails steps
MAX_LOSSES = 3
MAX_EXCUSED_LOSSES = 3  # of a group that is not their likely cause; later ones count
LATELY_S = 60.0  # losses within this time tell if workers are lost for other reasons, too


class Verdict(NamedTuple):
    """Group that the caller must end, and what happened in its steps."""

    group: SequenceGroup
    num_failed_steps: int
    num_losses: int
    num_lone_losses: int


class Isolation:
    """Suspects of all workers, and their incidents. A group is never swapped while it is suspected."""

    def __init__(self, waiting: WaitingQueue, limits: WorkerLimits) -> None:
        self._waiting = waiting
        self._limits = limits
        self._incidents: dict[SequenceGroup, Incidents] = {}  # of groups that are not paused
        self._of_paused: dict[SequenceGroup, Incidents] = {}  # no step clears these, since none of theirs is planned
        self.trials = Trials(limits, self._incidents)
        self._losses_s: deque[float] = deque()  # times of the latest losses of workers

    def may_pass_elsewhere(self, group: SequenceGroup, worker: WorkerState, workers: Iterable[WorkerState]) -> bool:
        """True if a serving worker on which the group has not failed, other than this one, could hold it."""
        incidents = self._incidents.get(group)
        failed_on = incidents.failed_on if incidents is not None else {}
        others = [other for other in workers if other.worker_id not in failed_on]
        return has_other_place(worker, group, others, self._limits)

    def record_failed_step(
        self,
        plans: Collection[StepPlan],
        workers: Collection[WorkerState],
        *,
        suspects: Collection[SequenceGroup] | None = None,
        is_disbelieved: bool = False,
    ) -> list[Verdict]:
        """Record that these plans of one worker failed, and were rolled back. Return a verdict on a group alone there.

        `suspects`: the groups concerned; None: each group in the plans. `is_disbelieved`: the worker answered, but its
        answer cannot be believed.
        """
        groups = list(self._mark_positions(plans, suspects))
        failed_on = {plan.worker_id for plan in plans}
        for group in groups:
            incidents = self._incidents_of(group)
            incidents.failed_on.update(failed_on)
            if is_disbelieved:
                incidents.disbelieved_on |= failed_on
        if len(groups) == 1 and self._is_guilty(groups[0], workers):
            return [self._verdict(groups[0])]
        middle = (len(groups) + 1) // 2
        for half in (groups[:middle], groups[middle:]):
            self._suspect(half)
        return []

    def record_worker_loss(self, worker: WorkerState, now_s: float, *, is_proven: bool) -> list[Verdict]:
        """Record that a worker is lost with its steps in flight. Called before it is removed.

        `is_proven`: even if its process lives on; otherwise see `excuse_losses`.
        """
        self._losses_s.append(now_s)
        while self._losses_s[0] < now_s - LATELY_S:
            self._losses_s.popleft()
        spans = self._mark_positions(step.plan for step in worker.in_flight)
        for group in spans:
            incidents = self._incidents_of(group)
            if not _may_have_caused_loss(incidents, spans[group]):
                incidents.num_excused_losses += 1
                continue
            for sequence, span in spans[group].items():
                incidents.loss_positions[sequence] = max(span.start, incidents.loss_positions.get(sequence, 0))
            incidents.losses.append(Loss(worker.worker_id, was_alone=len(spans) == 1, is_proven=is_proven))
            num_needed = 1 if len(self._losses_s) <= incidents.num_losses else 2
            if incidents.num_lone_losses >= num_needed and incidents.num_losses >= MAX_LOSSES:
                return [self._verdict(group)]
            if incidents.num_losses >= NUM_LOSSES_OF_SUSPECTS:
                self._suspect([group])
        return []

    def excuse_losses(self, worker_id: str) -> None:
        """Excuse the groups that were in flight when this worker was lost: its process lives on."""
        for incidents in (*self._incidents.values(), *self._of_paused.values()):
            for loss in [each for each in incidents.losses if each.worker_id == worker_id and not each.is_proven]:
                if incidents.num_excused_losses == MAX_EXCUSED_LOSSES:
                    loss.is_proven = True
                else:
                    incidents.losses.remove(loss)
                    incidents.num_excused_losses += 1
        for group, incidents in self._incidents.items():
            if not incidents.is_suspicious:
                self._release(group)

    def confirm_losses(self, worker_id: str) -> None:
        """Record that the process of this worker, if it was lost, has ended."""
        for incidents in (*self._incidents.values(), *self._of_paused.values()):
            for loss in incidents.losses:
                loss.is_proven = loss.is_proven or loss.worker_id == worker_id

    def forgive_worker(self, worker_id: str) -> None:
        """Drop the failed steps of this worker: the fault was its own, or that of a process which is gone."""
        for incidents in (*self._incidents.values(), *self._of_paused.values()):
            incidents.failed_on.pop(worker_id, None)
            incidents.disbelieved_on.discard(worker_id)
        for group, incidents in list(self._incidents.items()):
            if not incidents.failed_on and not incidents.losses:
                self._release(group)
                if not incidents.num_excused_losses:
                    del self._incidents[group]

    def record_executed_step(self, plan: StepPlan) -> set[str]:
        """Clear the groups that this plan has brought past the position of their incidents.

        Return the other workers whose answers about such a position could not be believed: they are at fault.
        """
        at_fault: set[str] = set()
        if not self._incidents:
            return at_fault
        for sequence, position, num_tokens in zip(plan.sequences, plan.positions, plan.num_tokens, strict=True):
            incidents = self._incidents.get(sequence.group)
            if incidents is None or position + num_tokens < incidents.marks.get(sequence, 0):
                continue
            incidents.marks.pop(sequence, None)
            if not any(member.is_live for member in incidents.marks):
                at_fault |= incidents.disbelieved_on - {plan.worker_id}
                self._clear(sequence.group)
        return at_fault

    def forget_group(self, group: SequenceGroup) -> None:
        """Drop the incidents of a group that has ended."""
        self._incidents.pop(group, None)
        self._of_paused.pop(group, None)
        self.trials.remove_suspect(group)

    def suspend_group(self, group: SequenceGroup) -> None:
        """Take a paused group out of its cohort, so that no trial waits for it; keep its incidents."""
        self.trials.remove_suspect(group)
        if group in self._incidents:
            self._of_paused[group] = self._incidents.pop(group)

    def restore_group(self, group: SequenceGroup) -> None:
        """Take back a resumed group's incidents. If it was suspected it still is, in a cohort of its own."""
        incidents = self._of_paused.pop(group, None)
        if incidents is None:
            return
        self._incidents[group] = incidents
        if incidents.is_suspicious:
            self._suspect([group])

    def check(self) -> None:
        """Assert that incidents, suspects and cohorts agree."""
        assert not any(group.is_paused for group in self._incidents)
        assert not any(group.is_finished for group in (*self._incidents, *self._of_paused)), "it has ended"
        assert all(group.is_paused for group in self._of_paused)
        self.trials.check()

    def _mark_positions(
        self, plans: Iterable[StepPlan], suspects: Collection[SequenceGroup] | None = None
    ) -> dict[SequenceGroup, dict[Sequence, range]]:
        """Mark how far the groups are. Return the positions that these plans compute, of groups that have not ended."""
        spans: dict[SequenceGroup, dict[Sequence, range]] = {}
        for plan in plans:
            for sequence, position, num_tokens in zip(plan.sequences, plan.positions, plan.num_tokens, strict=True):
                if sequence.group.is_finished or (suspects is not None and sequence.group not in suspects):
                    continue
                there = spans.setdefault(sequence.group, {})
                there[sequence] = range(there[sequence].start if sequence in there else position, position + num_tokens)
                marks = self._incidents_of(sequence.group).marks
                marks[sequence] = max(position + num_tokens, marks.get(sequence, 0))
        return spans

    def _incidents_of(self, group: SequenceGroup) -> Incidents:
        return (self._of_paused if group.is_paused else self._incidents).setdefault(group, Incidents())

    def _is_guilty(self, group: SequenceGroup, workers: Collection[WorkerState]) -> bool:
        """True if a step that failed with the group alone is its fault: no worker is left that could show otherwise."""
        incidents = self._incidents_of(group)
        if incidents.num_failed_steps < MAX_FAILED_STEPS:
            return False
        return len(incidents.failed_on) >= MAX_WORKERS_TRIED or not any(
            may_take(worker, group, workers, self._limits)
            for worker in workers
            if worker.worker_id not in incidents.failed_on
        )

    def _verdict(self, group: SequenceGroup) -> Verdict:
        incidents = self._incidents_of(group)
        return Verdict(group, incidents.num_failed_steps, incidents.num_losses, incidents.num_lone_losses)

    def _suspect(self, groups: list[SequenceGroup]) -> None:
        """Put groups into cohorts of their own and out of the order of the queue.

        Paused groups are left out: `restore_group` suspects them when they are resumed.
        """
        groups = [group for group in groups if not group.is_paused]
        self.trials.add_suspects(groups)
        for group in groups:
            self._waiting.quarantine(group)

    def _clear(self, group: SequenceGroup) -> None:
        del self._incidents[group]
        self._release(group)

    def _release(self, group: SequenceGroup) -> None:
        self.trials.remove_suspect(group)
        self._waiting.release_from_quarantine(group)


def _may_have_caused_loss(incidents: Incidents, spans: dict[Sequence, range]) -> bool:
    """True if a member was at the end of its tokens, or past its position at an earlier loss, or all excuses are used.

    `spans`: the positions of each member in the steps that were in flight.
    """
    if not incidents.num_losses or incidents.num_excused_losses == MAX_EXCUSED_LOSSES:
        return True
    return any(
        span.stop > min(incidents.loss_positions.get(sequence, span.stop), len(sequence.token_ids) - 1)
        for sequence, span in spans.items()
    )
