"""Turns on a worker: the suspects have one in their trial, then the others."""

from collections import Counter

import pytest

from scheduler_svc.core.incidents import Incidents
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.sequence import Cohort, SequenceGroup
from scheduler_svc.core.trials import Trials
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.worker_states import execute, launch, launch_rows, make_group, make_worker, new_step, start


class Site:
    """Trials on workers `a`, `b` and `c`."""

    def __init__(self) -> None:
        self.incidents: dict[SequenceGroup, Incidents] = {}
        self.trials = Trials(WorkerLimits(max_num_seqs=16, pipeline_depth=2), self.incidents)
        self.workers = [make_worker(worker_id) for worker_id in "abc"]

    def suspect(self, *groups: SequenceGroup, failed_on: str = "") -> Cohort:
        """Make one cohort of groups that are on one worker or on none."""
        for group in groups:
            self.incidents[group] = Incidents(failed_on=Counter(failed_on))
        self.trials.add_suspects(groups)
        assert groups[0].cohort is not None
        return groups[0].cohort

    def begin_turn(self, worker: WorkerState) -> bool:
        return self.trials.begin_turn(worker, self.workers)

    def pass_turn(self, worker: WorkerState) -> bool:
        return self.trials.pass_turn(worker, self.workers)


@pytest.fixture
def site() -> Site:
    return Site()


def groups_of(num_groups: int) -> list[SequenceGroup]:
    return [make_group([1, 2, 3], arrival=arrival) for arrival in range(num_groups)]


def test_a_trial_begins_when_nothing_is_in_flight(site: Site) -> None:
    worker = site.workers[0]
    running, suspect = groups_of(2)
    launch_rows(worker, start(worker, running))
    assert site.begin_turn(worker), "without suspects there is always a turn"
    cohort = site.suspect(suspect)
    assert not site.begin_turn(worker) and worker.trial is None
    assert not site.pass_turn(worker) and worker.trial is None
    execute(worker)
    assert site.begin_turn(worker) and worker.trial is cohort


def test_a_trial_that_has_steps_in_flight_does_not_give_up_its_turn(site: Site) -> None:
    worker = site.workers[0]
    (suspect,) = groups_of(1)
    cohort = site.suspect(suspect)
    assert site.pass_turn(worker) and worker.trial is cohort
    launch(worker, new_step(worker))
    assert site.begin_turn(worker) and not site.pass_turn(worker) and worker.trial is cohort
    worker.complete_step()
    assert site.pass_turn(worker) and worker.trial is None


def test_steps_of_others_go_on_where_no_suspect_can_be_tried(site: Site) -> None:
    worker, other, _ = site.workers
    running, suspect = groups_of(2)
    launch_rows(worker, start(worker, running))
    site.suspect(start(other, suspect))
    assert site.begin_turn(worker) and worker.trial is None


def test_a_suspect_is_tried_on_the_worker_that_it_is_on(site: Site) -> None:
    worker, other, _ = site.workers
    (suspect,) = groups_of(1)
    cohort = site.suspect(start(other, suspect))
    assert site.begin_turn(worker) and not site.pass_turn(worker) and worker.trial is None
    assert site.begin_turn(other) and other.trial is cohort


def test_suspects_on_no_worker_are_tried_on_one_worker_at_a_time(site: Site) -> None:
    worker, other, _ = site.workers
    first, second, third = groups_of(3)
    cohort = site.suspect(first)
    assert site.begin_turn(worker) and worker.trial is cohort
    start(worker, first)
    site.suspect(second)
    assert site.begin_turn(other) and other.trial is None
    own = site.suspect(start(other, third))
    assert site.begin_turn(other) and other.trial is own, "its own suspects do not wait for that"


def test_a_worker_in_its_own_trial_is_no_other_worker_that_tries(site: Site) -> None:
    worker = site.workers[0]
    first, second = groups_of(2)
    site.suspect(start(worker, first))
    cohort = site.suspect(second)
    assert site.begin_turn(worker) and worker.trial is first.cohort
    site.trials.remove_suspect(first)
    assert site.begin_turn(worker) and worker.trial is cohort


def test_a_trial_moves_to_the_worker_that_begins_it_and_leaves_others_alone(site: Site) -> None:
    first, second, third = site.workers
    first.trial, third.trial = (cohort, other_cohort) = [site.suspect(group) for group in groups_of(2)]
    for worker in site.workers:
        worker.num_steps_between = worker.num_trial_steps = 5
    assert site.begin_turn(second)
    assert [worker.trial for worker in site.workers] == [None, cohort, other_cohort]
    assert [worker.num_steps_between for worker in site.workers] == [0, 5, 5]
    assert [worker.num_trial_steps for worker in site.workers] == [5, 0, 5]


def test_the_others_have_as_many_steps_as_the_trial_before_took(site: Site) -> None:
    worker = site.workers[0]
    cohort = site.suspect(*groups_of(1))
    worker.num_trial_steps = 3
    for worker.num_steps_between in range(3):
        assert site.begin_turn(worker) and worker.trial is None
    worker.num_steps_between = 3
    assert site.begin_turn(worker) and worker.trial is cohort


def test_cohorts_are_tried_by_turns(site: Site) -> None:
    worker = site.workers[0]
    cohorts = [site.suspect(group) for group in groups_of(3)]
    tried = []
    for _ in range(4):
        assert site.pass_turn(worker)
        tried.append(worker.trial)
        assert site.pass_turn(worker) and worker.trial is None
    assert tried == [*cohorts, cohorts[0]]


def test_a_trial_of_suspects_that_are_cleared_ends_and_is_forgotten(site: Site) -> None:
    worker = site.workers[0]
    suspect, other = groups_of(2)
    site.suspect(suspect)
    assert site.begin_turn(worker)
    worker.num_trial_steps = 1
    site.trials.remove_suspect(suspect)
    assert not site.trials.has_suspects
    site.suspect(other)
    assert site.begin_turn(worker) and worker.trial is None, "it is the turn of the others"


def test_a_suspect_is_tried_elsewhere_than_it_failed_if_it_can_be(site: Site) -> None:
    worker, other, third = site.workers
    (suspect,) = groups_of(1)
    cohort = site.suspect(suspect, failed_on="a")
    assert site.begin_turn(worker) and worker.trial is None
    other.is_draining = third.is_draining = True
    assert site.begin_turn(worker) and worker.trial is cohort


def test_a_suspect_that_failed_on_all_workers_is_tried_on_any(site: Site) -> None:
    cohort = site.suspect(*groups_of(1), failed_on="abc")
    assert site.begin_turn(site.workers[1]) and site.workers[1].trial is cohort


def test_a_suspect_that_no_worker_can_hold_is_not_tried(site: Site) -> None:
    site.suspect(make_group([1] * 200))
    assert site.trials.has_suspects and not site.pass_turn(site.workers[0])


def test_a_group_is_in_the_last_cohort_alone(site: Site) -> None:
    first, second = groups_of(2)
    before = site.suspect(first, second)
    after = site.suspect(first)
    assert (list(before.groups), list(after.groups)) == ([second], [first])
    site.trials.check()
