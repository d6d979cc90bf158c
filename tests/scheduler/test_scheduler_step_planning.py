"""Plans of single steps: when there is one, what the worker is told, and what is counted. Blocks hold 4 tokens."""

from typing import Any

import pytest

from scheduler_svc.core.group_places import GroupPlaces
from scheduler_svc.core.incidents import Incidents
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.step_planning import StepPlanner
from scheduler_svc.core.trials import Trials
from tests.scheduler.worker_states import execute, make_new_group, make_worker


class Site:
    """A planner with one worker."""

    def __init__(self, *, pipeline_depth: int = 2, preempt_every: int | None = None, **options: Any) -> None:
        limits = WorkerLimits(max_num_seqs=16, pipeline_depth=pipeline_depth)
        config = SchedulerConfig(pipeline_depth=pipeline_depth, preempt_every=preempt_every)
        self.incidents: dict[SequenceGroup, Incidents] = {}
        self.places = GroupPlaces("fcfs", limits)
        self.trials = Trials(limits, self.incidents)
        self.worker = self.places.workers["w"] = make_worker(**options)
        self._planner = StepPlanner(config, limits, self.places, self.trials)
        self._num_groups = 0

    def push(self, num_tokens: int, **options: Any) -> SequenceGroup:
        self._num_groups += 1
        group = make_new_group([self._num_groups] * num_tokens, arrival=self._num_groups, **options)
        self.places.waiting.push(group)
        return group

    def suspect(self, group: SequenceGroup) -> None:
        self.incidents[group] = Incidents()
        self.trials.add_suspects([group])
        self.places.waiting.quarantine(group)

    def plan(self) -> StepPlan:
        plan = self._planner.plan_step(self.worker, 0.0)
        assert plan is not None and self.worker.in_flight[-1].plan is plan
        return plan

    def has_none(self) -> bool:
        num_in_flight = len(self.worker.in_flight)
        is_none = self._planner.plan_step(self.worker, 0.0) is None
        return is_none and len(self.worker.in_flight) == num_in_flight


def test_as_many_steps_are_in_flight_as_the_pipeline_holds_and_numbers_count_on() -> None:
    site = Site()
    site.push(3)
    assert [(plan.step_id, plan.snapshot) for plan in (site.plan(), site.plan())] == [(1, True), (2, False)]
    assert site.has_none()
    execute(site.worker)
    assert site.plan().step_id == 3 and site.has_none()


def test_a_snapshot_waits_for_the_steps_in_flight_and_describes_those_with_a_row_so_far() -> None:
    site = Site(max_num_batched_tokens=4)
    first, second = site.push(3), site.push(9)
    site.plan()
    site.worker.needs_snapshot = True
    assert site.has_none()
    execute(site.worker)
    site.worker.freed_seats, site.worker.unsent_swap_out = [7], [1, 2]
    third = site.push(1)
    plan = site.plan()
    assert plan.snapshot and not site.worker.needs_snapshot
    assert plan.whole == [*first.sequences, *second.sequences] and third.sequences[0] not in plan.whole
    assert plan.append_pairs == [] and plan.freed_seats == [] and plan.swap_out == [1, 2]
    assert site.worker.freed_seats == site.worker.unsent_swap_out == []
    assert plan.seats == [sequence.seat for sequence in plan.sequences]


def test_a_plan_tells_freed_seats_swaps_and_appended_blocks_once() -> None:
    site = Site()
    group = site.push(4)
    site.plan()
    site.worker.freed_seats, site.worker.unsent_swap_out = [7], [1, 2]
    plan = site.plan()
    (sequence,) = group.sequences
    assert (plan.freed_seats, plan.swap_out, plan.whole) == ([7], [1, 2], [])
    assert plan.append_pairs == [sequence.seat, sequence.block_table[1]]
    assert site.worker.freed_seats == site.worker.unsent_swap_out == []


def test_steps_of_trials_and_of_others_are_counted_apart() -> None:
    site = Site(pipeline_depth=1)
    suspect = site.push(3)
    site.suspect(suspect)
    for _ in range(3):
        site.plan()
        execute(site.worker)
    assert (site.worker.num_trial_steps, site.worker.num_steps_between) == (3, 0)
    site.push(3)
    site.trials.remove_suspect(suspect)
    site.places.waiting.release_from_quarantine(suspect)
    for _ in range(2):
        site.plan()
        execute(site.worker)
    assert (site.worker.num_trial_steps, site.worker.num_steps_between) == (3, 2)


def test_who_makes_room_for_a_suspect_waits_again() -> None:
    site = Site(num_blocks=4, pipeline_depth=1)
    other = site.push(8, max_tokens=4)
    site.plan()
    execute(site.worker)
    suspect = site.push(9, max_tokens=3)
    site.suspect(suspect)
    site.worker.num_steps_between = 9
    assert site.plan().sequences == suspect.sequences
    assert other in site.places.waiting and suspect not in site.places.waiting


@pytest.mark.parametrize(("preempt_every", "num_preemptions"), [(None, 0), (1, 5), (2, 3), (3, 2)])
def test_preemptions_are_forced_before_every_so_many_steps(preempt_every: int | None, num_preemptions: int) -> None:
    """Plan six steps: the first has nobody to preempt; one that is preempted starts again at once."""
    site = Site(preempt_every=preempt_every, pipeline_depth=1)
    group = site.push(3)
    for _ in range(6):
        site.plan()
        execute(site.worker)
    assert group.num_preemptions == num_preemptions


def test_a_group_that_a_plan_preempted_starts_again_in_it_only_if_it_has_no_rows() -> None:
    site = Site(preempt_every=2, pipeline_depth=1)
    first, second = site.push(3), site.push(3)
    site.plan()
    execute(site.worker)
    assert site.plan().sequences == first.sequences
    execute(site.worker)
    assert second in site.places.waiting
    assert site.plan().sequences == [*first.sequences, *second.sequences]


def test_without_anything_to_do_there_is_no_plan() -> None:
    site = Site()
    assert site.has_none() and site.worker.next_step_id == 1 and site.worker.needs_snapshot


def test_blocks_that_decoding_filled_are_in_the_cache_before_the_next_plan() -> None:
    site = Site(pipeline_depth=1)
    (sequence,) = site.push(3).sequences
    for _ in range(3):
        site.plan()
        execute(site.worker)
    assert site.worker.uncached == [sequence] and sequence.num_computed_tokens == 5
    site.plan()
    assert site.worker.uncached == [] and site.worker.blocks.is_findable(sequence.block_table[0])


def test_a_snapshot_has_the_blocks_that_its_own_rows_append_in_its_tables_alone() -> None:
    site = Site(pipeline_depth=1)
    (sequence,) = site.push(4).sequences
    site.plan()
    execute(site.worker)
    site.worker.needs_snapshot = True
    plan = site.plan()
    assert plan.whole == [sequence] and len(sequence.block_table) == 2 and plan.append_pairs == []
