"""Preemption when blocks run out: the choice of group, its return, and its complete output.

Blocks hold 4 tokens. A sequence of 4k + 1 tokens needs k + 1 blocks.
"""

from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from tests.scheduler.core_cluster import Cluster


def make_cluster(
    *,
    num_blocks: int,
    depth: int = 1,
    watermark: float = 0.0,
    budget: int = 64,
    enable_prefix_cache: bool = False,
    preempt_every: int | None = None,
) -> Cluster:
    cluster = Cluster(
        SchedulerConfig(
            max_num_batched_tokens=budget,
            watermark=watermark,
            pipeline_depth=depth,
            enable_prefix_cache=enable_prefix_cache,
            preempt_every=preempt_every,
        )
    )
    cluster.add_worker(num_blocks=num_blocks)
    return cluster


def add_fours(cluster: Cluster, count: int, max_tokens: int = 8) -> list[Sequence]:
    """Sequences with prompts of exactly one block: each needs a second block for its first output token."""
    return [cluster.add([10 * i + 1, 2, 3, 4], max_tokens) for i in range(count)]


def test_the_last_arrived_gives_way_to_those_before_it() -> None:
    cluster = make_cluster(num_blocks=4)
    a, b, c = add_fours(cluster, 3)
    assert cluster.step().sequences == [a, b, c]  # 3 of 4 blocks
    plan = cluster.step()  # a takes the fourth, b takes that of c
    assert plan.sequences == [a, b]
    assert c.status is SequenceStatus.PREEMPTED
    assert (c.num_computed_tokens, c.num_output_tokens, c.block_table, c.seat) == (0, 1, [], None)
    assert (c.num_preemptions, cluster.stats().num_preemptions) == (1, 1)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_low_priority_gives_way_before_late_arrival() -> None:
    cluster = make_cluster(num_blocks=4)
    low = cluster.add([1, 2, 3, 4], 8, priority=1)
    others = [cluster.add([5, 6, 7, 8], 8), cluster.add([9, 10, 11, 12], 8)]
    assert cluster.step().sequences == [*others, low]
    assert cluster.step().sequences == others
    assert low.status is SequenceStatus.PREEMPTED


def test_a_sequence_that_is_last_itself_gives_way_itself() -> None:
    # a has 2 blocks and room for 3 more tokens when b needs its second block.
    cluster = make_cluster(num_blocks=3)
    a, b = cluster.add([1, 2, 3, 4, 5], 3), cluster.add([6, 7, 8, 9], 8)
    cluster.step()
    assert cluster.step().sequences == [a]
    assert b.status is SequenceStatus.PREEMPTED
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_preempted_sequence_comes_back_with_prompt_and_output_as_one_prefill() -> None:
    cluster = make_cluster(num_blocks=3)
    a, b = cluster.add([1, 2, 3, 4, 5], 3), cluster.add([6, 7, 8, 9], 8)
    cluster.step()
    cluster.step()
    cluster.step()  # a has its three tokens
    assert a.is_finished
    plan = cluster.step()
    assert (plan.sequences, plan.whole, plan.positions, plan.num_tokens) == ([b], [b], [0], [5])
    assert cluster.stats().num_recomputed_tokens == 4


def test_a_group_counts_as_served_each_time_it_leaves_the_queue() -> None:
    cluster = make_cluster(num_blocks=4)
    sequences = add_fours(cluster, 3)
    assert cluster.scheduler.waiting.num_served == 0
    cluster.run_until_idle()
    num_preemptions = sum(sequence.group.num_preemptions for sequence in sequences)
    assert num_preemptions
    assert cluster.scheduler.waiting.num_served == len(sequences) + num_preemptions


def test_nothing_new_starts_while_a_preempted_sequence_waits() -> None:
    cluster = make_cluster(num_blocks=4)
    c = add_fours(cluster, 3)[2]
    cluster.step()
    cluster.step()
    assert c.status is SequenceStatus.PREEMPTED
    new = cluster.add([99], 1)
    while new.status is SequenceStatus.WAITING:
        plan = cluster.step()
        assert new not in plan.sequences or c in plan.sequences
    assert c.num_computed_tokens > 0 or c.is_finished


def test_nothing_new_starts_where_a_preempted_sequence_waits_for_its_token() -> None:
    cluster = make_cluster(num_blocks=100, depth=3, preempt_every=2)
    a, b = cluster.add([1, 2, 3], 9), cluster.add([4, 5, 6], 9)
    cluster.start()
    cluster.start()
    new = cluster.add([7], 2)
    plan = cluster.start()
    assert plan is not None and plan.sequences == [a]
    assert (b.num_pending_tokens, new.status) == (1, SequenceStatus.WAITING)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_sequence_preempted_in_flight_keeps_its_token_and_waits_for_it() -> None:
    cluster = make_cluster(num_blocks=3, depth=2)
    a, b = add_fours(cluster, 2)
    cluster.start()  # both prompts: 2 of 3 blocks
    plan = cluster.start()  # a takes the third; b is preempted, its first token in flight
    assert plan is not None and plan.sequences == [a]
    assert b.status is SequenceStatus.PREEMPTED
    assert (b.num_pending_tokens, b.num_output_tokens) == (1, 0)
    # The blocks of b are in use until the step in flight is done.
    assert cluster.stats().num_used_blocks == 3
    assert cluster.scheduler.waiting.size() == (0, 0)
    assert cluster.scheduler.stats().num_waiting == 1
    assert b in cluster.complete()
    assert (b.num_pending_tokens, b.num_output_tokens) == (0, 1)
    assert cluster.stats().num_used_blocks == 2
    assert cluster.scheduler.waiting.size() == (1, 5)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_sequence_cancelled_while_its_token_is_in_flight_drops_it() -> None:
    cluster = make_cluster(num_blocks=3, depth=2)
    _, b = add_fours(cluster, 2)
    cluster.start()
    cluster.start()
    cluster.scheduler.finish(b)
    assert b not in cluster.complete()
    assert b.num_output_tokens == 0
    cluster.run_until_idle()
    cluster.assert_idle_and_unleaked()


def test_blocks_that_are_coming_free_are_waited_for_instead_of_preempting_more() -> None:
    # Four prompts of one block each in a pool of 4; all need a second block at once.
    cluster = make_cluster(num_blocks=4, depth=2)
    a, b, c, d = add_fours(cluster, 4)
    cluster.start()
    assert cluster.start() is None
    # d's block comes free for a, c's for b; both wait for the step in flight.
    assert [s.status.name for s in (a, b, c, d)] == ["RUNNING", "RUNNING", "PREEMPTED", "PREEMPTED"]
    cluster.complete()
    plan = cluster.start()
    assert plan is not None and plan.sequences == [a, b]
    assert cluster.stats().num_preemptions == 2


def test_admission_leaves_the_watermark_and_growth_uses_it() -> None:
    # 10 blocks, watermark 2: eight prompts of one block start, the ninth waits.
    cluster = make_cluster(num_blocks=10, watermark=0.2)
    sequences = add_fours(cluster, 9, max_tokens=4)
    assert cluster.step().sequences == sequences[:8]
    plan = cluster.step()
    assert len(plan.append_pairs) > 2 * 2  # more than two blocks, at the cost of the last ones
    assert cluster.scheduler.workers.max_tokens_that_fit() == 8 * 4
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_the_largest_sequence_that_fits_gets_done_beside_others() -> None:
    cluster = make_cluster(num_blocks=10, watermark=0.1, depth=2, budget=5)
    others = [cluster.add([i + 1, 2, 3], 20) for i in range(4)]
    largest = cluster.add(list(range(1, 17)), cluster.scheduler.workers.max_tokens_that_fit() - 16)
    others += [cluster.add([i + 1, 2, 3], 20) for i in range(4)]
    cluster.run_until_idle()
    assert largest.num_output_tokens == 20
    assert cluster.stats().num_preemptions > 0
    cluster.assert_outputs_are_unconstrained()


def test_a_preempted_sequence_finds_its_blocks_in_the_cache() -> None:
    cluster = make_cluster(num_blocks=8, enable_prefix_cache=True, preempt_every=2)
    a = cluster.add(list(range(1, 10)), 4)
    cluster.step()
    plan = cluster.step()  # preempted and, with nothing else to do, started again
    assert a.num_preemptions == 1
    assert (plan.positions, plan.num_tokens) == ([9], [1])
    assert cluster.stats().num_recomputed_tokens == 0
    assert a.num_cached_tokens == 0  # what it found of its own does not count as a hit
    assert cluster.stats().num_prefix_hit_tokens == 0


def test_forced_preemption_happens_as_often_as_asked() -> None:
    cluster = make_cluster(num_blocks=100, preempt_every=3)
    a, b = cluster.add([1, 2, 3], 9), cluster.add([4, 5, 6], 9)
    rows = [cluster.step().sequences for _ in range(6)]
    assert rows == [[a, b], [a, b], [a], [a, b], [a, b], [a]]  # back in the plan after the next
    assert (a.num_preemptions, b.num_preemptions) == (0, 2)


def test_forced_preemption_spares_a_prompt_that_is_not_through() -> None:
    cluster = make_cluster(num_blocks=100, budget=2, preempt_every=1)
    a = cluster.add([1, 2, 3, 4, 5], 2)
    cluster.run_until_idle(max_plans=20)
    assert a.num_output_tokens == 2


def test_a_worker_that_has_preempted_itself_idle_leaves_nothing_to_others() -> None:
    # The other has more blocks, but it was asked before there was something to take.
    cluster = make_cluster(num_blocks=10, preempt_every=2)
    a = cluster.add([1, 2, 3], 9)
    cluster.step()
    cluster.add_worker("larger", num_blocks=20)
    assert cluster.start("larger") is None
    assert cluster.step().sequences == [a]
    assert a.num_preemptions == 1
