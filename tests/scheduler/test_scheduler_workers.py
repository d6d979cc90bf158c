"""Several workers on one queue, workers that come and go, steps that fail, snapshots. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.placement import MAX_TIMES_LEFT
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from tests.scheduler.core_cluster import Cluster, single

SHARED = [11, 12, 13, 14, 15, 16, 17, 18]  # two blocks


def make_cluster(workers: dict[str, int], *, depth: int = 1, budget: int = 64, num_seats: int = 8) -> Cluster:
    """`workers`: their pools, in blocks."""
    cluster = Cluster(
        SchedulerConfig(max_num_batched_tokens=budget, pipeline_depth=depth, watermark=0.0, max_num_seqs=8)
    )
    for worker_id, num_blocks in workers.items():
        cluster.add_worker(worker_id, num_blocks=num_blocks, num_seats=num_seats)
    return cluster


def test_the_head_goes_to_the_worker_with_more_blocks() -> None:
    cluster = make_cluster({"small": 10, "large": 20})
    a = cluster.add([1, 2, 3])
    assert cluster.start("small") is None
    assert cluster.start("large") is not None
    assert a.worker_id == "large"


def test_the_head_goes_to_the_worker_that_has_its_prefix() -> None:
    cluster = make_cluster({"a": 10, "b": 20})
    cluster.remove_worker("b")
    cluster.add([*SHARED, 1], 1)
    cluster.step("a")
    cluster.add_worker("b", num_blocks=20)
    late = cluster.add([*SHARED, 2], 1)
    assert cluster.start("b") is None
    assert late.group.num_times_left == 1
    plan = cluster.start("a")
    assert plan is not None and plan.positions == [8]
    assert late.worker_id == "a"
    assert late.group.num_times_left == 0  # should it wait again, it may be left to another as often


def test_requests_with_a_short_common_prefix_use_all_workers_and_with_a_long_one_the_worker_that_has_it() -> None:
    """`a` has the prefix; of eight requests that arrive one by one, and run on, it gets most if the prefix is long."""
    for num_shared, num_expected in ((4, range(3, 6)), (40, range(7, 9))):
        shared = list(range(100, 100 + num_shared))
        cluster = make_cluster({"a": 400})
        cluster.add([*shared, 1], 1)
        cluster.run_until_idle()
        cluster.add_worker("b", num_blocks=400)
        sequences = []
        for number in range(8):
            sequences.append(cluster.add([*shared, number + 2, *range(11)], 60))
            for _ in range(3):
                for worker_id in ("b", "a"):
                    if cluster.start(worker_id) is not None:
                        cluster.complete(worker_id)
        on_workers = [sequence.worker_id for sequence in sequences]
        assert None not in on_workers
        assert on_workers.count("a") in num_expected, (num_shared, on_workers)


def test_equal_workers_take_what_they_are_asked_for_first() -> None:
    cluster = make_cluster({"a": 10, "b": 10})
    a = cluster.add([1, 2, 3])
    assert cluster.start("b") is not None
    assert a.worker_id == "b"


def test_a_burst_is_spread_over_the_workers() -> None:
    cluster = make_cluster({"a": 40, "b": 40}, num_seats=4)
    sequences = [cluster.add([i + 1, 2, 3], 8) for i in range(8)]
    for _ in range(3):
        for worker_id in ("a", "b"):
            cluster.start(worker_id)
        for worker_id in ("a", "b"):
            if cluster.in_flight[worker_id]:
                cluster.complete(worker_id)
    assert sorted(s.worker_id or "" for s in sequences) == ["a"] * 4 + ["b"] * 4


def test_a_worker_without_a_seat_is_no_candidate() -> None:
    cluster = make_cluster({"better": 40}, num_seats=1)
    cluster.add([1, 2, 3], 9)
    cluster.step("better")
    cluster.add_worker("other", num_blocks=10)
    head = cluster.add([4, 5, 6], 9)
    assert cluster.start("other") is not None
    assert head.worker_id == "other"


def test_a_worker_that_has_the_prefix_but_no_room_for_the_rest_is_no_candidate() -> None:
    # 10 blocks: two cached, eight for 29 tokens. The head would need the cached two and one more.
    cluster = make_cluster({"better": 10})
    cluster.add([*SHARED, 1], 1)
    cluster.step("better")
    cluster.add(list(range(1, 30)), 3)
    cluster.step("better")
    assert cluster.stats("better").num_cached_blocks == 2
    cluster.add_worker("other", num_blocks=10)
    head = cluster.add([*SHARED, 2], 9)
    assert cluster.start("other") is not None
    assert head.worker_id == "other"


def test_a_worker_whose_next_step_is_full_is_no_candidate() -> None:
    cluster = make_cluster({"better": 40}, budget=8)
    cluster.add(list(range(1, 41)), 9)
    cluster.step("better")  # 8 of 40 tokens: the next step has no token to spare
    cluster.add_worker("other", num_blocks=10)
    head = cluster.add([4, 5, 6], 9)
    assert cluster.start("other") is not None
    assert head.worker_id == "other"


def test_an_idle_worker_does_not_wait_for_one_whose_pipeline_is_full() -> None:
    cluster = make_cluster({"better": 40})
    cluster.add([*SHARED, 1], 9)
    cluster.start("better")
    cluster.add_worker("other", num_blocks=10)
    head = cluster.add([*SHARED, 2], 9)
    assert cluster.start("other") is not None
    assert head.worker_id == "other"


def test_a_busy_worker_leaves_the_head_to_the_one_with_its_prefix_though_its_pipeline_is_full() -> None:
    cluster = make_cluster({"has prefix": 20, "other": 20})
    cluster.remove_worker("other")
    cluster.add([*SHARED, 1], 20)
    cluster.step("has prefix")
    cluster.add_worker("other", num_blocks=40)
    busy = cluster.add([99], 20)
    assert cluster.start("other") is not None
    assert busy.worker_id == "other"
    cluster.complete("other")
    assert cluster.start("has prefix") is not None
    head = cluster.add([*SHARED, 2], 1)
    for _ in range(MAX_TIMES_LEFT):
        cluster.step("other")
        assert head.seat is None
    cluster.step("other")  # the one with the prefix stands still: it has been waited for long enough
    assert head.worker_id is None and head.is_finished
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize("has_pin", [False, True])
@pytest.mark.parametrize(("num_of_other", "num_taken"), [(1, 4), (2, 6)])
def test_a_busy_worker_takes_no_more_than_twice_what_one_with_a_full_pipeline_would_have(
    num_of_other: int, num_taken: int, has_pin: bool
) -> None:
    cluster = make_cluster({"other": 52 if has_pin else 40})
    if has_pin:  # which is nothing to do
        pinned = cluster.add(list(range(50)), 1)
        cluster.run_until_idle()
        assert cluster.scheduler.workers.pin_blocks("other", "prefix", pinned.block_hashes[:12])
    for i in range(num_of_other):
        cluster.add([90 + i], 20)
    cluster.start("other")  # and its only step is in flight
    cluster.add_worker("busy", num_blocks=40)
    sequences = [cluster.add([10 + i], 20) for i in range(7)]  # one block each
    cluster.start("busy")
    assert [s.worker_id for s in sequences] == ["busy"] * num_taken + [None] * (7 - num_taken)
    cluster.complete("other")
    cluster.start("other")
    assert sequences[num_taken].worker_id == "other"


def test_one_with_a_full_pipeline_that_stands_still_is_not_waited_for_for_ever() -> None:
    cluster = make_cluster({"other": 40})
    cluster.add([90], 20)
    cluster.start("other")
    cluster.add_worker("busy", num_blocks=40)
    sequences = [cluster.add([10 + i], 20) for i in range(5)]
    for _ in range(MAX_TIMES_LEFT):
        cluster.step("busy")
        assert sequences[4].worker_id is None
    cluster.step("busy")
    assert sequences[4].worker_id == "busy"


def test_a_slow_worker_holds_up_nobody() -> None:
    cluster = make_cluster({"slow": 100, "quick": 40}, depth=2)
    sequences = [cluster.add([i + 1, 2, 3], 4) for i in range(8)]
    cluster.start("slow")
    cluster.start("slow")
    sequences += [cluster.add([i + 1, 5, 6], 4) for i in range(8)]
    for _ in range(40):
        while cluster.start("quick") is not None:
            pass
        if cluster.in_flight["quick"]:
            cluster.complete("quick")
    assert all(s.is_finished for s in sequences[8:])


def test_a_token_in_flight_of_a_preempted_sequence_does_not_hold_up_other_workers() -> None:
    cluster = make_cluster({"a": 3}, depth=2)
    victim = [cluster.add([10 * i + 1, 2, 3, 4], 8) for i in range(2)][1]
    cluster.start("a")
    cluster.start("a")
    assert victim.status is SequenceStatus.PREEMPTED and victim.num_pending_tokens == 1
    cluster.add_worker("b", num_blocks=10)
    new = cluster.add([77], 1)
    assert cluster.start("b") is not None
    assert new.worker_id == "b"
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_sequences_of_a_dead_worker_go_on_elsewhere_in_their_order() -> None:
    cluster = make_cluster({"a": 20}, depth=2)
    sequences = [cluster.add([i + 1, 2, 3, 4, 5], 6) for i in range(3)]
    cluster.start("a")
    cluster.start("a")
    cluster.complete("a")
    cluster.add_worker("b", num_blocks=20)
    late = cluster.add([9], 6)
    assert cluster.remove_worker("a") == sequences
    for s in sequences:
        assert (s.num_computed_tokens, s.num_pending_tokens, s.num_output_tokens) == (0, 0, 1)
        assert s.worker_id is None and s.seat is None and s.block_table == []
    cluster.scheduler.check()
    plan = cluster.start("b")
    assert plan is not None and plan.sequences == [*sequences, late]
    assert plan.num_tokens == [6, 6, 6, 1]
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert cluster.stats("b").num_recomputed_tokens == 3 * 6


def test_a_dead_worker_takes_pending_tokens_of_preempted_and_finished_sequences_along() -> None:
    cluster = make_cluster({"a": 4}, depth=2)
    a, b, c = (cluster.add([10 * i + 1, 2, 3, 4], 8) for i in range(3))
    cluster.start("a")
    cluster.start("a")
    assert c.status is SequenceStatus.PREEMPTED and c.num_pending_tokens == 1
    cluster.scheduler.finish(b)
    assert cluster.remove_worker("a") == [a]
    cluster.scheduler.check()
    assert c.num_pending_tokens == b.num_pending_tokens == 0
    cluster.add_worker("a", num_blocks=20)
    plan = cluster.start("a")
    assert plan is not None
    assert (plan.step_id, plan.snapshot, plan.sequences) == (1, True, [a, c])
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_sequence_that_no_present_worker_can_hold_steps_aside_and_waits_for_one() -> None:
    cluster = make_cluster({"large": 20})
    cluster.remove_worker("large")
    big = cluster.add(list(range(1, 41)), 8)  # 12 blocks
    small = cluster.add([1, 2], 2)
    cluster.add_worker("small", num_blocks=5)
    plan = cluster.start("small")
    assert plan is not None and plan.sequences == [small]
    cluster.scheduler.check()
    assert cluster.scheduler.waiting.size() == (1, 40)
    assert cluster.scheduler.stats().num_waiting == 1
    cluster.add_worker("large", num_blocks=20)
    plan = cluster.start("large")
    assert plan is not None and plan.sequences == [big]
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_sequence_is_not_started_where_it_could_not_end() -> None:
    cluster = make_cluster({"large": 12})
    cluster.add(list(range(1, 21)), 9)
    cluster.start("large")
    cluster.add_worker("small", num_blocks=8)
    big = cluster.add([1, 2, 3], 40)  # begins small, ends with 11 blocks
    assert cluster.start("small") is None  # though "large" has 7 blocks to spare, and a full pipeline
    cluster.complete("large")
    assert cluster.start("large") is not None
    assert big.worker_id == "large"
    assert cluster.scheduler.workers.max_tokens_that_fit() == 8 * 4


def test_a_worker_computes_no_more_tokens_in_a_step_than_it_can() -> None:
    cluster = make_cluster({}, budget=8)
    for worker_id, limit in [("weak", 3), ("strong", 100)]:
        cluster.scheduler.workers.add_worker(
            worker_id, num_blocks=20, block_size=4, num_seats=4, max_num_batched_tokens=limit
        )
        cluster.scheduler.add(single(Sequence(limit, list(range(1, 21)), 20, 4, frozenset())))
        plan = cluster.scheduler.schedule(worker_id)
        assert plan is not None and plan.num_tokens == [min(limit, 8)]


def test_a_stranded_sequence_can_be_cancelled() -> None:
    cluster = make_cluster({"small": 5})
    big = cluster.add(list(range(1, 41)), 8)
    assert cluster.start("small") is None
    cluster.scheduler.finish(big)
    assert cluster.scheduler.waiting.size() == (0, 0)
    cluster.assert_idle_and_unleaked()


def test_a_worker_is_added_once_and_with_the_block_size_of_the_others() -> None:
    cluster = make_cluster({"a": 10})
    with pytest.raises(ValueError, match="here already"):
        cluster.scheduler.workers.add_worker("a", num_blocks=10, block_size=4, num_seats=1)
    with pytest.raises(ValueError, match="has block size 8, worker a has 4"):
        cluster.scheduler.workers.add_worker("b", num_blocks=10, block_size=8, num_seats=1)
    with pytest.raises(ValueError, match="0 seats"):
        cluster.scheduler.workers.add_worker("b", num_blocks=10, block_size=4, num_seats=0)
    assert list(cluster.workers) == ["a"]


def test_hashes_are_made_anew_when_the_block_size_changes() -> None:
    cluster = make_cluster({"a": 10})
    s = cluster.add([*SHARED, 1], 4)
    cluster.step("a")
    assert len(s.block_hashes) == 2
    cluster.remove_worker("a")
    cluster.add_worker("b", num_blocks=40, block_size=2)
    cluster.step("b")
    assert len(s.block_hashes) == 5
    cluster.add([*SHARED, 2], 1)
    assert cluster.step("b").positions[1] == 8
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_rollback_takes_back_every_step_in_flight() -> None:
    cluster = make_cluster({"w": 20}, depth=2)
    a = cluster.add([1, 2, 3, 4], 8)
    cluster.step("w")
    b = cluster.add(SHARED, 8)
    cluster.start("w")
    cluster.start("w")
    assert (a.num_computed_tokens, a.num_pending_tokens, len(a.block_table)) == (6, 2, 2)
    cluster.fail_steps("w")
    cluster.scheduler.check()
    assert (a.status, a.num_computed_tokens, a.num_pending_tokens) == (SequenceStatus.RUNNING, 4, 0)
    assert (b.status, b.num_computed_tokens, b.num_pending_tokens) == (SequenceStatus.WAITING, 0, 0)
    assert b.seat is None and b.block_table == []
    plan = cluster.start("w")
    assert plan is not None
    assert (plan.step_id, plan.snapshot, plan.whole, plan.append_pairs) == (4, True, [a, b], [])
    assert plan.freed_seats == []
    assert plan.positions == [4, 0]  # what b had registered is forgotten
    cluster.run_until_idle()
    assert cluster.stats("w").num_recomputed_tokens == 0  # nothing of b had been computed
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()


def test_a_rollback_in_the_middle_of_a_prompt_goes_back_to_the_last_executed_chunk() -> None:
    cluster = make_cluster({"w": 20}, depth=2, budget=4)
    a = cluster.add(list(range(1, 15)), 2)
    cluster.step("w")
    cluster.start("w")
    cluster.start("w")
    assert a.num_computed_tokens == 12
    cluster.fail_steps("w")
    assert a.num_computed_tokens == 4
    assert cluster.stats("w").num_used_blocks == 4
    cluster.run_until_idle()
    again = cluster.add([*range(1, 15), 99], 1)
    cluster.run_until_idle()
    assert again.num_cached_tokens == 12  # chunks computed after the rollback are cached as others
    cluster.assert_outputs_are_unconstrained()


def test_a_rollback_does_not_touch_a_sequence_that_has_moved_on_to_another_worker() -> None:
    # 9 blocks: a takes 1, then 2; b, in the middle of its prompt, 8.
    cluster = make_cluster({"w": 9}, depth=2, budget=8)
    a = cluster.add([1, 2, 3, 4], 8)
    b = cluster.add(list(range(11, 41)), 2)
    cluster.start("w")
    assert b.num_computed_tokens == 4
    assert cluster.start("w") is None  # b gives way; its blocks are in use by the step in flight
    assert b.status is SequenceStatus.PREEMPTED and b.num_pending_tokens == 0
    cluster.add_worker("other", num_blocks=20)
    assert cluster.start("other") is not None
    assert (b.worker_id, b.num_computed_tokens) == ("other", 8)
    cluster.fail_steps("w")
    assert (b.worker_id, b.num_computed_tokens) == ("other", 8)
    assert a.status is SequenceStatus.WAITING
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_rollback_frees_what_waited_for_the_steps_and_lets_preempted_sequences_wait() -> None:
    cluster = make_cluster({"w": 4}, depth=2)
    a, b, c = (cluster.add([10 * i + 1, 2, 3, 4], 8) for i in range(3))
    cluster.start("w")
    cluster.start("w")
    assert c.status is SequenceStatus.PREEMPTED and c.num_pending_tokens == 1
    cluster.scheduler.finish(b)
    cluster.fail_steps("w")
    cluster.scheduler.check()
    assert c.num_pending_tokens == 0
    assert cluster.stats("w").num_used_blocks == 0  # a had been started in a step that failed
    plan = cluster.start("w")
    assert plan is not None and plan.sequences == [a, c]
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_the_first_plan_of_a_worker_is_a_snapshot_and_the_next_is_not() -> None:
    cluster = make_cluster({"w": 20})
    cluster.add([1, 2, 3], 4)
    assert cluster.step("w").snapshot
    assert not cluster.step("w").snapshot


def test_a_snapshot_asked_for_comes_when_no_step_is_in_flight_and_describes_all() -> None:
    cluster = make_cluster({"w": 20}, depth=2, budget=3)
    a, b = cluster.add([1, 2, 3], 8), cluster.add([4, 5, 6], 8)
    cluster.start("w")
    cluster.start("w")
    cluster.scheduler.request_snapshot("w")
    cluster.complete("w")
    assert cluster.start("w") is None
    cluster.complete("w")
    late = cluster.add([7, 8, 9], 8)
    plan = cluster.start("w")
    assert plan is not None and plan.snapshot
    assert plan.whole == [s for s in (a, b, late) if s.seat is not None]
    assert {a, b} <= set(plan.whole)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_who_cannot_be_taken_now_is_ahead_of_nobody() -> None:
    cluster = make_cluster({"large": 20, "small": 5})
    cluster.remove_worker("large")
    cluster.add(list(range(1, 41)), 8)  # 12 blocks
    assert len(cluster.scheduler.waiting) == cluster.scheduler.waiting.num_ahead(0, None) == 1  # nobody has looked yet
    assert cluster.start("small") is None
    assert len(cluster.scheduler.waiting) == cluster.scheduler.waiting.num_ahead(0, None) == 0
    assert cluster.scheduler.waiting.size() == (1, 40)
    cluster.add_worker("large", num_blocks=20)
    assert len(cluster.scheduler.waiting) == cluster.scheduler.waiting.num_ahead(0, None) == 1


@pytest.mark.parametrize("is_new_leader", [False, True])
def test_a_request_that_goes_on_counts_no_cached_tokens_but_those_of_its_prompt_when_it_first_ran(
    is_new_leader: bool,
) -> None:
    cluster = make_cluster({"a": 40})
    workers = cluster.scheduler.workers
    before = cluster.add([*SHARED, 1], 12)
    cluster.run_until_idle()
    cluster.add_worker("b", num_blocks=40)
    workers.drain_worker("a")
    if is_new_leader:
        group = cluster.new_group([*SHARED, 1], 1, 12)
        group.sequences[0].token_ids = before.token_ids[:-2]
        cluster.scheduler.add(group)
    else:
        group = cluster.add([*SHARED, 1], 12).group
        while group.sequences[0].num_output_tokens < 10:
            cluster.step("b")
    (sequence,) = group.sequences
    workers.undo_drain("a")
    cluster.remove_worker("b")
    plan = cluster.start("a")
    assert plan is not None and plan.positions == [16]  # with its output all blocks are found
    assert sequence.num_cached_tokens == 0
    work = cluster.scheduler.stats().work
    assert (work.num_prefix_query_tokens, work.num_prefix_hit_tokens) == (9 + 9 * (not is_new_leader), 0)
    cluster.scheduler.check()
