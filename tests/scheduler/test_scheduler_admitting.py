"""Starts of groups from the queue: how many, of whom, and who is passed over. Blocks hold 4 tokens."""

from collections.abc import Iterable, Iterator

import pytest

from scheduler_svc.core.admitting import MAX_PASSED_OVER, GroupStarter, is_too_late, late_groups
from scheduler_svc.core.fetching import BlockFetches
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.sequence import Cohort, SequenceGroup
from scheduler_svc.core.swapping import insert_swapped, swap_out
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import PlannedStep, WorkerState
from tests.scheduler.worker_states import (
    cache_prompt,
    execute,
    launch_rows,
    make_group,
    make_new_group,
    make_worker,
    new_step,
    start,
)

NOW_S = 100.0


class Site:
    """A queue, a worker that starts groups from it, and others."""

    def __init__(self, worker: WorkerState, *others: WorkerState) -> None:
        self.queue = WaitingQueue()
        self.worker = worker
        self.workers = [worker, *others]
        fetches = BlockFetches("always", self.queue, {each.worker_id: each for each in self.workers})
        self._starter = GroupStarter(self.queue, WorkerLimits(max_num_seqs=16, pipeline_depth=2), fetches)
        self._num_groups = 0

    def push(
        self, prompt: list[int], *outputs: list[int], cohort: Cohort | None = None, priority: int = 0
    ) -> SequenceGroup:
        self._num_groups += 1
        group = make_new_group(prompt, *outputs, arrival=self._num_groups, max_tokens=4, priority=priority)
        self.queue.push(group)
        if cohort is not None:
            group.cohort = cohort
            cohort.groups[group] = None
            self.queue.quarantine(group)
        return group

    def swapped_out(self, *outputs: list[int]) -> SequenceGroup:
        """A group of six tokens, and its outputs, that the worker has swapped out."""
        self._num_groups += 1
        group = start(self.worker, make_group([1] * 6, *outputs, arrival=self._num_groups))
        launch_rows(self.worker, group)
        execute(self.worker)
        swap_out(self.worker, group, self.worker.next_step_id)
        group.move_to(GroupState.SWAPPED)
        insert_swapped(self.worker, group)
        return group

    def start_groups(self, budget: int = 64, preempted: Iterable[SequenceGroup] = ()) -> PlannedStep:
        """Start groups in a step that has preempted some."""
        step = new_step(self.worker)
        step.preempted += preempted
        self._starter.start_groups(self.worker, self.workers, step, budget, NOW_S)
        return step

    def start_suspects(self, budget: int = 64) -> PlannedStep:
        step = new_step(self.worker)
        self._starter.start_suspects(self.worker, self.workers, step, budget)
        return step


def running(*groups: SequenceGroup) -> list[bool]:
    return [group.state is GroupState.RUNNING for group in groups]


@pytest.mark.parametrize("is_trial", [False, True])
@pytest.mark.parametrize(
    ("budget", "num_tokens", "are_running"),
    [
        (0, [], [False, False]),
        (1, [1], [True, False]),
        (5, [5], [True, False]),
        (6, [5, 1], [True, False]),
        (7, [5, 1, 1], [True, True]),
        (20, [5, 1, 3], [True, True]),
    ],
)
def test_groups_start_while_there_are_tokens_to_spare(
    budget: int, num_tokens: list[int], are_running: list[bool], is_trial: bool
) -> None:
    site = Site(make_worker())
    if is_trial:
        site.worker.trial = Cohort()
    groups = [site.push([1] * 4, [2], [3], cohort=site.worker.trial), site.push([4] * 3, cohort=site.worker.trial)]
    step = site.start_suspects(budget) if is_trial else site.start_groups(budget)
    assert step.plan.num_tokens == num_tokens and running(*groups) == are_running
    assert [group in site.queue for group in groups] == [not is_running for is_running in are_running]


@pytest.mark.parametrize("lack", ["no seat", "parked"])
def test_nobody_is_passed_over_while_none_could_start(lack: str) -> None:
    """The deadline of the first has passed: it would be deferred."""
    site = Site(make_worker())
    group = site.push([1] * 4)
    group.deadline_s = NOW_S - 1
    seats = site.worker.free_seats
    if lack == "no seat":
        site.worker.free_seats = []
    else:
        site.worker.parked[make_new_group([1])] = None
    site.start_groups()
    assert group.state is GroupState.WAITING
    site.worker.free_seats = seats
    site.worker.parked.clear()
    site.start_groups()
    assert [group.state] == [GroupState.DEFERRED]


def test_who_fits_no_worker_is_passed_over_at_once() -> None:
    site = Site(make_worker())
    too_large, late, small = site.push([1] * 200), site.push([2] * 4), site.push([3] * 4)
    late.deadline_s = NOW_S - 1
    step = site.start_groups()
    assert [too_large.state, late.state] == [GroupState.DEFERRED] * 2
    assert step.plan.sequences == small.sequences and len(site.queue) == 0


def site_beside_a_full_worker() -> Site:
    """A small worker starts groups; a large one has no seat left."""
    site = Site(make_worker("small", num_blocks=4), make_worker("large"))
    site.workers[1].free_seats = []
    return site


def test_a_worker_starts_what_it_can_hold_behind_groups_that_only_larger_ones_can() -> None:
    site = site_beside_a_full_worker()
    large = [site.push([number] * 30) for number in (1, 2)]
    late, first, second = site.push([3] * 4), site.push([4] * 4), site.push([5] * 4)
    late.deadline_s = NOW_S - 1
    step = site.start_groups(budget=4)
    assert step.plan.sequences == first.sequences and running(*large, second) == [False] * 3
    assert site.queue.peek() is large[0] and late.state is GroupState.WAITING
    site.start_groups()
    assert running(*large, second) == [False, False, True]


def test_of_groups_that_only_larger_workers_can_hold_a_limited_number_is_passed_over() -> None:
    site = site_beside_a_full_worker()
    large = [site.push([1] * 30) for _ in range(MAX_PASSED_OVER)]
    small = site.push([2] * 4)
    assert not site.start_groups().plan.sequences
    site.queue.discard(large[0])
    site.start_groups()
    assert running(small) == [True]


def test_a_worker_leaves_nothing_behind_a_head_to_a_larger_one_that_is_to_start_that_head_first() -> None:
    """Regression: it had more blocks, so each group was left to it four times, though it waited for yet more."""
    site = Site(make_worker("small", num_blocks=4), make_worker("large", num_blocks=12))
    start(site.workers[1], make_group([9] * 24, arrival=100))
    head, *behind = site.push([1] * 30), site.push([2] * 4), site.push([3] * 4)
    assert site.workers[1].blocks.num_available_blocks == 6
    site.start_groups()
    assert running(head, *behind) == [False, True, True]


def swapping_site() -> Site:
    return Site(make_worker(num_host_blocks=8, preemption="swap"))


@pytest.mark.parametrize(("priority", "is_first"), [(None, True), (-1, False), (0, True), (1, True)])
def test_who_is_swapped_out_is_restored_before_the_head_unless_that_is_of_a_better_class(
    priority: int | None, is_first: bool
) -> None:
    """`priority`: of the head; None: nobody waits."""
    site = swapping_site()
    swapped = site.swapped_out([], [])
    groups = [swapped] if priority is None else [swapped, site.push([9] * 3, priority=priority)]
    step = site.start_groups()
    started = list(dict.fromkeys(sequence.group for sequence in step.plan.sequences))
    assert started == (groups if is_first else groups[::-1]) and len(step.plan.sequences) == len(groups) + 1
    assert not site.worker.swapped and len(step.plan.swap_in) == 2 * 2


@pytest.mark.parametrize("lack", ["seat", "block"])
def test_nobody_starts_before_who_is_swapped_out_has_room(lack: str) -> None:
    site = swapping_site()
    swapped, head = site.swapped_out([], []), site.push([9] * 3)
    seats, blocks = site.worker.free_seats, site.worker.blocks
    taken = blocks.allocate(blocks.num_available_blocks - 2 if lack == "block" else 0)
    site.worker.free_seats = seats[:1] if lack == "seat" else seats
    assert not site.start_groups().plan.sequences
    assert running(swapped, head) == [False, False] and site.worker.swapped == [swapped]
    site.worker.free_seats = seats
    blocks.free(taken)
    site.start_groups()
    assert running(swapped, head) == [True, True]


@pytest.mark.parametrize("has_preempted", [False, True])
def test_a_group_is_left_to_a_worker_that_has_its_prefix_unless_this_one_has_preempted_itself_idle(
    has_preempted: bool,
) -> None:
    site = Site(make_worker("a"), make_worker("b"))
    cache_prompt(site.workers[1], [1] * 8)
    preempted = start(site.worker, make_group([7], arrival=7))
    site.worker.preempt(preempted)
    group = site.push([1] * 9)
    site.start_groups(preempted=[preempted] * has_preempted)
    assert running(group) == [has_preempted] and group.num_times_left == (0 if has_preempted else 1)


def test_a_suspect_gets_room_from_the_last_outsiders_and_no_more_than_it_needs() -> None:
    site = Site(make_worker(num_blocks=6))
    others = [start(site.worker, make_group([arrival] * 8, arrival=arrival)) for arrival in (101, 102, 103)]
    site.worker.trial = Cohort()
    suspect = site.push([1] * 12, cohort=site.worker.trial)
    step = site.start_suspects()
    assert running(*others, suspect) == [True, False, False, True]
    assert step.preempted == [others[2], others[1]]


def test_a_suspect_waits_where_an_outsider_has_tokens_in_flight() -> None:
    site = Site(make_worker(num_blocks=4))
    others = [start(site.worker, make_group([arrival] * 8, arrival=arrival)) for arrival in (101, 102)]
    launch_rows(site.worker, *others)
    site.worker.trial = Cohort()
    suspect = site.push([1] * 12, cohort=site.worker.trial)
    step = site.start_suspects()
    assert running(*others, suspect) == [True, False, False]
    assert step.preempted == [others[1]] and suspect.state is GroupState.QUARANTINED


def test_without_a_trial_no_suspect_starts() -> None:
    site = Site(make_worker())
    suspect = site.push([1] * 4, cohort=Cohort())
    assert not site.start_suspects().plan.sequences and suspect.state is GroupState.QUARANTINED


def test_what_started_groups_find_in_the_cache_is_counted() -> None:
    for is_trial in (False, True):
        site = Site(make_worker())
        cache_prompt(site.worker, [1] * 4)
        if is_trial:
            site.worker.trial = Cohort()
        site.push([1] * 6, cohort=site.worker.trial)
        step = site.start_suspects() if is_trial else site.start_groups()
        assert step.plan.num_tokens == [2]
        assert (site.worker.num_prefix_query_tokens, site.worker.num_prefix_hit_tokens) == (6, 4)


def costs(tokens_per_s: float, step_tokens: float | None = None) -> PreemptionCosts:
    return PreemptionCosts(prefill_tokens_per_s=tokens_per_s, prefill_step_tokens=step_tokens)


def with_deadline(left_s: float, num_tokens: int = 20) -> SequenceGroup:
    group = make_new_group([1] * num_tokens)
    group.deadline_s = NOW_S + left_s
    return group


@pytest.mark.parametrize(("left_s", "is_late"), [(-0.5, True), (0.0, False), (0.5, False)])
def test_without_a_measured_speed_a_group_is_too_late_when_its_deadline_has_passed(
    left_s: float, is_late: bool
) -> None:
    assert is_too_late(with_deadline(left_s), [make_worker()], NOW_S) is is_late
    assert is_too_late(with_deadline(left_s), [], NOW_S) is is_late


@pytest.mark.parametrize(("left_s", "is_late"), [(-1.0, True), (1.5, True), (2.0, False), (9.0, False)])
def test_a_group_is_too_late_if_the_quickest_worker_could_not_compute_it(left_s: float, is_late: bool) -> None:
    """20 tokens at 10 a second."""
    workers = [make_worker("a"), make_worker("b"), make_worker("c")]
    workers[0].costs, workers[1].costs = costs(5.0), costs(10.0)
    assert is_too_late(with_deadline(left_s), workers, NOW_S) is is_late
    assert not is_too_late(make_new_group([1] * 20), workers, NOW_S), "it has no deadline"


@pytest.mark.parametrize(("step_tokens", "left_s"), [(16.0, 0.5), (32.0, 1.0), (64.0, 2.0), (128.0, 2.0), (None, 2.0)])
def test_steps_smaller_than_full_ones_are_taken_to_be_as_quick_as_full_ones(
    step_tokens: float | None, left_s: float
) -> None:
    """A full step has 64 tokens. 20 tokens at 10 a second."""
    worker = make_worker()
    worker.costs = costs(10.0, step_tokens)
    assert not is_too_late(with_deadline(left_s), [worker], NOW_S)
    assert is_too_late(with_deadline(left_s - 0.01), [worker], NOW_S)


@pytest.mark.parametrize(("left_s", "is_late"), [(-0.1, True), (1.1, True), (1.2, False)])
def test_what_the_worker_with_most_of_the_prefix_has_cached_takes_no_time(left_s: float, is_late: bool) -> None:
    """20 tokens at 10 a second, of which 8 are cached."""
    workers = [make_worker("a"), make_worker("b")]
    workers[0].costs = costs(10.0)
    cache_prompt(workers[0], [1] * 4)
    cache_prompt(workers[1], [1] * 8)
    assert is_too_late(with_deadline(left_s), workers, NOW_S) is is_late


class LookedAtWorkers(list[WorkerState]):
    """Workers that count how often somebody looks at all of them."""

    num_looks = 0

    def __iter__(self) -> Iterator[WorkerState]:
        self.num_looks += 1
        return super().__iter__()


def test_of_many_groups_with_time_to_spare_the_workers_are_looked_at_once() -> None:
    worker = make_worker()
    worker.costs = costs(10.0)
    late = with_deadline(1.0)
    workers = LookedAtWorkers([worker])
    assert late_groups([with_deadline(100.0) for _ in range(50)], workers, NOW_S) == []
    assert workers.num_looks == 1
    assert late_groups([with_deadline(100.0), late, with_deadline(100.0)], workers, NOW_S) == [late]


def test_a_group_that_has_run_is_never_too_late() -> None:
    worker = make_worker()
    worker.costs = costs(10.0)
    group = with_deadline(-1.0)
    assert is_too_late(group, [worker], NOW_S)
    group.move_to(GroupState.WAITING)
    start(worker, group)
    assert not is_too_late(group, [worker], NOW_S)
    worker.preempt(group)
    assert not is_too_late(group, [worker], NOW_S)
