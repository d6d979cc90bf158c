"""Groups that give way to the host pool and come back with what they had. Blocks hold 4 tokens.

The executor's host pool holds what was really copied, and every read of a context is checked against its tokens.
"""

import random

import pytest

from scheduler_svc.core.preemption import MAX_TRIAL_SWAPS, PreemptionCosts, PreemptionMode, prefers_swap
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.waiting_reasons import WaitingReason
from tests.scheduler.core_cluster import Cluster

PROMPT = [11, 12, 13, 14, 15, 16]  # a block and a half


def make_cluster(
    *,
    num_blocks: int = 100,
    num_host_blocks: int = 40,
    depth: int = 1,
    budget: int = 64,
    preemption: PreemptionMode = "swap",
    enable_prefix_cache: bool = False,
    preempt_every: int | None = None,
) -> Cluster:
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        watermark=0.0,
        pipeline_depth=depth,
        enable_prefix_cache=enable_prefix_cache,
        preemption=preemption,
        preempt_every=preempt_every,
    )
    cluster = Cluster(config)
    cluster.add_worker(num_blocks=num_blocks, num_seats=16, num_host_blocks=num_host_blocks)
    return cluster


def step_until_preempted(cluster: Cluster, group: SequenceGroup) -> None:
    while not any(s.status is SequenceStatus.PREEMPTED for s in group.sequences):
        if cluster.start() is None:
            cluster.complete()
        cluster.scheduler.check()


def counters_of_groups(cluster: Cluster) -> list[int]:
    """Sums over all groups, beside `counters_of_worker`."""
    groups = dict.fromkeys(s.group for s in cluster.sequences)
    return [
        sum(group.num_preemptions for group in groups),
        sum(group.num_copied_blocks for group in groups),
        sum(group.num_swapped_out_blocks for group in groups),
        sum(group.num_swapped_in_blocks for group in groups),
        sum(group.num_recomputed_tokens for group in groups),
    ]


def counters_of_worker(cluster: Cluster) -> list[int]:
    stats = cluster.stats()
    moved = [stats.num_swapped_out_blocks, stats.num_swapped_in_blocks]
    return [stats.num_preemptions, stats.num_copied_blocks, *moved, stats.num_recomputed_tokens]


def test_a_swapped_sequence_goes_on_where_it_was() -> None:
    # 4 blocks: each prompt takes 1, and then both a second one. a takes the last for its ninth token: b gives way.
    cluster = make_cluster(num_blocks=4)
    a, b = cluster.add([1, 2, 3, 4], 9), cluster.add([5, 6, 7, 8], 9)
    for _ in range(5):
        cluster.step()
    assert cluster.stats().num_used_blocks == 4
    table = b.block_table
    plan = cluster.step()
    assert plan.sequences == [a]
    assert plan.swap_out == [table[0], 0, table[1], 1]
    assert a.block_table[2] in table  # used again in the plan that swaps it out
    assert (b.status, b.num_computed_tokens, b.host_blocks) == (SequenceStatus.PREEMPTED, 8, [0, 1])
    assert cluster.scheduler.stats().num_waiting == 1
    while not a.is_finished:
        assert cluster.step().sequences == [a]
    plan = cluster.step()
    assert (plan.sequences, plan.positions, plan.num_tokens, plan.whole) == ([b], [8], [1], [b])
    assert plan.swap_in == [0, b.block_table[0], 1, b.block_table[1]]
    assert cluster.stats().num_recomputed_tokens == 0
    cluster.finish_and_compare()


def test_a_group_is_swapped_whole_and_a_shared_block_once() -> None:
    cluster = make_cluster(preempt_every=4)
    group = cluster.add_group(PROMPT, 3, 12)
    other = cluster.add([1, 2, 3], 1, priority=-1)
    for _ in range(3):
        cluster.step()
    assert other.is_finished
    tables = [list(s.block_table) for s in group.sequences]
    plan = cluster.step()  # out, and with nothing else to do in again at once
    distinct = list(dict.fromkeys(block for table in tables for block in table))
    assert plan.swap_out[::2] == distinct and len(distinct) == 4
    assert plan.swap_in[::2] == plan.swap_out[1::2]
    assert plan.sequences == group.sequences and plan.num_tokens == [1, 1, 1]
    a, b, c = group.sequences
    assert a.block_table[0] == b.block_table[0] == c.block_table[0]
    assert (cluster.stats().num_swapped_out_blocks, cluster.stats().num_swapped_in_blocks) == (4, 4)
    cluster.finish_and_compare()


def test_a_block_that_is_yet_to_be_copied_stays_shared_over_a_swap() -> None:
    # Preempted right after the fork: all three still share the half-filled block.
    cluster = make_cluster(preempt_every=2)
    a, b, c = cluster.add_group(PROMPT, 3, 12).sequences
    cluster.step()
    plan = cluster.step()
    assert len(plan.swap_out) == len(plan.swap_in) == 2 * 2
    assert len(plan.copies) == 2 * 2
    assert set(plan.copies[::2]) == {a.block_table[1]}
    assert len({s.block_table[1] for s in (a, b, c)}) == 3
    cluster.finish_and_compare()


def test_members_that_finish_while_they_are_swapped_are_not_brought_back() -> None:
    cluster = make_cluster(num_blocks=10)
    first = cluster.add([1, 2, 3, 4], 20)
    group = cluster.add_group(PROMPT, 3, 8)
    step_until_preempted(cluster, group)
    a, b, c = group.sequences
    assert a.host_blocks[0] == b.host_blocks[0] == c.host_blocks[0]
    num_kept = len({*a.host_blocks, *c.host_blocks})
    cluster.scheduler.finish(b)
    cluster.scheduler.check()
    cluster.finish_and_compare()
    assert (len(a.output_token_ids), len(c.output_token_ids), first.num_output_tokens) == (8, 8, 20)
    assert cluster.stats().num_swapped_in_blocks == num_kept < cluster.stats().num_swapped_out_blocks


def test_a_swapped_group_can_be_cancelled_and_leaves_no_host_block() -> None:
    cluster = make_cluster(num_blocks=10)
    cluster.add([1, 2, 3, 4], 20)
    group = cluster.add_group(PROMPT, 3, 8)
    step_until_preempted(cluster, group)
    cluster.scheduler.finish_group(group)
    assert cluster.scheduler.stats().num_waiting == 0
    cluster.finish_and_compare()


def test_a_full_host_pool_falls_back_to_recomputation() -> None:
    cluster = make_cluster(num_blocks=10, num_host_blocks=3)
    cluster.add([1, 2, 3, 4], 20)
    group = cluster.add_group(PROMPT, 3, 8)
    step_until_preempted(cluster, group)
    assert all(s.num_computed_tokens == 0 and not s.host_blocks for s in group.sequences)
    assert cluster.scheduler.waiting.num_groups == 1
    cluster.finish_and_compare()
    assert cluster.stats().num_swapped_out_blocks == 0 < cluster.stats().num_recomputed_tokens


def test_nothing_new_starts_where_a_swapped_group_waits_but_what_is_of_higher_priority() -> None:
    cluster = make_cluster(num_blocks=10)
    cluster.add([1, 2, 3, 4], 20)
    group = cluster.add_group(PROMPT, 3, 8)
    step_until_preempted(cluster, group)
    cluster.complete()
    late, urgent = cluster.add([9], 2), cluster.add([8], 2, priority=-1)
    while group.swap_step is not None:
        cluster.step()
        assert late.status is SequenceStatus.WAITING
    assert urgent.is_finished
    cluster.finish_and_compare()


def test_a_swapped_group_comes_back_to_its_own_worker_and_others_take_what_is_new() -> None:
    cluster = make_cluster(num_blocks=10)
    first = cluster.add([1, 2, 3, 4], 20)
    group = cluster.add_group(PROMPT, 3, 8)
    step_until_preempted(cluster, group)
    while cluster.in_flight["w"]:
        cluster.complete()
    cluster.add_worker("other", num_blocks=50)
    new = cluster.add([7, 7], 3)
    assert cluster.start("other") is not None
    assert new.worker_id == "other"
    assert [s.worker_id for s in group.sequences] == ["w"] * 3
    cluster.finish_and_compare()
    assert first.num_output_tokens == 20
    assert cluster.stats("w").num_swapped_in_blocks > 0


def test_a_lost_worker_turns_its_swapped_groups_into_recomputation() -> None:
    cluster = make_cluster(num_blocks=10)
    cluster.add([1, 2, 3, 4], 20)
    group = cluster.add_group(PROMPT, 3, 8)
    step_until_preempted(cluster, group)
    cluster.remove_all_memory("w", num_blocks=30)
    assert all(s.num_computed_tokens == 0 and not s.host_blocks for s in group.sequences)
    cluster.scheduler.check()
    cluster.finish_and_compare()
    assert cluster.stats().num_recomputed_tokens > 0


def test_a_swap_that_was_not_executed_turns_into_recomputation() -> None:
    cluster = make_cluster(num_blocks=10, depth=2)
    cluster.add([1, 2, 3, 4], 20)
    group = cluster.add_group(PROMPT, 3, 8)
    step_until_preempted(cluster, group)
    assert group.swap_step is not None
    cluster.fail_steps()
    cluster.scheduler.check()
    assert group.swap_step is None and group.worker_id is None
    assert all(s.num_computed_tokens == 0 for s in group.sequences)
    cluster.finish_and_compare()


def test_swap_pairs_wait_for_a_plan_that_has_rows() -> None:
    # Both prompts are in flight and fill the pool; for its next token each needs a block. b is swapped out for a,
    # but its block is in use by the step in flight: there is no row for anybody yet.
    cluster = make_cluster(num_blocks=2, depth=2)
    a, b = cluster.add([1, 2, 3, 4], 4), cluster.add([5, 6, 7, 8], 4)
    cluster.start()
    block = b.block_table[0]
    assert cluster.start() is None
    assert (b.status, b.host_blocks) == (SequenceStatus.PREEMPTED, [0])
    cluster.scheduler.check()
    cluster.complete()
    plan = cluster.start()
    assert plan is not None
    assert (plan.sequences, plan.swap_out) == ([a], [block, 0])
    assert a.block_table[1] == block
    cluster.finish_and_compare()


def test_beams_swapped_in_flight_compute_their_candidates_again() -> None:
    cluster = make_cluster(depth=2, preempt_every=4)
    cluster.add([1, 2, 3], 30)
    group = cluster.add_group(PROMPT, 3, 12, is_beam=True)
    step_until_preempted(cluster, group)
    assert group.num_pending_tokens > 0
    assert all(s.num_computed_tokens == len(s.token_ids) - 1 for s in group.live)
    cluster.finish_and_compare()
    assert cluster.stats().num_swaps > 1


@pytest.mark.parametrize(("prefill_tokens_per_s", "is_swapped"), [(1.0, True), (1e6, False)])
def test_auto_takes_the_cheaper_way(prefill_tokens_per_s: float, is_swapped: bool) -> None:
    cluster = make_cluster(num_blocks=10, preemption="auto")
    cluster.scheduler.workers.record_costs(
        "w", PreemptionCosts(swap_blocks_per_s=10.0, prefill_tokens_per_s=prefill_tokens_per_s)
    )
    cluster.add([1, 2, 3, 4], 20)
    group = cluster.add_group(PROMPT, 3, 8)
    step_until_preempted(cluster, group)
    assert (group.swap_step is not None) == is_swapped
    cluster.finish_and_compare()


def test_auto_compares_both_copies_with_the_tokens_that_would_be_computed() -> None:
    costs = PreemptionCosts(swap_blocks_per_s=100.0, prefill_tokens_per_s=1000.0)
    # 5 blocks out and in: 0.1 s.
    assert prefers_swap("auto", costs, 0, 5, 101)
    assert not prefers_swap("auto", costs, 0, 5, 100)
    assert not prefers_swap("auto", None, 0, 5, 10_000)
    assert prefers_swap("swap", None, 9, 5, 0)
    assert not prefers_swap("recompute", costs, 0, 0, 10_000)


def test_auto_tries_a_few_swaps_where_their_speed_alone_is_unknown() -> None:
    costs = PreemptionCosts(prefill_tokens_per_s=1e9)
    assert prefers_swap("auto", costs, 0, 50, 1)
    assert prefers_swap("auto", costs, MAX_TRIAL_SWAPS - 1, 50, 1)
    assert not prefers_swap("auto", costs, MAX_TRIAL_SWAPS, 50, 1)


def test_trial_swaps_end_where_the_worker_never_says_how_long_they_took() -> None:
    cluster = make_cluster(preemption="auto", preempt_every=2)
    cluster.scheduler.workers.record_costs("w", PreemptionCosts(prefill_tokens_per_s=1000.0))
    cluster.add_group(PROMPT, 3, 12)
    cluster.finish_and_compare()
    stats = cluster.stats()
    assert stats.num_swaps == MAX_TRIAL_SWAPS < stats.num_preemptions
    assert stats.num_recomputed_tokens > 0


@pytest.mark.parametrize(("swap_blocks_per_s", "is_swapped"), [(1e9, True), (1e-9, False)])
def test_what_a_trial_has_shown_decides_from_then_on(swap_blocks_per_s: float, is_swapped: bool) -> None:
    cluster = make_cluster(preemption="auto", preempt_every=2)
    cluster.scheduler.workers.record_costs("w", PreemptionCosts(prefill_tokens_per_s=1000.0))
    cluster.add_group(PROMPT, 3, 12)
    while not cluster.stats().num_swaps:
        cluster.step()
    cluster.scheduler.workers.record_costs(
        "w", PreemptionCosts(prefill_tokens_per_s=1000.0, swap_blocks_per_s=swap_blocks_per_s)
    )
    cluster.finish_and_compare()
    stats = cluster.stats()
    assert (stats.num_swaps == stats.num_preemptions > MAX_TRIAL_SWAPS) == is_swapped
    assert (stats.num_swaps == 1) != is_swapped


def test_no_swap_is_tried_before_the_speed_of_prefill_is_known_or_without_room() -> None:
    cluster = make_cluster(preemption="auto", preempt_every=2)
    cluster.add_group(PROMPT, 3, 12)
    cluster.finish_and_compare()
    assert cluster.stats().num_swaps == 0 < cluster.stats().num_preemptions
    small = make_cluster(preemption="auto", preempt_every=2, num_host_blocks=1)
    small.scheduler.workers.record_costs("w", PreemptionCosts(prefill_tokens_per_s=1000.0))
    small.add_group(PROMPT, 3, 12)
    small.finish_and_compare()
    assert small.stats().num_swaps == 0 < small.stats().num_preemptions


def test_costs_and_modes_that_make_no_sense_are_refused() -> None:
    cluster = make_cluster()
    with pytest.raises(ValueError, match="prefill_tokens_per_s is 0: give more than 0"):
        cluster.scheduler.workers.record_costs("w", PreemptionCosts(swap_blocks_per_s=1, prefill_tokens_per_s=0))
    with pytest.raises(ValueError, match="preemption is 'both': give one of auto, swap, recompute"):
        SchedulerConfig(preemption="both")  # type: ignore[arg-type]


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
@pytest.mark.parametrize(("preempt_every", "budget"), [(None, 64), (3, 64), (3, 5)])
@pytest.mark.parametrize(("depth", "enable_prefix_cache"), [(1, False), (2, True)])
def test_200_mixed_requests_under_pressure_equal_an_unconstrained_run(
    preemption: PreemptionMode, depth: int, enable_prefix_cache: bool, preempt_every: int | None, budget: int
) -> None:
    # The largest has 4 members of 20 + 12 tokens: 5 shared blocks, 3 more each: 17 blocks. 1.2 times that is 20.
    cluster = make_cluster(
        num_blocks=20,
        num_host_blocks=14,
        depth=depth,
        budget=budget,
        preemption=preemption,
        enable_prefix_cache=enable_prefix_cache,
        preempt_every=preempt_every,
    )
    cluster.scheduler.workers.record_costs("w", PreemptionCosts(swap_blocks_per_s=16.0, prefill_tokens_per_s=20.0))
    rng = random.Random(5)
    for _ in range(200):
        prompt = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 21))]
        num_sequences, is_beam = rng.choice([(1, False), (1, False), (4, False), (4, True)])
        cluster.add_group(prompt, num_sequences, rng.randrange(1, 13), is_beam=is_beam)
    cluster.run_until_idle(20_000)
    stats = cluster.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swaps > 0) == (preemption != "recompute")
    if preemption == "auto" and preempt_every is not None:
        assert stats.num_swaps < stats.num_preemptions and stats.num_recomputed_tokens > 0
    assert counters_of_groups(cluster) == counters_of_worker(cluster)
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()


@pytest.mark.parametrize(("num_samples", "num_ended"), [(8, 1), (8, 5), (2, 1)])
def test_samples_come_back_beside_an_accepted_pin_after_the_first_of_them_have_ended(
    num_samples: int, num_ended: int
) -> None:
    """The half-filled block of the prompt is in no table any more: the last sample takes it over."""
    num_needed = 1 + num_samples - num_ended
    cluster = make_cluster(num_blocks=12, depth=2, enable_prefix_cache=True)
    pinned = cluster.add(list(range(4 * (12 - num_needed) + 1)), 1)
    cluster.run_until_idle()
    group = cluster.add_group(PROMPT, num_samples, 2)
    cluster.start()
    cluster.scheduler.pause(group, keep_on_host=True)
    cluster.complete()
    for sequence in group.sequences[:num_ended]:
        cluster.scheduler.finish(sequence)  # its first token was its last
    assert group.worst_case_blocks(4) == num_needed
    assert cluster.scheduler.workers.pin_blocks("w", "prefix", pinned.block_hashes)
    cluster.scheduler.resume(group)
    assert cluster.scheduler.waiting_reason(group) is WaitingReason.NEXT_STEP
    cluster.run_until_idle()
    assert group.num_swapped_in_blocks == 2 and group.num_copied_blocks == num_samples - num_ended - 1
    cluster.assert_outputs_are_unconstrained()
    cluster.scheduler.workers.unpin_blocks("w", "prefix")
    cluster.assert_idle_and_unleaked()


def test_a_group_that_is_swapped_out_is_to_be_started_though_none_is_in_the_queue() -> None:
    cluster = make_cluster(num_blocks=5)
    _, second = cluster.add([1, 2, 3, 4], 12), cluster.add([5, 6, 7, 8], 12)
    step_until_preempted(cluster, second.group)
    assert cluster.scheduler.stats().num_swapped_groups == 1 and not cluster.scheduler.waiting.num_groups
    assert cluster.scheduler.has_groups_to_start
    cluster.finish_and_compare()
    assert not cluster.scheduler.has_groups_to_start
