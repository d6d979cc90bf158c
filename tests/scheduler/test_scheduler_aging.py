"""Flood of a better priority class: the others are still served, and a class stays first come, first served."""

import random
from collections import defaultdict

import pytest

from scheduler_svc.core.aging import PROMOTED_PRIORITY, STARTS_PER_PROMOTION, Aging
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.ordering import OrderPolicy, running_rank
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.waiting_queue import WaitingQueue
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.worker_states import make_new_group, pop_head

PATIENCE_S = 16.0  # looked at once per second
ENDLESS_S = 1e9


def make_cluster(
    *,
    patience_s: float = PATIENCE_S,
    max_num_seqs: int = 1,
    num_blocks: int = 100,
    num_host_blocks: int = 0,
    preemption: PreemptionMode = "recompute",
    order: OrderPolicy = "fcfs",
) -> Cluster:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        pipeline_depth=1,
        watermark=0.0,
        preemption=preemption,
        priority_patience_s=patience_s,
        order=order,
    )
    cluster = Cluster(config)
    cluster.add_worker(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    return cluster


def second(cluster: Cluster) -> StepPlan:
    cluster.now_s += 1.0
    return cluster.step()


def test_an_overtaken_group_is_served_when_its_patience_has_passed_and_not_before() -> None:
    cluster = make_cluster()
    low = cluster.add([1], 1, priority=1000)
    while not low.is_finished:
        cluster.add([2], 1, priority=-1000)
        second(cluster)
        assert cluster.now_s <= PATIENCE_S + STARTS_PER_PROMOTION + 3
    assert cluster.now_s > PATIENCE_S


def test_the_time_that_a_group_ran_is_no_time_that_it_waited() -> None:
    """Regression: a group that had run for long was promoted a moment after its preemption."""
    cluster = make_cluster(max_num_seqs=8, num_blocks=12)
    low = cluster.add([1], 44, priority=5)
    while cluster.now_s < 2 * PATIENCE_S:
        cluster.add([2], 1, priority=0)
        second(cluster)
    assert low.group.priority == 5 and low.group.state is GroupState.RUNNING
    cluster.add([3], 40, priority=0)
    while not low.group.is_preempted:
        second(cluster)
    preempted_s = cluster.now_s
    while low.group.priority == 5:
        cluster.add([2], 1, priority=0)
        second(cluster)
    assert cluster.now_s >= preempted_s + PATIENCE_S


def test_a_promotion_is_that_of_a_preempted_group_before_an_earlier_deadline_that_came_later() -> None:
    queue, aging = WaitingQueue("edf"), Aging("edf", PATIENCE_S)
    early, late = make_new_group([1], arrival=0, priority=1), make_new_group([1], arrival=1, priority=1)
    early.deadline_s, late.deadline_s = 900.0, 500.0
    early.live[0].status = SequenceStatus.PREEMPTED
    for group in (early, late):
        group.order = running_rank("edf", group)
        queue.push(group)
    aging.age(queue, [], 0.0)
    for served in range(STARTS_PER_PROMOTION):
        queue.push(make_new_group([1], arrival=2 + served))
        pop_head(queue)
    queue.push(make_new_group([1], arrival=100))
    aging.age(queue, [], PATIENCE_S + 1)
    assert (early.priority, late.priority) == (PROMOTED_PRIORITY, 1)


def test_a_group_is_promoted_at_the_moment_its_patience_has_passed() -> None:
    cluster = make_cluster()
    low = cluster.add([1], 1, priority=1000)
    cluster.add([2], 1)
    second(cluster)
    since_s = low.group.waits_since_s
    assert since_s == cluster.now_s
    while cluster.now_s < since_s + PATIENCE_S:
        assert low.group.priority == 1000
        cluster.add([2], 1)
        second(cluster)
    assert low.group.priority == PROMOTED_PRIORITY


def test_without_a_better_class_nobody_is_promoted() -> None:
    """Preempted groups stay before later arrivals, however long all of them wait."""
    cluster = make_cluster(max_num_seqs=2, num_blocks=8, num_host_blocks=8, preemption="swap")
    sequences = [cluster.add([i, 1, 2, 3], 12) for i in range(8)]
    while not all(each.is_finished for each in sequences):
        cluster.now_s += PATIENCE_S
        cluster.step()
        assert all(each.group.priority == 0 for each in sequences)


@pytest.mark.parametrize("seed", range(20))
def test_one_class_is_served_with_aging_as_without(seed: int) -> None:
    def starts(patience_s: float) -> list[list[int]]:
        draw = random.Random(seed)
        cluster = make_cluster(
            patience_s=patience_s, max_num_seqs=3, num_blocks=9, num_host_blocks=draw.choice([0, 6]), preemption="swap"
        )
        rows = []
        for _ in range(60):
            for _ in range(draw.choice([0, 0, 1, 3])):
                cluster.add([draw.randint(1, 9) for _ in range(draw.randint(1, 8))], draw.randint(1, 12))
            cluster.now_s += draw.choice([0.1, 1.0, 20.0])
            plan = cluster.start()
            if plan is not None:
                rows.append([each.seq_id for each in plan.sequences])
                cluster.complete()
        return rows

    assert starts(1.0) == starts(ENDLESS_S)


def test_a_promoted_group_is_not_preempted_for_those_that_it_was_overtaken_by() -> None:
    """4 blocks of 4 tokens: two groups of 16 tokens do not fit together."""
    cluster = make_cluster(max_num_seqs=2, num_blocks=4)
    low = cluster.add([1, 2, 3, 4], 12, priority=5)
    cluster.add([5, 6, 7, 8], 12)
    num_preemptions: int | None = None
    while not low.is_finished:
        if sum(not each.is_finished for each in cluster.sequences) < 3:
            cluster.add([5, 6, 7, 8], 12)
        second(cluster)
        if low.group.priority == PROMOTED_PRIORITY and num_preemptions is None:
            num_preemptions = low.group.num_preemptions
        assert cluster.now_s < 1000
    assert low.group.num_preemptions == num_preemptions
    cluster.assert_outputs_are_unconstrained()


def test_a_group_that_is_swapped_out_is_not_starved_either() -> None:
    cluster = make_cluster(max_num_seqs=2, num_blocks=5, num_host_blocks=5, preemption="swap")
    low = cluster.add([1, 2, 3, 4], 12, priority=5)
    second(cluster)
    for _ in range(2):
        cluster.add([5, 6, 7, 8], 12)
    while low.group.swap_step is None:
        second(cluster)
    swapped_s = cluster.now_s
    while not low.is_finished:
        if sum(not each.is_finished for each in cluster.sequences) < 4:
            cluster.add([5, 6, 7, 8], 12)
        second(cluster)
        assert cluster.now_s < swapped_s + PATIENCE_S + 200
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.long
@pytest.mark.parametrize("order", ["fcfs", "edf"])
@pytest.mark.parametrize("seed", range(25))
def test_under_any_flood_nobody_starves_and_nobody_of_the_same_class_is_overtaken(
    seed: int, order: OrderPolicy
) -> None:
    """One group is served a second. The bound: its patience, and 8 starts for each of those before it in its class,
    or in classes that have waited as long.
    """
    draw = random.Random(seed)
    cluster = make_cluster(order=order)
    came_s: dict[Sequence, float] = {}
    class_of: dict[Sequence, int] = {}
    started: list[Sequence] = []
    classes = draw.sample(range(-1000, 1001), 3)
    rare = {priority: draw.choice([3, 10, 40]) for priority in classes}
    best = min(classes)
    for moment in range(400):
        wanted = [p for p in classes if p != best and moment % rare[p] == 0 and moment < 100]
        for priority in [best] * draw.choice([1, 1, 1, 2]) + wanted:
            sequence = cluster.add([1 + moment % 9], 1, priority=priority)
            came_s[sequence], class_of[sequence] = cluster.now_s, priority
        plan = second(cluster)
        started += plan.sequences
    by_class: dict[int, list[int]] = defaultdict(list)
    for sequence in started:
        by_class[class_of[sequence]].append(sequence.seq_id)
    assert all(numbers == sorted(numbers) for numbers in by_class.values())
    num_low = sum(class_of[each] != best for each in came_s)
    num_low_started = sum(class_of[each] != best for each in started)
    num_promotions = sum(each.group.priority == PROMOTED_PRIORITY for each in started)
    assert num_promotions <= 400 / STARTS_PER_PROMOTION
    waited_s = 400 - PATIENCE_S - 100
    assert num_low_started >= min(num_low, waited_s / STARTS_PER_PROMOTION)


def test_of_many_starts_an_eighth_goes_to_those_who_were_overtaken() -> None:
    """32 groups are served in a second: four of them are of the others."""
    cluster = make_cluster(max_num_seqs=32)
    low = [cluster.add([1], 1, priority=1) for _ in range(200)]
    for _ in range(40):
        for _ in range(64):
            cluster.add([2], 1)
        second(cluster)
    num_after_patience = sum(each.is_finished for each in low)
    num_looks = 40 - PATIENCE_S
    num_due = num_looks * 32 / STARTS_PER_PROMOTION
    assert 0.8 * num_due <= num_after_patience <= num_due + 1


def test_a_patience_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="priority_patience_s is 0: give seconds, more than 0"):
        SchedulerConfig(priority_patience_s=0)


def test_the_queue_is_looked_at_when_a_sixteenth_of_the_patience_has_passed_and_not_before() -> None:
    queue, aging = WaitingQueue(), Aging("fcfs", PATIENCE_S)
    seen_s = []
    for arrival, now_s in enumerate((100.0, 100.5, 101.0, 101.5)):
        queue.push(make_new_group([1], arrival=arrival))
        aging.age(queue, [], now_s)
        seen_s.append([group.waits_since_s for group in sorted(queue, key=lambda each: each.arrival)])
    assert seen_s == [[100.0], [100.0, None], [100.0, 101.0, 101.0], [100.0, 101.0, 101.0, None]]


def test_the_first_is_promoted_once_eight_were_served() -> None:
    queue, aging = WaitingQueue(), Aging("fcfs", PATIENCE_S)
    low = make_new_group([1], arrival=0, priority=1)
    queue.push(low)
    aging.age(queue, [], 0.0)
    for served in range(1, STARTS_PER_PROMOTION + 1):
        queue.push(make_new_group([1], arrival=served))
        pop_head(queue)
        queue.push(make_new_group([1], arrival=100 + served))
        aging.age(queue, [], PATIENCE_S + served)
        assert (low.priority == PROMOTED_PRIORITY) is (served == STARTS_PER_PROMOTION)
