"""Trials of suspected groups: which cohort may run where, and whose turn it is on each worker.

Trials and all other groups take turns on a worker. A trial begins with nothing in flight, once the others have had as
many steps as the trial before took, or have nothing to do. It ends when its suspects are cleared, have failed, or can
do nothing. So neither side starves, and a step that ends a worker in a trial is a step of the suspects alone. Suspects
that hold nothing on any worker are tried on one worker at a time, while the others serve.

Does not know why a group is suspected, beyond the workers that it has failed on; see `isolation`.
"""

from collections.abc import Collection, Iterable, Mapping

from scheduler_svc.core.incidents import Incidents
from scheduler_svc.core.placement import WorkerLimits, may_take
from scheduler_svc.core.sequence import Cohort, SequenceGroup
from scheduler_svc.core.worker_state import WorkerState


def may_run(worker: WorkerState, group: SequenceGroup) -> bool:
    """True if the group may have a row in the worker's next step: in a trial its cohort alone, else no suspect.

    While no group is suspected every group may run, and the step planner does not ask.
    """
    return group.cohort is worker.trial


class Trials:
    """Cohorts of suspects, in the order of their trials. A group is in one cohort at most."""

    def __init__(self, limits: WorkerLimits, incidents: Mapping[SequenceGroup, Incidents]) -> None:
        self._limits = limits
        self._incidents = incidents
        self._cohorts: dict[Cohort, None] = {}

    @property
    def has_suspects(self) -> bool:
        return bool(self._cohorts)

    def add_suspects(self, groups: Iterable[SequenceGroup]) -> None:
        """Make one new cohort of the groups on each worker, and one of those on none."""
        cohorts: dict[str | None, Cohort] = {}
        for group in groups:
            self.remove_suspect(group)
            group.cohort = cohort = cohorts.setdefault(group.worker_id, Cohort())
            cohort.groups[group] = None
        self._cohorts.update(dict.fromkeys(cohorts.values()))

    def remove_suspect(self, group: SequenceGroup) -> None:
        """Take a group out of its cohort; no-op if it has none."""
        cohort, group.cohort = group.cohort, None
        if cohort is not None:
            del cohort.groups[group]
            if not cohort.groups:
                del self._cohorts[cohort]

    def begin_turn(self, worker: WorkerState, workers: Collection[WorkerState]) -> bool:
        """Decide whose turn the worker's next plan is. False: no plan before its pipeline has drained."""
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
        """Give the turn to the other side, since this one has nothing to do. False: the other side has none either."""
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
        for cohort in self._cohorts:
            worker_ids = {group.worker_id for group in cohort.groups}
            assert len(worker_ids - {None}) <= 1, "a cohort is on two workers"
            assert worker_ids, "a cohort without a group"
            for group in cohort.groups:
                assert group.cohort is cohort and not group.is_finished and group in self._incidents
                assert group.swap_step is None, "a suspect is swapped"

    def _next_cohort(self, worker: WorkerState, workers: Collection[WorkerState]) -> Cohort | None:
        is_one_tried = any(other is not worker and _is_trying(other) for other in workers)
        for cohort in self._cohorts:
            worker_ids = {group.worker_id for group in cohort.groups if group.worker_id is not None}
            if worker_ids == {worker.worker_id}:
                return cohort
            if worker_ids or is_one_tried:
                continue
            may_be_taken = any(may_take(worker, group, workers, self._limits) for group in cohort.groups)
            if may_be_taken and not self._is_for_another(worker, cohort, workers):
                return cohort
        return None

    def _is_for_another(self, worker: WorkerState, cohort: Cohort, workers: Collection[WorkerState]) -> bool:
        """True if a group of the cohort failed on `worker`, and a worker on which it did not fail may take it."""
        return any(
            other.worker_id not in failed_on and may_take(other, group, workers, self._limits)
            for group in cohort.groups
            if worker.worker_id in (failed_on := self._incidents[group].failed_on)
            for other in workers
        )

    def _begin_trial(self, worker: WorkerState, workers: Iterable[WorkerState], cohort: Cohort) -> None:
        for other in workers:
            if other.trial is cohort:  # and has no group of it
                self._end_trial(other)
        worker.trial = cohort
        worker.num_trial_steps = 0

    def _end_trial(self, worker: WorkerState) -> None:
        cohort, worker.trial = worker.trial, None
        worker.num_steps_between = 0
        if cohort in self._cohorts:
            del self._cohorts[cohort]
            self._cohorts[cohort] = None  # the other cohorts are tried first


def _is_trying(worker: WorkerState) -> bool:
    """True if the worker is in a trial, and has a group of its cohort."""
    return worker.trial is not None and any(group.worker_id == worker.worker_id for group in worker.trial.groups)
