"""Groups of several sequences: one prompt, forks, copy-on-write, all started, preempted and restored together.

Blocks hold 4 tokens.
"""

import random

import pytest

from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.scheduler.core_cluster import Cluster, make_cluster, single

PROMPT = [11, 12, 13, 14, 15, 16]  # a block and a half


def test_the_prompt_is_computed_once_and_one_row_feeds_all_samples() -> None:
    cluster = make_cluster()
    a, b, c = cluster.add_group(PROMPT, 3, 8).sequences
    plan = cluster.start()
    assert plan is not None
    assert (plan.sequences, plan.num_tokens) == ([a], [6])
    assert (plan.sampled_rows, plan.sampled_sequences) == ([0, 0, 0], [a, b, c])
    assert plan.whole == [a, b, c]
    assert [s.num_computed_tokens for s in (b, c)] == [6, 6]
    assert [s.num_pending_tokens for s in (a, b, c)] == [1, 1, 1]
    assert cluster.complete() == [a, b, c]
    assert len({tuple(s.output_token_ids) for s in (a, b, c)}) == 3  # their noise differs
    cluster.finish_and_compare()


def test_forked_sequences_share_blocks_until_each_writes() -> None:
    cluster = make_cluster()
    a, b, c = cluster.add_group(PROMPT, 3, 8).sequences
    cluster.step()
    assert cluster.stats().num_used_blocks == 2
    full, tail = a.block_table
    assert b.block_table == c.block_table == [full] and b.fork_tail == c.fork_tail == tail
    plan = cluster.start()
    assert plan is not None
    assert plan.sequences == [a, b, c]
    assert a.block_table == [full, tail]
    assert plan.copies == [tail, b.block_table[1], tail, c.block_table[1]]
    assert plan.append_pairs == [b.seat, b.block_table[1], c.seat, c.block_table[1]]
    assert len({a.block_table[1], b.block_table[1], c.block_table[1]}) == 3
    cluster.complete()
    assert cluster.stats().num_used_blocks == 4
    assert cluster.step().copies == []
    cluster.finish_and_compare()
    assert cluster.workers["w"].num_copies == 2


def test_nothing_is_copied_where_the_prompt_ends_with_a_block() -> None:
    cluster = make_cluster()
    a, b = cluster.add_group(PROMPT[:4], 2, 8).sequences
    cluster.step()
    assert b.fork_tail is None and a.block_table == b.block_table
    cluster.finish_and_compare()
    assert cluster.workers["w"].num_copies == 0


def test_the_last_holder_writes_in_place() -> None:
    cluster = make_cluster()
    a, b, c = cluster.add_group(PROMPT, 3, 8).sequences
    cluster.step()
    tail = a.block_table[1]
    cluster.scheduler.finish(a)
    plan = cluster.start()
    assert plan is not None
    assert plan.copies == [tail, b.block_table[1]]
    assert c.block_table[1] == tail
    assert plan.append_pairs[2:] == [c.seat, tail]
    cluster.scheduler.check()
    cluster.complete()
    cluster.finish_and_compare()


def test_a_shared_block_that_others_can_find_is_copied_even_by_its_last_holder() -> None:
    # Two others take 2 of 3 tokens in each plan: of the group, a alone goes on, and fills the block that b shares.
    cluster = make_cluster(budget=3, enable_prefix_cache=True)
    for first in (1, 2):
        cluster.add([first], 40)
    cluster.step()
    a, b = cluster.add_group(PROMPT, 2, 8).sequences
    while len(a.token_ids) < 10:
        cluster.step()
    assert b.num_computed_tokens == 6
    tail = a.block_table[1]
    assert b.fork_tail == tail
    cluster.scheduler.finish(a)
    num_cached_blocks = cluster.stats().num_cached_blocks
    plan = cluster.start()
    assert plan is not None and plan.copies == [tail, b.block_table[1]]
    assert cluster.stats().num_cached_blocks == num_cached_blocks  # until it has been copied, nobody gets the block
    cluster.complete()
    assert cluster.stats().num_cached_blocks == num_cached_blocks + 1
    cluster.finish_and_compare()


def test_a_member_that_ends_gives_back_what_nobody_shares() -> None:
    cluster = make_cluster()
    a, b = cluster.add_group(PROMPT, 2, 8).sequences
    cluster.step()
    cluster.step()
    assert cluster.stats().num_used_blocks == 3
    seat = b.seat
    cluster.scheduler.finish(b)
    assert not a.group.is_finished
    assert (cluster.stats().num_used_blocks, cluster.stats().num_running) == (2, 1)
    assert cluster.step().freed_seats == [seat]
    cluster.finish_and_compare()
    assert a.group.is_finished


def test_a_group_starts_with_a_seat_for_each_member_or_not_at_all() -> None:
    cluster = make_cluster(num_seats=4)
    first = cluster.add([1, 2], 3)
    cluster.step()
    group = cluster.add_group(PROMPT, 4, 3)
    assert cluster.step().sequences == [first]
    assert all(s.status is SequenceStatus.WAITING for s in group.sequences)
    cluster.step()
    assert first.is_finished
    assert cluster.step().sequences == group.sequences[:1]
    assert len({s.seat for s in group.sequences}) == 4
    cluster.finish_and_compare()


def test_a_seat_that_the_worker_was_never_told_of_is_not_told_to_be_free() -> None:
    cluster = make_cluster(budget=4)
    group = cluster.add_group(PROMPT, 3, 8)
    cluster.step()  # in the middle of the prompt
    cluster.scheduler.finish(group.sequences[2])
    other = cluster.add([1, 2], 3)
    assert cluster.step().freed_seats == []
    cluster.scheduler.finish_group(group)
    cluster.finish_and_compare()
    assert other.num_output_tokens == 3


def test_a_group_that_no_worker_has_seats_for_steps_aside() -> None:
    cluster = make_cluster(num_seats=2)
    group = cluster.add_group(PROMPT, 3)
    other = cluster.add([1], 2)
    assert cluster.step().sequences == [other]
    assert cluster.scheduler.waiting.size() == (1, 6)  # the prompt counts once
    assert cluster.scheduler.workers.max_tokens_that_fit(num_sequences=3) == 0
    cluster.scheduler.finish_group(group)
    cluster.finish_and_compare()


def test_the_largest_group_counts_its_prompt_once() -> None:
    # 10 blocks, prompt of 10 tokens: 2 full blocks shared, 8 for two members: 4 more each.
    cluster = make_cluster(num_blocks=10)
    assert cluster.scheduler.workers.max_tokens_that_fit(10, 2) == 24
    group = cluster.add_group(list(range(1, 11)), 2, 14)
    assert group.worst_case_blocks(4) == 10
    too_large = cluster.add_group(list(range(1, 11)), 2, 15)
    finish_and_compare_all_but(cluster, too_large)
    assert cluster.scheduler.workers.max_tokens_that_fit(41, 2) == 40


def finish_and_compare_all_but(cluster: Cluster, group: SequenceGroup) -> None:
    while cluster.start() is not None:
        cluster.complete()
    assert all(s.status is SequenceStatus.WAITING for s in group.sequences)
    cluster.scheduler.finish_group(group)
    cluster.finish_and_compare()


def test_the_group_that_arrived_last_is_preempted_as_a_whole() -> None:
    # 7 blocks: the first takes 1, the group 2; then 3 + 2 for the tails and so on, until the first needs its fourth.
    cluster = make_cluster(num_blocks=7)
    first = cluster.add([1, 2, 3], 20)
    group = cluster.add_group(PROMPT, 2, 9)
    while not any(s.status is SequenceStatus.PREEMPTED for s in group.sequences):
        cluster.step()
    for s in group.sequences:
        assert s.status is SequenceStatus.PREEMPTED
        assert (s.seat, s.block_table, s.fork_tail, s.num_computed_tokens, s.num_preemptions) == (None, [], None, 0, 1)
    assert cluster.stats().num_preemptions == 1
    assert first.status is SequenceStatus.RUNNING
    cluster.finish_and_compare()


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_restored_group_computes_its_common_prefix_once_and_shares_it_again(
    depth: int, enable_prefix_cache: bool
) -> None:
    cluster = make_cluster(num_blocks=40, depth=depth, enable_prefix_cache=enable_prefix_cache)
    prompt = list(range(1, 15))  # 3 full blocks and 2 tokens
    a, b, c = cluster.add_group(prompt, 3, 30).sequences
    cluster.step()
    for _ in range(4):
        cluster.step()  # 5 output tokens each: 19 tokens, 18 computed
    assert cluster.remove_all_memory("w", num_blocks=40) == [a, b, c]
    plan = cluster.start()
    assert plan is not None
    assert (plan.sequences, plan.positions, plan.num_tokens) == ([a, b, c], [0, 12, 12], [19, 7, 7])
    assert a.block_table[:3] == b.block_table[:3] == c.block_table[:3]
    assert cluster.stats().num_used_blocks == 3 + 3 * 2
    cluster.complete()
    assert cluster.stats().num_recomputed_tokens == 18 + 6 + 6
    cluster.finish_and_compare()


def test_members_that_are_back_wait_for_the_others() -> None:
    cluster = make_cluster(budget=8, preempt_every=5)
    a, b = cluster.add_group(list(range(1, 7)), 2, 30).sequences
    for _ in range(4):
        cluster.step()  # 10 tokens each
    assert cluster.start() is not None  # preempted; with nothing else to do it is restored at once
    assert a.num_preemptions == b.num_preemptions == 1
    cluster.complete()
    assert (a.num_computed_tokens, b.num_computed_tokens, a.num_output_tokens) == (8, 0, 4)
    plan = cluster.step()
    # a computes its last two, of which the last samples; b what it does not share with a: all but one block.
    assert (plan.sequences, plan.positions, plan.num_tokens) == ([a, b], [8, 4], [2, 6])
    assert plan.sampled_sequences == [a, b]
    plan = cluster.step()
    assert (plan.sequences, plan.num_tokens) == ([a, b], [1, 1])
    cluster.finish_and_compare()


def test_a_member_that_samples_before_the_others_are_back_does_not_decode_on() -> None:
    cluster = make_cluster(budget=5, preempt_every=100)
    group = cluster.add_group(list(range(1, 7)), 3, 30)
    for _ in range(8):
        cluster.step()
    cluster.remove_all_memory("w", num_blocks=40)
    a, b, c = group.sequences
    lengths = [len(s.token_ids) for s in group.sequences]
    while not c.num_computed_tokens >= lengths[2]:
        plan = cluster.step()
        for s in (a, b):
            assert len(s.token_ids) <= lengths[group.sequences.index(s)] + 1
        assert sum(plan.num_tokens) > 0
    cluster.finish_and_compare()


def test_finished_members_are_not_restored() -> None:
    cluster = make_cluster()
    a, b, c = cluster.add_group(PROMPT, 3, 30).sequences
    for _ in range(5):
        cluster.step()
    cluster.scheduler.finish(a)
    cluster.remove_all_memory("w", num_blocks=40)
    assert a.group.worst_case_blocks(4) == 1 + 2 * 8
    plan = cluster.step()
    assert plan.sequences == [b, c]
    cluster.finish_and_compare()


def test_a_group_preempted_in_flight_keeps_its_tokens_and_waits_for_all_of_them() -> None:
    # 3 blocks: each prompt takes 1. For its first output the first takes the third, the group finds none.
    cluster = make_cluster(num_blocks=3, depth=2)
    first = cluster.add([1, 2, 3, 4], 6)
    a, b = cluster.add_group([5, 6, 7, 8], 2, 4).sequences
    cluster.start()
    plan = cluster.start()
    assert plan is not None and plan.sequences == [first]
    assert a.status is b.status is SequenceStatus.PREEMPTED
    assert (a.num_pending_tokens, b.num_pending_tokens) == (1, 1)
    assert cluster.scheduler.waiting.size() == (0, 0) and cluster.scheduler.stats().num_waiting == 2
    cluster.scheduler.check()
    assert cluster.complete() == [first, a, b]
    assert cluster.scheduler.waiting.size() == (1, 4 + 1 + 1)
    cluster.finish_and_compare()


def test_a_parked_group_of_which_a_member_ends_waits_for_the_tokens_of_the_others_alone() -> None:
    cluster = make_cluster(num_blocks=3, depth=2)
    cluster.add([1, 2, 3, 4], 6)
    a, b = cluster.add_group([5, 6, 7, 8], 2, 4).sequences
    cluster.start()
    cluster.start()
    cluster.scheduler.finish(a)
    assert (b.status, b.num_pending_tokens) == (SequenceStatus.PREEMPTED, 1)
    cluster.scheduler.check()
    assert a not in cluster.complete()
    assert cluster.scheduler.waiting.size() == (1, 5)
    cluster.finish_and_compare()


def test_a_member_cancelled_while_others_wait_for_its_blocks_lets_them_begin_anew() -> None:
    cluster = make_cluster(budget=4)
    a, b, c = cluster.add_group(PROMPT, 3, 8).sequences
    cluster.step()
    cluster.scheduler.finish(a)
    cluster.scheduler.check()
    assert b.status is c.status is SequenceStatus.PREEMPTED
    assert cluster.step().sequences == [b]
    cluster.finish_and_compare()
    assert b.num_output_tokens == c.num_output_tokens == 8


def test_a_rollback_of_fork_and_copy_computes_the_group_again() -> None:
    cluster = make_cluster(depth=2, enable_prefix_cache=True)
    other = cluster.add([1, 2, 3], 9)
    cluster.step()
    group = cluster.add_group(PROMPT, 3, 8)
    cluster.start()
    cluster.start()
    cluster.fail_steps()
    cluster.scheduler.check()
    assert all(s.status is SequenceStatus.WAITING and s.num_pending_tokens == 0 for s in group.sequences)
    assert (other.status, other.num_computed_tokens) == (SequenceStatus.RUNNING, 3)
    plan = cluster.step()
    assert plan.snapshot and plan.whole == [other, *group.sequences]
    cluster.finish_and_compare()


@pytest.mark.parametrize("is_owner_gone", [False, True])
def test_a_rollback_of_the_copies_alone_computes_the_group_again(is_owner_gone: bool) -> None:
    cluster = make_cluster(enable_prefix_cache=True)
    group = cluster.add_group(PROMPT, 3, 8)
    cluster.step()
    if is_owner_gone:
        cluster.scheduler.finish(group.sequences[0])
        cluster.scheduler.finish(group.sequences[1])  # the third takes the block over
    plan = cluster.start()
    assert plan is not None and bool(plan.copies) != is_owner_gone
    cluster.fail_steps()
    cluster.scheduler.check()
    assert all(s.status is SequenceStatus.PREEMPTED for s in group.live)
    assert group.live[0].num_output_tokens == 1
    cluster.finish_and_compare()


def test_a_rollback_long_after_the_fork_goes_back_to_the_last_step_alone() -> None:
    cluster = make_cluster(depth=2)
    group = cluster.add_group(PROMPT, 3, 20)
    for _ in range(4):
        cluster.step()
    cluster.start()
    cluster.start()
    cluster.fail_steps()
    assert [s.num_computed_tokens for s in group.sequences] == [9, 9, 9]
    assert all(s.status is SequenceStatus.RUNNING for s in group.sequences)
    cluster.finish_and_compare()


def test_a_lost_worker_takes_a_group_anywhere_in_its_life() -> None:
    for num_plans in range(1, 9):
        cluster = make_cluster(budget=3, depth=2)
        group = cluster.add_group(PROMPT, 3, 6)
        for _ in range(num_plans):
            if cluster.start() is None:
                cluster.complete()
                cluster.start()
        cluster.remove_all_memory("w", num_blocks=20)
        assert all(s.num_computed_tokens == s.num_pending_tokens == 0 and s.seat is None for s in group.sequences)
        cluster.finish_and_compare()


def test_output_of_an_earlier_life_comes_back_unevenly_long_and_without_the_finished() -> None:
    once = make_cluster()
    life = once.add_group(PROMPT, 4, 12)
    once.run_until_idle()
    again = make_cluster()
    sequences = [
        Sequence(i, PROMPT + s.output_token_ids[:n], 6, 12, frozenset())
        for i, (s, n) in enumerate(zip(life.sequences, (0, 3, 12, 7), strict=True))
    ]
    sequences[2].status = SequenceStatus.FINISHED
    again.sequences += sequences
    again.scheduler.add(SequenceGroup(sequences, arrival=0))
    plan = again.step()
    assert plan.sequences == [sequences[0], sequences[1], sequences[3]]
    again.finish_and_compare()
    assert [s.token_ids for s in sequences] == [s.token_ids for s in life.sequences]


def test_a_group_is_of_at_least_one_and_is_added_once() -> None:
    with pytest.raises(ValueError, match="give at least 1"):
        SequenceGroup([], arrival=0)
    cluster = make_cluster()
    group = cluster.add_group(PROMPT, 2)
    with pytest.raises(ValueError, match="added before"):
        cluster.scheduler.add(group)
    cluster.scheduler.finish_group(group)
    with pytest.raises(ValueError, match="added before"):
        cluster.scheduler.add(group)
    with pytest.raises(ValueError, match="has its 1 tokens already"):
        cluster.scheduler.add(single(Sequence(9, [1, 2], 1, 1, frozenset())))


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preempt_every", [None, 3])
@pytest.mark.parametrize("budget", [5, 64])
def test_many_groups_in_a_pool_little_larger_than_one_get_done(
    depth: int, enable_prefix_cache: bool, preempt_every: int | None, budget: int
) -> None:
    # The largest has 4 members of 20 + 12 tokens: 5 shared blocks, 3 more each: 17 blocks. 1.2 times that is 20.
    cluster = make_cluster(
        num_blocks=20,
        depth=depth,
        budget=budget,
        enable_prefix_cache=enable_prefix_cache,
        preempt_every=preempt_every,
    )
    rng = random.Random(5)
    for _ in range(40):
        prompt = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 21))]
        cluster.add_group(prompt, rng.choice([1, 1, 2, 4]), rng.randrange(1, 13), stops=rng.random() < 0.5)
    cluster.run_until_idle()
    assert cluster.stats().num_preemptions > 1
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()
