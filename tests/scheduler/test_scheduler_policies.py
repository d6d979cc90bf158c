"""Order by deadline, work that comes too late, and pinned prefixes. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.ordering import OrderPolicy
from scheduler_svc.core.pins import PinRefusedError
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceStatus
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.core_executor import unconstrained_output

SHARED = [11, 12, 13, 14, 15, 16, 17, 18]  # two blocks


def make_cluster(
    *, order: OrderPolicy = "fcfs", num_blocks: int = 100, max_num_seqs: int = 16, depth: int = 1
) -> Cluster:
    cluster = Cluster(SchedulerConfig(order=order, watermark=0.0, pipeline_depth=depth, max_num_seqs=max_num_seqs))
    cluster.add_worker(num_blocks=num_blocks)
    return cluster


def cache_prefix(cluster: Cluster) -> list[bytes]:
    """Compute the shared prefix; its two blocks stay as cache."""
    sequence = cluster.add([*SHARED, 1], 1)
    cluster.run_until_idle()
    return sequence.block_hashes[:2]


def test_the_earliest_deadline_starts_first_within_a_priority() -> None:
    cluster = make_cluster(order="edf", max_num_seqs=1)
    deadlines = [None, 9.0, 5.0, 7.0]
    sequences = [cluster.add([i + 1], 1, deadline_s=deadline) for i, deadline in enumerate(deadlines)]
    urgent = cluster.add([9], 1, priority=-1)
    started = [cluster.step().sequences[0] for _ in range(5)]
    assert started == [urgent, sequences[2], sequences[3], sequences[1], sequences[0]]


def test_without_the_policy_deadlines_do_not_change_the_order() -> None:
    cluster = make_cluster(max_num_seqs=1)
    sequences = [cluster.add([i + 1], 1, deadline_s=deadline) for i, deadline in enumerate([9.0, 5.0])]
    assert [cluster.step().sequences[0] for _ in range(2)] == sequences


def test_the_latest_deadline_gives_way_and_is_not_overtaken_by_new_ones() -> None:
    cluster = make_cluster(order="edf", num_blocks=4)
    late = cluster.add([1, 2, 3, 4], 8, deadline_s=9.0)
    others = [cluster.add([i, 6, 7, 8], 8, deadline_s=5.0) for i in (5, 6)]
    assert cluster.step().sequences == [*others, late]
    assert cluster.step().sequences == others
    assert late.status is SequenceStatus.PREEMPTED
    new = cluster.add([7, 7], 2, deadline_s=1.0)
    while late.status is SequenceStatus.PREEMPTED:
        cluster.step()
        assert new.status is SequenceStatus.WAITING or late.status is not SequenceStatus.PREEMPTED
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_work_whose_deadline_has_passed_is_not_begun_and_is_named() -> None:
    cluster = make_cluster(max_num_seqs=1)
    running = cluster.add([1, 2], 3, deadline_s=2.0)
    cluster.step()
    passed, in_time = cluster.add([3], 1, deadline_s=4.0), cluster.add([4], 1, deadline_s=6.0)
    assert cluster.scheduler.expired_groups(4.0) == []
    assert cluster.scheduler.expired_groups(4.5) == [passed.group]  # what runs is not given up here
    cluster.step()
    cluster.step()
    assert running.is_finished
    plan = cluster.scheduler.schedule("w", now_s=4.5)
    assert plan is not None and plan.sequences == [in_time]
    cluster.scheduler.check()
    assert cluster.scheduler.waiting.size() == (1, 1)
    assert cluster.scheduler.expired_groups(4.5) == [passed.group]
    cluster.scheduler.finish_group(passed.group)
    assert cluster.scheduler.expired_groups(4.5) == []
    assert cluster.scheduler.waiting.size() == (0, 0)


def test_work_whose_prompt_would_take_too_long_is_named_and_what_was_estimated_anew_is_begun() -> None:
    cluster = make_cluster()
    cluster.scheduler.workers.record_costs("w", PreemptionCosts(swap_blocks_per_s=1.0, prefill_tokens_per_s=10.0))
    long = cluster.add(list(range(1, 31)), 1, deadline_s=5.0)  # 3 s at 10 tokens a second
    assert cluster.scheduler.expired_groups(2.0) == []
    assert cluster.scheduler.expired_groups(2.1) == [long.group]
    assert cluster.scheduler.schedule("w", now_s=2.1) is None
    cluster.scheduler.workers.record_costs("w", PreemptionCosts(swap_blocks_per_s=1.0, prefill_tokens_per_s=100.0))
    assert cluster.scheduler.expired_groups(2.1) == []
    plan = cluster.scheduler.schedule("w", now_s=2.1)
    assert plan is not None and plan.sequences == [long]


def test_what_is_cached_of_a_prompt_takes_no_time() -> None:
    cluster = make_cluster()
    cache_prefix(cluster)
    cluster.add_worker("bare", num_blocks=100)
    cluster.scheduler.workers.record_costs("w", PreemptionCosts(prefill_tokens_per_s=1.0))
    cached, other = cluster.add([*SHARED, 2], 1, deadline_s=5.0), cluster.add([9] * 9, 1, deadline_s=5.0)
    assert cluster.scheduler.expired_groups(3.0) == [other.group]  # 1 s is enough for one of them, 9 s are too long
    assert cluster.scheduler.expired_groups(4.5) == [cached.group, other.group]
    plan = cluster.scheduler.schedule("w", now_s=3.0)
    assert plan is not None and plan.sequences == [cached]


def test_the_quickest_worker_decides_what_is_in_time() -> None:
    cluster = make_cluster()
    cluster.add_worker("quick", num_blocks=100)
    long = cluster.add([1] * 30, 1, deadline_s=5.0)
    cluster.scheduler.workers.record_costs("w", PreemptionCosts(prefill_tokens_per_s=1.0))
    assert cluster.scheduler.expired_groups(2.0) == [long.group]
    cluster.scheduler.workers.record_costs("quick", PreemptionCosts(prefill_tokens_per_s=100.0))
    assert cluster.scheduler.expired_groups(2.0) == []
    cluster.remove_worker("quick")
    assert cluster.scheduler.expired_groups(2.0) == [long.group]


def test_steps_smaller_than_full_ones_do_not_make_a_long_prompt_hopeless() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=30))
    cluster.add_worker(num_blocks=100)
    long = cluster.add([1] * 60, 1, deadline_s=5.0)
    cluster.scheduler.workers.record_costs(
        "w", PreemptionCosts(prefill_tokens_per_s=6.0, prefill_step_tokens=3.0)
    )  # 0.5 s a step
    assert cluster.scheduler.expired_groups(4.0) == []  # two full steps, if they take no longer
    assert cluster.scheduler.expired_groups(4.1) == [long.group]
    cluster.scheduler.workers.record_costs("w", PreemptionCosts(prefill_tokens_per_s=6.0, prefill_step_tokens=30.0))
    assert cluster.scheduler.expired_groups(3.9) == [long.group]


def test_a_shared_prompt_is_estimated_once() -> None:
    cluster = make_cluster()
    cluster.scheduler.workers.record_costs("w", PreemptionCosts(prefill_tokens_per_s=10.0))
    group = cluster.add_group([1] * 20, 4, 5, deadline_s=5.0)
    assert cluster.scheduler.expired_groups(2.9) == []
    assert cluster.scheduler.expired_groups(3.1) == [group]


def test_dropped_work_does_not_keep_what_comes_after_it_waiting() -> None:
    cluster = make_cluster(order="edf", max_num_seqs=1)
    hopeless = [cluster.add([i + 1], 1, deadline_s=1.0 + i) for i in range(3)]
    good = cluster.add([9], 1, deadline_s=50.0)
    plan = cluster.scheduler.schedule("w", now_s=10.0)
    assert plan is not None and plan.sequences == [good]
    assert cluster.scheduler.expired_groups(10.0) == [sequence.group for sequence in hopeless]


def test_a_priority_class_comes_before_any_deadline_and_gives_way_after_it() -> None:
    cluster = make_cluster(order="edf", num_blocks=4)
    low = cluster.add([1, 2, 3, 4], 8, priority=1, deadline_s=1.0)
    others = [cluster.add([i, 6, 7, 8], 8, deadline_s=deadline) for i, deadline in ((5, None), (6, 90.0))]
    assert cluster.step().sequences == [others[1], others[0], low]
    assert cluster.step().sequences == [others[1], others[0]]
    assert low.status is SequenceStatus.PREEMPTED
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize("order", ["fcfs", "edf"])
def test_while_a_preempted_group_waits_only_a_class_above_it_is_admitted(order: OrderPolicy) -> None:
    # 5 blocks: the two take them all, and the third of a makes b give way, which then waits for 2 or more.
    cluster = make_cluster(order=order, num_blocks=5)
    a, b = cluster.add([1, 2, 3, 4], 12), cluster.add([5, 6, 7, 8], 12)
    while b.status is not SequenceStatus.PREEMPTED:
        cluster.step()
    same, above = cluster.add([9], 1, deadline_s=1.0), cluster.add([10], 1, priority=-1)
    while b.status is SequenceStatus.PREEMPTED:
        assert same.status is SequenceStatus.WAITING
        cluster.step()
    assert above.is_finished and a.num_output_tokens > 0
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_equal_deadlines_are_served_in_order_of_arrival() -> None:
    cluster = make_cluster(order="edf", max_num_seqs=1)
    sequences = [cluster.add([i + 1], 1, deadline_s=5.0) for i in range(4)]
    assert [cluster.step().sequences[0] for _ in range(4)] == sequences


def test_preempted_work_is_not_dropped_for_its_deadline() -> None:
    cluster = make_cluster(num_blocks=4)
    sequences = [cluster.add([10 * i + 1, 2, 3, 4], 8, deadline_s=1.0) for i in range(3)]
    cluster.step()
    cluster.step()
    assert sequences[2].status is SequenceStatus.PREEMPTED
    assert cluster.scheduler.expired_groups(100.0) == []


def test_work_that_had_output_before_a_restart_is_not_dropped_for_its_deadline() -> None:
    cluster = make_cluster()
    group = cluster.new_group([1, 2, 3, 4], 1, 8, deadline_s=1.0)
    group.sequences[0].token_ids += unconstrained_output([1, 2, 3, 4], 3, frozenset())
    cluster.scheduler.add(group)
    assert cluster.scheduler.expired_groups(100.0) == []
    assert cluster.scheduler.schedule("w", now_s=100.0) is not None


def test_pinned_blocks_are_not_evicted_and_unpinned_ones_are() -> None:
    cluster = make_cluster(num_blocks=6)
    hashes = cache_prefix(cluster)
    assert cluster.scheduler.workers.pin_blocks("w", "system prompt", hashes)
    cluster.scheduler.check()
    assert (cluster.stats().num_pinned_blocks, cluster.stats().num_used_blocks) == (2, 2)

    def fill_the_pool() -> None:
        cluster.add([1, 2, 3, 4, 5], cluster.scheduler.workers.max_tokens_that_fit() - 5)
        cluster.run_until_idle()

    fill_the_pool()
    again = cluster.add([*SHARED, 2], 1)
    cluster.run_until_idle()
    assert again.num_cached_tokens == 8
    cluster.scheduler.workers.unpin_blocks("w", "system prompt")
    cluster.scheduler.workers.unpin_blocks("w", "system prompt")
    fill_the_pool()
    gone = cluster.add([*SHARED, 3], 1)
    cluster.run_until_idle()
    assert gone.num_cached_tokens == 0
    assert not cluster.scheduler.workers.pin_blocks("w", "tail of it", [b"no such block"])
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()


def test_pins_count_against_what_may_be_admitted_and_a_block_of_two_pins_counts_once() -> None:
    cluster = make_cluster(num_blocks=6)
    hashes = cache_prefix(cluster)
    assert cluster.scheduler.workers.max_tokens_that_fit() == 24
    assert cluster.scheduler.workers.pin_blocks("w", "a", hashes) and cluster.scheduler.workers.pin_blocks(
        "w", "b", hashes[:1]
    )
    assert cluster.scheduler.workers.max_tokens_that_fit() == 16
    cluster.scheduler.workers.unpin_blocks("w", "a")
    assert cluster.scheduler.workers.max_tokens_that_fit() == 20
    with pytest.raises(ValueError, match="b is pinned on worker w already"):
        cluster.scheduler.workers.pin_blocks("w", "b", hashes)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_pin_that_would_break_a_promise_is_refused(is_running: bool) -> None:
    cluster = make_cluster(num_blocks=6)
    hashes = cache_prefix(cluster)
    promised = cluster.add([1, 2, 3], 15)  # 18 tokens: 5 blocks at its longest
    if is_running:
        cluster.step()
    with pytest.raises(PinRefusedError, match=r"would leave 4 KV blocks on worker w, .* may need 5"):
        cluster.scheduler.workers.pin_blocks("w", "too much", hashes)
    assert cluster.stats().num_pinned_blocks == 0
    assert cluster.scheduler.workers.pin_blocks("w", "less", hashes[:1])
    cluster.run_until_idle()
    assert promised.num_output_tokens == 15
    cluster.scheduler.workers.unpin_blocks("w", "less")
    cluster.assert_idle_and_unleaked()


def test_pins_may_take_all_blocks_where_nobody_needs_one() -> None:
    cluster = make_cluster(num_blocks=3)
    long, short = cluster.add(SHARED, 1), cluster.add([9, 9, 9, 9], 1)
    cluster.run_until_idle()
    for name, sequence in (("long", long), ("short", short)):
        assert cluster.scheduler.workers.pin_blocks("w", name, sequence.block_hashes)
    assert cluster.stats().num_pinned_blocks == 3


def test_a_waiting_group_that_fits_elsewhere_does_not_stand_in_the_way_of_a_pin() -> None:
    cluster = make_cluster(num_blocks=6)
    hashes = cache_prefix(cluster)
    cluster.add_worker("other", num_blocks=6)
    large = cluster.add([1, 2, 3], 20)
    assert cluster.scheduler.workers.pin_blocks("w", "prefix", hashes)
    assert cluster.start("w") is None
    assert cluster.start("other") is not None
    assert large.worker_id == "other"


def test_a_group_too_large_beside_a_pin_waits_until_it_is_gone() -> None:
    cluster = make_cluster(num_blocks=6)
    hashes = cache_prefix(cluster)
    assert cluster.scheduler.workers.pin_blocks("w", "prefix", hashes)
    large = cluster.add([1, 2, 3], 20)
    assert cluster.start() is None
    cluster.scheduler.workers.unpin_blocks("w", "prefix")
    assert cluster.step().sequences == [large]


def test_blocks_of_a_step_that_is_not_done_cannot_be_pinned() -> None:
    cluster = make_cluster(depth=2)
    sequence = cluster.add([*SHARED, 1], 5)
    cluster.start()
    assert not cluster.scheduler.workers.pin_blocks("w", "prefix", sequence.block_hashes[:2])
    cluster.complete()
    assert cluster.scheduler.workers.pin_blocks("w", "prefix", sequence.block_hashes[:2])
    cluster.run_until_idle()
    cluster.remove_worker("w")
    cluster.scheduler.check()


def test_an_order_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="order is 'lifo': give one of fcfs, edf"):
        SchedulerConfig(order="lifo")  # type: ignore[arg-type]
