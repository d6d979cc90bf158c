"""The waiting queue under random changes: who is ahead of a newcomer is what a walk over all that wait finds.

What order the policies mean is tested in `test_scheduler_policies`.
"""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.ordering import OrderPolicy, newcomers_rank, running_rank, waiting_rank
from scheduler_svc.core.phases import BOTH_PHASES, Phase
from scheduler_svc.core.sequence import Cohort, Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.sorted_ranks import SortedRanks
from scheduler_svc.core.waiting_queue import WaitingQueue
from tests.scheduler.worker_states import make_new_group, pop_head

PRIORITIES = (-1, 0, 0, 2)
DEADLINES_S = (None, 3.0, 3.0, 8.0)
SETTINGS = settings(max_examples=60, stateful_step_count=60)


class QueueMachine(RuleBasedStateMachine):
    """Every rule is what the scheduler may do with a queue in that state; the model is who is in order."""

    @initialize(policy=st.sampled_from(["fcfs", "edf"]))
    def configure(self, policy: OrderPolicy) -> None:
        self.policy: OrderPolicy = policy
        self.queue = WaitingQueue(policy)
        self.num_groups = 0
        self.in_order: list[SequenceGroup] = []
        self.deferred: list[SequenceGroup] = []
        self.late: list[SequenceGroup] = []  # those deferred as such, and others since restored
        self.fetching: list[SequenceGroup] = []
        self.quarantined: list[SequenceGroup] = []
        self.elsewhere: list[SequenceGroup] = []  # running, say

    @rule(
        priority=st.sampled_from(PRIORITIES),
        deadline_s=st.sampled_from(DEADLINES_S),
        num_sequences=st.integers(1, 3),
    )
    def push(self, priority: int, deadline_s: float | None, num_sequences: int) -> None:
        self.num_groups += 1
        sequences = [Sequence(3 * self.num_groups + i, [1], 1, 4, frozenset()) for i in range(num_sequences)]
        group = SequenceGroup(sequences, arrival=self.num_groups, priority=priority, deadline_s=deadline_s)
        group.order = running_rank(self.policy, group)
        self.put(group)

    @precondition(lambda self: self.elsewhere)
    @rule(rng=st.randoms(use_true_random=False))
    def push_again_what_was_preempted(self, rng: Random) -> None:
        group = self.elsewhere.pop(rng.randrange(len(self.elsewhere)))
        for sequence in group.live:
            sequence.status = SequenceStatus.PREEMPTED
        self.put(group)

    @precondition(lambda self: self.elsewhere)
    @rule(rng=st.randoms(use_true_random=False))
    def suspect_one_that_does_not_wait(self, rng: Random) -> None:
        group = rng.choice(self.elsewhere)
        group.cohort = Cohort({group: None})

    def put(self, group: SequenceGroup) -> None:
        self.queue.push(group)
        (self.in_order if group.cohort is None else self.quarantined).append(group)

    @precondition(lambda self: self.in_order)
    @rule()
    def pop(self) -> None:
        group = pop_head(self.queue)
        assert group is min(self.in_order, key=lambda each: waiting_rank(self.policy, each))
        self.in_order.remove(group)
        group.move_to(GroupState.RUNNING)
        self.elsewhere.append(group)

    @precondition(lambda self: self.in_order)
    @rule(rng=st.randoms(use_true_random=False))
    def pop_another(self, rng: Random) -> None:
        group = self.remove_one(rng, self.in_order)
        num_served = self.queue.num_served
        self.queue.pop(group)
        assert self.queue.num_served == num_served + 1
        group.move_to(GroupState.RUNNING)
        self.elsewhere.append(group)

    @precondition(lambda self: self.in_order)
    @rule(rng=st.randoms(use_true_random=False), num_times=st.integers(1, 2))
    def change_phase(self, rng: Random, num_times: int) -> None:
        group = rng.choice(self.in_order)
        for _ in range(num_times):
            self.queue.change_phase(group)

    @precondition(lambda self: self.in_order)
    @rule(is_late=st.booleans())
    def defer_head(self, is_late: bool) -> None:
        group = self.queue.peek()
        assert group is not None
        self.queue.defer_head(is_late=is_late)
        self.in_order.remove(group)
        self.deferred.append(group)
        self.late = [each for each in self.late if each is not group] + [group] * is_late

    @rule()
    def restore_late(self) -> None:
        self.queue.restore_late()
        late, self.late = [group for group in self.deferred if group in self.late], []
        self.in_order += late
        self.deferred = [group for group in self.deferred if group not in late]

    @rule()
    def restore_deferred(self) -> None:
        self.queue.restore_deferred()
        self.in_order += self.deferred
        self.deferred, self.late = [], []

    @precondition(lambda self: self.in_order)
    @rule(rng=st.randoms(use_true_random=False))
    def hold(self, rng: Random) -> None:
        group = self.remove_one(rng, self.in_order)
        self.queue.hold(group)
        self.fetching.append(group)

    @precondition(lambda self: self.fetching)
    @rule(rng=st.randoms(use_true_random=False))
    def release(self, rng: Random) -> None:
        group = self.remove_one(rng, self.fetching)
        for _ in range(2):
            self.queue.release(group)
        self.in_order.append(group)

    @precondition(lambda self: self.in_order or self.deferred or self.fetching)
    @rule(rng=st.randoms(use_true_random=False))
    def quarantine(self, rng: Random) -> None:
        group = self.remove_one(rng, self.in_order, self.deferred, self.fetching)
        group.cohort = Cohort({group: None})
        self.queue.quarantine(group)
        self.quarantined.append(group)

    @precondition(lambda self: self.quarantined)
    @rule(rng=st.randoms(use_true_random=False), is_taken=st.booleans())
    def release_or_pop_quarantined(self, rng: Random, is_taken: bool) -> None:
        group = self.remove_one(rng, self.quarantined)
        if is_taken:
            self.queue.pop_quarantined(group)
            group.move_to(GroupState.RUNNING)
            self.elsewhere.append(group)
        else:
            group.cohort = None
            self.queue.release_from_quarantine(group)
            self.in_order.append(group)

    @precondition(lambda self: self.in_order or self.deferred or self.fetching or self.quarantined)
    @rule(rng=st.randoms(use_true_random=False))
    def discard(self, rng: Random) -> None:
        group = self.remove_one(rng, self.in_order, self.deferred, self.fetching, self.quarantined)
        self.queue.discard(group)
        group.move_to(GroupState.PAUSED)
        group.move_to(GroupState.PARKED)  # resumed, and its tokens are still to come
        self.elsewhere.append(group)

    @precondition(lambda self: any(len(each.live) > 1 for each in self.queue))
    @rule(rng=st.randoms(use_true_random=False))
    def finish_a_member(self, rng: Random) -> None:
        group = rng.choice(sorted((g for g in self.queue if len(g.live) > 1), key=lambda each: each.arrival))
        group.live[-1].status = SequenceStatus.FINISHED
        self.queue.resize(group)
        if group in self.deferred:
            self.deferred.remove(group)
            self.in_order.append(group)

    def remove_one(self, rng: Random, *places: list[SequenceGroup]) -> SequenceGroup:
        group = rng.choice([each for place in places for each in place])
        for place in places:
            if group in place:
                place.remove(group)
        return group

    @invariant()
    def the_first_are_those_of_a_sorted_list(self) -> None:
        in_order = sorted(self.in_order, key=lambda each: waiting_rank(self.policy, each))
        for phases in (BOTH_PHASES, {Phase.PREFILL}, {Phase.DECODE}):
            expected = [group for group in in_order if self.queue.phase_of(group) in phases]
            for num_groups in (0, 1, 3, 100):
                assert list(self.queue.first(num_groups, phases)) == expected[:num_groups]

    @invariant()
    def counts_are_those_of_a_walk(self) -> None:
        self.queue.check()
        ranks = [waiting_rank(self.policy, group) for group in self.in_order]
        assert len(self.queue) == len(ranks)
        for priority in (-2, *PRIORITIES, 1, 3):
            for deadline_s in (*DEADLINES_S, 1.0, 5.0):
                newcomers = newcomers_rank(self.policy, priority, deadline_s)
                num_ahead = sum(rank < newcomers for rank in ranks)
                assert self.queue.num_ahead(priority, deadline_s) == num_ahead


def test_a_newcomer_is_behind_those_whom_a_walk_over_all_finds_ahead() -> None:
    run_state_machine_as_test(QueueMachine, settings=SETTINGS)


def queue_of(num_groups: int) -> tuple[WaitingQueue, list[SequenceGroup]]:
    """Make a queue of groups of which the last is served first."""
    queue = WaitingQueue()
    groups = [make_new_group([1], arrival=number, priority=-number) for number in range(num_groups)]
    for group in groups:
        queue.push(group)
    return queue, groups


def test_a_group_of_another_rank_is_served_in_its_new_place() -> None:
    queue, (first, second, third) = queue_of(3)
    first.priority = -9
    first.order = running_rank("fcfs", first)
    queue.reorder(first)
    queue.check()
    assert queue.num_ahead(-9, None) == 1 and queue.num_ahead(0, None) == 3
    assert [pop_head(queue) for _ in range(3)] == [first, third, second]


@pytest.mark.parametrize(("num_groups", "num_left", "num_kept"), [(66, 1, 66), (67, 2, 67), (67, 1, 1), (72, 4, 72)])
def test_entries_of_groups_that_have_gone_are_swept_when_they_are_too_many(
    num_groups: int, num_left: int, num_kept: int
) -> None:
    queue, groups = queue_of(num_groups)
    for group in groups[num_left:]:
        queue.discard(group)
    assert sum(map(len, queue._heaps.values())) == num_kept


def test_groups_that_have_left_from_behind_the_head_are_not_passed_each_time() -> None:
    """Regression: while a head of 4,096 groups waited, finding the second took up to 3 ms."""
    queue = WaitingQueue()
    for arrival in range(2000):
        queue.push(make_new_group([1], arrival=arrival))
    for arrival in range(1, 1000):
        _, second = queue.first(2, BOTH_PHASES)
        assert second.arrival == arrival
        queue.pop(second)
    assert sum(map(len, queue._heaps.values())) - len(queue) < 100


def test_groups_are_served_in_order_after_a_sweep() -> None:
    queue, groups = queue_of(90)
    for group in groups[5:]:
        queue.discard(group)
    assert sum(map(len, queue._heaps.values())) < 90
    assert [pop_head(queue) for _ in range(5)] == groups[4::-1]
    assert queue.num_served == 5


class RanksMachine(RuleBasedStateMachine):
    """Ranks with runs so short that they are split, merged and emptied all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = SortedRanks(max_in_run=4)
        self.model: list[tuple[float, ...]] = []

    @rule(rank=st.tuples(st.integers(0, 3), st.integers(0, 20)))
    def add(self, rank: tuple[float, ...]) -> None:
        self.ranks.add(rank)
        self.model.append(rank)

    @precondition(lambda self: self.model)
    @rule(rng=st.randoms(use_true_random=False), is_first=st.booleans())
    def remove(self, rng: Random, is_first: bool) -> None:
        rank = min(self.model) if is_first else rng.choice(self.model)
        self.model.remove(rank)
        self.ranks.remove(rank)

    @invariant()
    def counts_are_those_of_a_walk(self) -> None:
        self.ranks.check()
        for below in [*self.model, (-1, 0), (1, 7.5), (9, 0)]:
            assert self.ranks.num_below(below) == sum(rank < below for rank in self.model)


@pytest.mark.long
def test_ranks_below_are_counted_as_by_a_walk_over_all() -> None:
    run_state_machine_as_test(RanksMachine, settings=SETTINGS)


def test_what_only_grows_at_its_end_is_counted_through_many_runs() -> None:
    ranks = SortedRanks(max_in_run=4)
    for arrival in range(100):
        ranks.add((0, arrival))
    ranks.check()
    assert [len(run) for run in ranks._runs] == [4] * 25  # full, not half full
    assert [ranks.num_below((0, arrival)) for arrival in (0, 50, 99, 1000)] == [0, 50, 99, 100]
    for arrival in range(0, 100, 2):
        ranks.remove((0, arrival))
    ranks.check()
    assert [ranks.num_below((0, arrival)) for arrival in (0, 50, 99, 1000)] == [0, 25, 49, 50]


def runs_of(ranks: SortedRanks) -> list[list[int]]:
    ranks.check()
    return [[int(number) for (number, *_) in run] for run in ranks._runs]


def test_runs_of_ranks_stay_short_and_few() -> None:
    ranks = SortedRanks(4)
    for number in range(0, 90, 10):
        ranks.add((float(number),))
    assert runs_of(ranks) == [[0, 10, 20, 30], [40, 50, 60, 70], [80]]  # of ranks that only grow runs are full
    ranks.add((25.0,))
    assert runs_of(ranks) == [[0, 10], [20, 25, 30], [40, 50, 60, 70], [80]]
    assert [ranks.num_below((number,)) for number in (-1.0, 25.0, 26.0, 40.0, 99.0)] == [0, 3, 4, 5, 10]
    for number in (10, 25):
        ranks.remove((float(number),))
    assert runs_of(ranks) == [[0], [20, 30], [40, 50, 60, 70], [80]]  # three are too many for one yet
    ranks.remove((30.0,))
    assert runs_of(ranks) == [[0], [20], [40, 50, 60, 70], [80]]
    ranks.remove((0.0,))
    assert runs_of(ranks) == [[20], [40, 50, 60, 70], [80]]
    for number in (40, 50, 60):
        ranks.remove((float(number),))
    assert runs_of(ranks) == [[20], [70, 80]]


@pytest.mark.parametrize(("policy", "num_ahead"), [("edf", [0, 1, 1, 2, 3]), ("fcfs", [3, 3, 3, 3, 3])])
def test_a_newcomer_is_behind_deadlines_no_later_than_its_own_where_these_order(
    policy: OrderPolicy, num_ahead: list[int]
) -> None:
    queue = WaitingQueue(policy)
    for arrival, deadline_s in enumerate((5.0, 3.0, None)):
        group = make_new_group([1], arrival=arrival, deadline_s=deadline_s)
        group.order = running_rank(policy, group)
        queue.push(group)
    assert [queue.num_ahead(0, deadline_s) for deadline_s in (1.0, 3.0, 4.0, 5.0, None)] == num_ahead
