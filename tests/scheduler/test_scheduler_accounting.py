"""Statistics of shared, saved, half-filled and reserved memory. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.memory_use import GroupBlocks, group_blocks
from scheduler_svc.core.scheduler_config import SchedulerConfig
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.core_executor import unconstrained_output

PROMPT = [11, 12, 13, 14, 15, 16]  # a block and a half


def make_cluster(*, budget: int = 64, enable_prefix_cache: bool = False, num_blocks: int = 20) -> Cluster:
    config = SchedulerConfig(
        max_num_batched_tokens=budget, watermark=0.0, pipeline_depth=1, enable_prefix_cache=enable_prefix_cache
    )
    cluster = Cluster(config)
    cluster.add_worker(num_blocks=num_blocks)
    return cluster


def test_what_sharing_saves_is_the_sum_over_tables_less_the_distinct_blocks() -> None:
    cluster = make_cluster()
    group = cluster.add_group(PROMPT, 3, 8)
    cluster.step()
    # Each of the three has two blocks, both shared by all.
    stats = cluster.stats()
    assert (stats.num_sequence_blocks, stats.num_saved_blocks, stats.num_shared_blocks) == (2, 4, 2)
    assert stats.block_saving == 4 / 6
    assert group_blocks(group) == GroupBlocks(num_blocks=2, num_shared=2, num_saved=4, num_host_blocks=0)
    cluster.step()
    # The second block has been copied for two of them.
    stats = cluster.stats()
    assert (stats.num_sequence_blocks, stats.num_saved_blocks, stats.num_shared_blocks) == (4, 2, 1)
    assert stats.num_copied_blocks == 2
    assert group_blocks(group) == GroupBlocks(num_blocks=4, num_shared=1, num_saved=2, num_host_blocks=0)
    cluster.run_until_idle()
    assert cluster.stats().block_saving == 0.0
    assert group_blocks(group) == GroupBlocks(0, 0, 0, 0)


def test_a_block_of_two_members_is_shared() -> None:
    cluster = make_cluster()
    group = cluster.add_group(PROMPT, 2, 8)
    cluster.step()
    assert group_blocks(group) == GroupBlocks(num_blocks=2, num_shared=2, num_saved=2, num_host_blocks=0)


def test_a_worker_without_a_host_pool_has_no_host_blocks() -> None:
    stats = make_cluster().stats()
    assert (stats.num_host_blocks, stats.num_used_host_blocks) == (0, 0)


def test_what_only_a_step_in_flight_holds_is_in_use_and_of_no_sequence() -> None:
    cluster = make_cluster()
    ends, goes_on = cluster.add(PROMPT, 8), cluster.add([1, 2, 3], 8)
    cluster.start()
    cluster.scheduler.finish(ends)
    stats = cluster.stats()
    assert (stats.num_used_blocks, stats.num_sequence_blocks, stats.num_saved_blocks) == (3, 1, 0)
    cluster.complete()
    assert (cluster.stats().num_used_blocks, cluster.stats().num_sequence_blocks) == (1, 1)
    assert not goes_on.is_finished


def test_nothing_is_reserved_in_full_blocks() -> None:
    cluster = make_cluster()
    cluster.add([1, 2, 3, 4], 8)
    cluster.step()
    stats = cluster.stats()
    assert (stats.num_filled_token_slots, stats.num_reserved_token_slots, stats.num_fragmented_token_slots) == (4, 0, 0)


def test_a_prefix_shared_between_requests_is_saved_too_and_a_pin_is_not_a_saving() -> None:
    cluster = make_cluster(enable_prefix_cache=True)
    first = cluster.add([*range(1, 9), 20], 5)
    cluster.step()
    assert cluster.scheduler.workers.pin_blocks("w", "prefix", first.block_hashes[:2])
    stats = cluster.stats()
    assert (stats.num_sequence_blocks, stats.num_saved_blocks, stats.num_pinned_blocks) == (3, 0, 2)
    cluster.add([*range(1, 9), 21], 5)
    cluster.step()
    assert (cluster.stats().num_sequence_blocks, cluster.stats().num_saved_blocks) == (4, 2)
    cluster.run_until_idle()
    assert (cluster.stats().num_sequence_blocks, cluster.stats().num_used_blocks) == (0, 2)


def test_token_slots_are_filled_reserved_fragmented_or_free() -> None:
    cluster = make_cluster(budget=6, num_blocks=10)
    cluster.add(list(range(1, 11)), 5)  # 10 tokens in 3 blocks
    cluster.start()
    stats = cluster.stats()
    assert stats.num_allocated_token_slots == 12
    assert (stats.num_filled_token_slots, stats.num_reserved_token_slots, stats.num_fragmented_token_slots) == (6, 4, 2)
    cluster.complete()
    cluster.step()
    stats = cluster.stats()
    # The sampled token exists, and has its seat in the last block.
    assert (stats.num_filled_token_slots, stats.num_reserved_token_slots, stats.num_fragmented_token_slots) == (
        10,
        1,
        1,
    )


@pytest.mark.parametrize("num_others", [2, 3])
def test_a_forked_block_counts_once_whoever_holds_it(num_others: int) -> None:
    cluster = make_cluster()
    first, *others = cluster.add_group(PROMPT, 1 + num_others, 8).sequences
    cluster.step()
    stats = cluster.stats()
    assert (stats.num_allocated_token_slots, stats.num_filled_token_slots) == (8, 6)
    cluster.scheduler.finish(first)  # the block that the others are yet to copy is in no table now
    stats = cluster.stats()
    assert (stats.num_allocated_token_slots, stats.num_filled_token_slots) == (8, 6)
    assert len({other.fork_tail for other in others}) == 1
    cluster.step()
    stats = cluster.stats()
    assert stats.num_allocated_token_slots == 4 + 4 * num_others
    assert stats.num_filled_token_slots == 4 + 3 * num_others


def test_a_swapped_group_holds_host_blocks_and_counts_what_was_done_for_it() -> None:
    cluster = Cluster(SchedulerConfig(watermark=0.0, pipeline_depth=1, enable_prefix_cache=False, preemption="swap"))
    cluster.add_worker(num_blocks=10, num_host_blocks=20)
    first = cluster.add([1, 2, 3, 4], 20)
    group = cluster.add_group(PROMPT, 3, 8)
    while group.swap_step is None:
        cluster.step()
    counts = cluster.scheduler.stats()
    assert (counts.num_waiting, counts.num_waiting_groups, counts.num_swapped_groups) == (3, 1, 1)
    stats = cluster.stats()
    held = group_blocks(group)
    assert (held.num_blocks, held.num_shared, held.num_saved) == (0, 0, 0)
    assert held.num_host_blocks == stats.num_used_host_blocks == stats.num_swapped_out_blocks > 0
    assert (group.num_preemptions, group.num_swapped_out_blocks) == (1, held.num_host_blocks)
    cluster.run_until_idle()
    assert group.num_swapped_in_blocks == group.num_swapped_out_blocks == held.num_host_blocks
    assert (group.num_copied_blocks, group.num_recomputed_tokens) == (2, 0)
    of_first = (first.group.num_preemptions, first.group.num_copied_blocks, first.group.num_swapped_out_blocks)
    assert of_first == (0, 0, 0)
    assert group_blocks(group) == GroupBlocks(0, 0, 0, 0)


def test_what_was_lost_with_a_worker_counts_for_the_group_once_it_is_computed_again() -> None:
    cluster = make_cluster()
    group = cluster.add_group(PROMPT, 3, 8)
    for _ in range(3):
        cluster.step()
    num_computed = 4 + sum(s.num_computed_tokens - 4 for s in group.sequences)
    cluster.remove_all_memory("w", num_blocks=20)
    assert group.num_recomputed_tokens == 0
    cluster.step()
    assert group.num_recomputed_tokens == cluster.stats().num_recomputed_tokens == num_computed
    assert group.num_preemptions == 0  # it was not for want of memory


def test_what_was_computed_before_a_restart_counts_once_it_is_computed_again() -> None:
    cluster = make_cluster()
    group = cluster.new_group(PROMPT, 2, 8)
    for index, sequence in enumerate(group.sequences):
        sequence.token_ids += unconstrained_output(PROMPT, 3, frozenset(), index)
    cluster.scheduler.add(group)
    assert group.num_recomputed_tokens == 0
    cluster.step()
    # Of nine tokens each the last was not computed yet; the second has the first's full block.
    assert group.num_recomputed_tokens == cluster.stats().num_recomputed_tokens == 8 + 4
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_requests_and_sequences_are_counted_apart() -> None:
    cluster = make_cluster(num_blocks=10)
    cluster.add_group(PROMPT, 3, 8)
    cluster.add([1, 2, 3, 4], 8)
    stats = cluster.scheduler.stats()
    assert (stats.num_waiting, stats.num_waiting_groups) == (4, 2)
    cluster.step()
    stats = cluster.scheduler.stats()
    assert (stats.workers[0].num_running, stats.workers[0].num_running_groups) == (4, 2)
    assert (stats.num_waiting, stats.num_waiting_groups) == (0, 0)


def test_members_that_wait_for_the_common_prefix_count_it_once() -> None:
    cluster = make_cluster(budget=5, num_blocks=40)
    group = cluster.add_group(PROMPT, 3, 30)
    for _ in range(6):
        cluster.step()
    cluster.remove_all_memory("w", num_blocks=40)
    lengths = [len(s.token_ids) for s in group.sequences]
    cluster.step()
    stats = cluster.stats()
    assert stats.num_filled_token_slots == 5
    # The first computes all its tokens, the others theirs but the shared block.
    assert stats.num_reserved_token_slots == lengths[0] - 5 + lengths[1] - 4 + lengths[2] - 4
    assert stats.num_fragmented_token_slots >= 0


def test_what_is_yet_to_be_computed_counts_while_it_waits_and_while_its_prompt_runs() -> None:
    cluster = make_cluster(budget=4)
    cluster.add(PROMPT, 3)
    cluster.add([21, 22, 23, 24, 25], 3)
    left = [cluster.scheduler.num_uncomputed_tokens()]
    for _ in range(5):
        cluster.step()
        left.append(cluster.scheduler.num_uncomputed_tokens())
    # Chunks of 4: of the first prompt, then 2 of it and 2 of the second, then a token of the first beside 3 of that.
    assert left[:4] == [11, 7, 3, 0]
    cluster.run_until_idle()
    assert cluster.scheduler.num_uncomputed_tokens() == 0
