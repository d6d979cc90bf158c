"""Finds the request that makes steps fail or ends workers, so that it is failed alone and nobody else.

Groups in a step that failed are suspects. So are those in flight on a worker that is lost, the second time: most losses
are nobody's fault, and who had yet to come back to where it was the first time had no part in the second. Suspects are
tried in cohorts, and a step with a suspect has rows of its cohort alone. A cohort that fails is halved; who has come
past the place where it happened is cleared; who fails alone for the third time in all is guilty. The fault may be the
worker's: who failed on one is tried on others that could hold it, where there are any, and is guilty of failed steps
only after it has failed on each of them, or on four. Where the answer to a step could not be believed, and who was in
it comes past the place on another worker, the one that answered is at fault. And where workers are lost without it,
too, one loss with it alone says little, since somebody is always alone: it takes two in a row.

Trials and everybody else take turns on a worker. A trial begins with nothing in flight, once the others have had as
many steps as the trial before took, or have nothing to do; it ends when its suspects are cleared, have failed, or can
do nothing. So neither starves, and what ends a worker in a trial was no one else's step. Suspects that hold nothing on
any worker are tried on one worker at a time: the others serve.

Pure; it knows nothing of requests, and decides nothing of memory.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.placement import WorkerLimits, has_other_place, may_take
from scheduler_svc.core.sequence import Cohort, Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState

MAX_FAILED_STEPS = 3
MAX_WORKERS_TRIED = 4  # on so many a group fails steps at most, if there are so many
MAX_LOSSES = 3
NUM_LOSSES_OF_SUSPECTS = 2
LATELY_S = 60.0  # losses of this time say whether workers are lost for other reasons, too


@dataclass(slots=True)
class Incidents:
    """What happened to a group since it last came on."""

    failed_on: Counter[str] = field(default_factory=Counter)  # failed steps by worker
    disbelieved_on: set[str] = field(default_factory=set)  # of those workers, where the answer could not be believed
    num_losses: int = 0  # of workers
    num_lone_losses: int = 0  # of those the last ones, in which it was alone
    marks: dict[Sequence, int] = field(default_factory=dict)  # tokens computed with which it is past the place
    places: dict[Sequence, int] = field(default_factory=dict)  # the first position that may have ended a worker

    @property
    def num_failed_steps(self) -> int:
        return self.failed_on.total()


class Verdict(NamedTuple):
    """A group that must end, and what happened in its steps."""

    group: SequenceGroup
    num_failed_steps: int
    num_losses: int
    num_lone_losses: int


class Isolation:
    """The suspects of all workers. A group is in one cohort at most, and never swapped while it is in one."""

    def __init__(self, waiting: WaitingQueue, limits: WorkerLimits) -> None:
        self._waiting = waiting
        self._limits = limits
        self._incidents: dict[SequenceGroup, Incidents] = {}  # of those that are not paused
        self._of_paused: dict[SequenceGroup, Incidents] = {}  # apart: they come on in no step
        self._cohorts: dict[Cohort, None] = {}  # in the order of their trials
        self._losses_s: deque[float] = deque()  # when workers were lost lately

    def may_pass_elsewhere(self, group: SequenceGroup, worker: WorkerState, workers: Iterable[WorkerState]) -> bool:
        """Whether another worker that serves could hold it, and has not failed it."""
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
        """What these plans of one worker were to do failed, and was taken back.

        The verdict is on a group that failed alone. `suspects`: who of them is concerned; None: everybody.
        `is_disbelieved`: the worker says that it was done, and its answer cannot be believed.
        """
        groups = list(self._note(plans, suspects))
        failed_on = {plan.worker_id for plan in plans}
        for group in groups:
            incidents = self._of(group)
            incidents.failed_on.update(failed_on)
            if is_disbelieved:
                incidents.disbelieved_on |= failed_on
        if len(groups) == 1 and self._is_guilty(groups[0], workers):
            return [self._verdict(groups[0])]
        middle = (len(groups) + 1) // 2
        for half in (groups[:middle], groups[middle:]):
            self._suspect(half)
        return []

    def record_worker_loss(self, worker: WorkerState, now_s: float) -> list[Verdict]:
        """A worker is lost with its steps in flight; it is still known, and what ran there has yet to wait again."""
        self._losses_s.append(now_s)
        while self._losses_s[0] < now_s - LATELY_S:
            self._losses_s.popleft()
        spans = self._note(step.plan for step in worker.in_flight)
        for group in [each for each in spans if self._may_be_its_doing(each, spans[each])]:
            incidents = self._of(group)
            for sequence, span in spans[group].items():
                incidents.places[sequence] = max(span.start, incidents.places.get(sequence, 0))
            incidents.num_losses += 1
            incidents.num_lone_losses = incidents.num_lone_losses + 1 if len(spans) == 1 else 0
            num_needed = 1 if len(self._losses_s) <= incidents.num_losses else 2
            if incidents.num_lone_losses >= num_needed and incidents.num_losses >= MAX_LOSSES:
                return [self._verdict(group)]
            if incidents.num_losses >= NUM_LOSSES_OF_SUSPECTS:
                self._suspect([group])
        return []

    def forgive_worker(self, worker_id: str) -> None:
        """What failed on this worker was its own fault, or that of a process which is gone: it counts no more."""
        for incidents in (*self._incidents.values(), *self._of_paused.values()):
            incidents.failed_on.pop(worker_id, None)
            incidents.disbelieved_on.discard(worker_id)
        for group, incidents in list(self._incidents.items()):
            if not incidents.failed_on and not incidents.num_losses:
                self._clear(group)

    def record_executed_step(self, plan: StepPlan) -> set[str]:
        """Clears who has come past the place where something happened.

        Returns other workers, whose answers about such a place could not be believed: they are at fault.
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
        """It has ended."""
        self._incidents.pop(group, None)
        self._of_paused.pop(group, None)
        self._leave_cohort(group)

    def suspend_group(self, group: SequenceGroup) -> None:
        """It is paused: no trial waits for it."""
        self._leave_cohort(group)
        if group in self._incidents:
            self._of_paused[group] = self._incidents.pop(group)

    def restore_group(self, group: SequenceGroup) -> None:
        """It is not paused any more. Who was under suspicion still is, in a cohort of its own."""
        incidents = self._of_paused.pop(group, None)
        if incidents is None:
            return
        self._incidents[group] = incidents
        if incidents.num_failed_steps or incidents.num_losses >= NUM_LOSSES_OF_SUSPECTS:
            self._suspect([group])

    def begin_turn(self, worker: WorkerState, workers: Collection[WorkerState]) -> bool:
        """Settles whose the next plan of a worker is. False: there is none before its pipeline has drained."""
        if worker.trial is not None:
            if worker.trial.groups:
                return True
            self._end_trial(worker)
        if not self._cohorts or worker.num_steps_between < worker.num_trial_steps:
            return True
        cohort = self._next_cohort(worker, workers)
        if cohort is not None and worker.in_flight:
            return False
        if cohort is not None:
            self._begin_trial(worker, workers, cohort)
        return True

    def pass_turn(self, worker: WorkerState, workers: Collection[WorkerState]) -> bool:
        """Those whose turn it is have nothing to do. Returns whether it is somebody else's now."""
        if worker.in_flight:
            return False
        if worker.trial is not None:
            self._end_trial(worker)
            return True
        cohort = self._next_cohort(worker, workers) if self._cohorts else None
        if cohort is not None:
            self._begin_trial(worker, workers, cohort)
        return cohort is not None

    def check(self) -> None:
        """Assert that suspects and cohorts know each other."""
        assert not any(group.is_paused for group in self._incidents)
        assert all(group.is_paused for group in self._of_paused)
        for cohort in self._cohorts:
            places = {group.worker_id for group in cohort.groups}
            assert len(places - {None}) <= 1, "a cohort is on two workers"
            assert places, "a cohort of nobody"
            for group in cohort.groups:
                assert group.cohort is cohort and not group.is_finished and group in self._incidents
                assert group.swap_step is None, "a suspect is swapped"

    def _note(
        self, plans: Iterable[StepPlan], suspects: Collection[SequenceGroup] | None = None
    ) -> dict[SequenceGroup, dict[Sequence, range]]:
        """Marks where they are. Returns the positions that these plans compute, of groups that have not ended."""
        spans: dict[SequenceGroup, dict[Sequence, range]] = {}
        for plan in plans:
            for sequence, position, num_tokens in zip(plan.sequences, plan.positions, plan.num_tokens, strict=True):
                if sequence.group.is_finished or (suspects is not None and sequence.group not in suspects):
                    continue
                there = spans.setdefault(sequence.group, {})
                there[sequence] = range(there[sequence].start if sequence in there else position, position + num_tokens)
                marks = self._of(sequence.group).marks
                marks[sequence] = max(position + num_tokens, marks.get(sequence, 0))
        return spans

    def _may_be_its_doing(self, group: SequenceGroup, spans: dict[Sequence, range]) -> bool:
        """Whether it had come back to where it was when a worker was lost before."""
        incidents = self._of(group)
        if not incidents.num_losses:
            return True
        return any(
            span.stop > before
            for sequence, span in spans.items()
            if (before := incidents.places.get(sequence)) is not None
        )

    def _of(self, group: SequenceGroup) -> Incidents:
        return (self._of_paused if group.is_paused else self._incidents).setdefault(group, Incidents())

    def _is_guilty(self, group: SequenceGroup, workers: Collection[WorkerState]) -> bool:
        """Of a step that failed with it alone. Not yet where it may be the workers' fault, and another can tell."""
        incidents = self._of(group)
        if incidents.num_failed_steps < MAX_FAILED_STEPS:
            return False
        return len(incidents.failed_on) >= MAX_WORKERS_TRIED or not any(
            may_take(worker, group, workers, self._limits)
            for worker in workers
            if worker.worker_id not in incidents.failed_on
        )

    def _verdict(self, group: SequenceGroup) -> Verdict:
        incidents = self._of(group)
        return Verdict(group, incidents.num_failed_steps, incidents.num_losses, incidents.num_lone_losses)

    def _suspect(self, groups: list[SequenceGroup]) -> None:
        """They are a cohort of their own from now on, those of each place.

        Who is paused has no part in it: `restore_group` suspects it when it goes on.
        """
        cohorts: dict[str | None, Cohort] = {}  # a cohort is on one worker at most
        for group in groups:
            if group.is_paused:
                continue
            self._leave_cohort(group)
            group.cohort = cohort = cohorts.setdefault(group.worker_id, Cohort())
            cohort.groups[group] = None
            self._waiting.quarantine(group)
        self._cohorts.update(dict.fromkeys(cohorts.values()))

    def _clear(self, group: SequenceGroup) -> None:
        del self._incidents[group]
        self._leave_cohort(group)
        self._waiting.release_from_quarantine(group)

    def _leave_cohort(self, group: SequenceGroup) -> None:
        cohort, group.cohort = group.cohort, None
        if cohort is not None:
            del cohort.groups[group]
            if not cohort.groups:
                del self._cohorts[cohort]

    def _next_cohort(self, worker: WorkerState, workers: Collection[WorkerState]) -> Cohort | None:
        is_one_tried = any(other is not worker and _is_trying(other) for other in workers)
        for cohort in self._cohorts:
            places = {group.worker_id for group in cohort.groups if group.worker_id is not None}
            if places == {worker.worker_id}:
                return cohort
            if places or is_one_tried:
                continue
            may_be_taken = any(may_take(worker, group, workers, self._limits) for group in cohort.groups)
            if may_be_taken and not self._is_for_another(worker, cohort, workers):
                return cohort
        return None

    def _is_for_another(self, worker: WorkerState, cohort: Cohort, workers: Collection[WorkerState]) -> bool:
        """Whether one of it failed there, and another worker, on which it did not, may take it."""
        return any(
            other.worker_id not in failed_on and may_take(other, group, workers, self._limits)
            for group in cohort.groups
            if worker.worker_id in (failed_on := self._incidents[group].failed_on)
            for other in workers
        )

    def _begin_trial(self, worker: WorkerState, workers: Iterable[WorkerState], cohort: Cohort) -> None:
        for other in workers:
            if other.trial is cohort:  # and has nobody of it
                self._end_trial(other)
        worker.trial = cohort
        worker.num_trial_steps = 0

    def _end_trial(self, worker: WorkerState) -> None:
        cohort, worker.trial = worker.trial, None
        worker.num_steps_between = 0
        if cohort in self._cohorts:
            del self._cohorts[cohort]
            self._cohorts[cohort] = None  # the others have theirs first


def _is_trying(worker: WorkerState) -> bool:
    """Whether one under suspicion is there, and has the turn."""
    return worker.trial is not None and any(group.worker_id == worker.worker_id for group in worker.trial.groups)
