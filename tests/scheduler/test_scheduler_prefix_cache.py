"""Equal prefixes are computed once and shared. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.scheduler_config import SchedulerConfig
from tests.scheduler.core_cluster import Cluster

SHARED = [11, 12, 13, 14, 15, 16, 17, 18]  # two blocks


def make_cluster(*, budget: int = 64, depth: int = 1, num_blocks: int = 40, enabled: bool = True) -> Cluster:
    cluster = Cluster(
        SchedulerConfig(max_num_batched_tokens=budget, pipeline_depth=depth, enable_prefix_cache=enabled, watermark=0.0)
    )
    cluster.add_worker(num_blocks=num_blocks)
    return cluster


def test_a_burst_with_a_common_prefix_computes_it_once() -> None:
    cluster = make_cluster(depth=2)
    sequences = [cluster.add([*SHARED, i + 1], 2) for i in range(5)]
    plan = cluster.start()
    assert plan is not None
    assert plan.num_tokens == [9, 1, 1, 1, 1]
    assert plan.positions == [0, 8, 8, 8, 8]
    assert len({tuple(s.block_table[:2]) for s in sequences}) == 1
    assert len({s.block_table[2] for s in sequences}) == 5
    assert cluster.stats().num_used_blocks == 2 + 5
    assert (cluster.stats().num_prefix_query_tokens, cluster.stats().num_prefix_hit_tokens) == (45, 32)
    assert [s.num_cached_tokens for s in sequences] == [0, 8, 8, 8, 8]
    cluster.finish_and_compare()


def test_a_prefix_is_shared_while_the_step_that_computes_it_is_in_flight() -> None:
    cluster = make_cluster(budget=9, depth=2)
    cluster.add([*SHARED, 1], 2)
    b = cluster.add([*SHARED, 2], 2)
    cluster.start()
    plan = cluster.start()
    assert plan is not None and b in plan.whole
    assert plan.positions[plan.sequences.index(b)] == 8
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_chunk_that_is_not_planned_yet_is_not_shared() -> None:
    cluster = make_cluster(budget=5)
    a = cluster.add([*SHARED, 1], 2)
    cluster.step()
    assert a.num_computed_tokens == 5
    b = cluster.add([*SHARED, 2], 2)
    plan = cluster.step()  # a computes the other 4 tokens, b gets the token that is left
    assert (plan.sequences, plan.num_tokens, plan.positions) == ([a, b], [4, 1], [5, 8])
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_prompt_found_whole_still_computes_its_last_token_in_a_block_of_its_own() -> None:
    cluster = make_cluster()
    a = cluster.add(SHARED, 4)
    cluster.step()
    b = cluster.add(SHARED, 4)
    plan = cluster.step()
    assert plan.positions[1] == 4 and plan.num_tokens[1] == 4
    assert b.block_table[0] == a.block_table[0]
    assert b.block_table[1] != a.block_table[1]
    cluster.run_until_idle()
    assert a.token_ids == b.token_ids


def test_blocks_of_finished_sequences_serve_the_next_ones_output_included() -> None:
    cluster = make_cluster()
    a = cluster.add(SHARED, 9)
    cluster.run_until_idle()
    # 8 + 9 tokens; the last is never computed: 4 full blocks.
    assert cluster.stats().num_cached_blocks == 4
    b = cluster.add([*a.token_ids, 1], 2)
    assert cluster.step().positions == [16]
    assert b.num_cached_tokens == 16
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_decoded_blocks_are_shared_while_their_sequence_still_runs() -> None:
    cluster = make_cluster(depth=2)
    a = cluster.add(SHARED, 20)
    while a.num_output_tokens < 10:
        cluster.start()
        cluster.complete()
    b = cluster.add(a.token_ids, 2)
    cluster.start()
    assert b.num_cached_tokens == 16
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize(("hash_seed", "use_prefix_cache"), [(b"other tenant", True), (b"tenant", False)])
def test_another_tenant_and_a_sequence_without_lookup_share_nothing(hash_seed: bytes, use_prefix_cache: bool) -> None:
    cluster = make_cluster()
    a = cluster.add([*SHARED, 1], 2, hash_seed=b"tenant")
    cluster.step()
    b = cluster.add([*SHARED, 2], 2, hash_seed=hash_seed, use_prefix_cache=use_prefix_cache)
    assert cluster.step().positions[1] == 0
    assert not set(a.block_table) & set(b.block_table)
    assert b.num_cached_tokens == 0


def test_a_sequence_without_lookup_still_leaves_its_blocks_to_others() -> None:
    cluster = make_cluster()
    cluster.add([*SHARED, 1], 1, use_prefix_cache=False)
    cluster.step()
    cluster.add([*SHARED, 2], 1)
    assert cluster.step().positions == [8]
    assert cluster.stats().num_prefix_query_tokens == 9  # of the second alone


def test_of_two_that_computed_the_same_the_second_is_not_cached_twice() -> None:
    cluster = make_cluster()
    cluster.add([*SHARED, 1], 1)
    cluster.add([*SHARED, 1], 1, use_prefix_cache=False)
    cluster.step()
    assert cluster.stats().num_cached_blocks == 2


def test_without_the_cache_nothing_is_kept_or_shared() -> None:
    cluster = make_cluster(enabled=False)
    cluster.add([*SHARED, 1], 1)
    cluster.add([*SHARED, 1], 1)
    assert cluster.step().num_tokens == [9, 9]
    stats = cluster.stats()
    assert stats.num_cached_blocks == stats.num_prefix_query_tokens == stats.num_prefix_hit_tokens == 0


def test_cached_blocks_give_way_to_running_sequences_the_oldest_and_its_tail_first() -> None:
    cluster = make_cluster(num_blocks=6)
    cluster.add([*SHARED, 1], 1)
    cluster.run_until_idle()
    cluster.add([21, 22, 23, 24, 25, 26, 27, 28, 1], 1)
    cluster.run_until_idle()
    assert cluster.stats().num_cached_blocks == 4
    cluster.add([31, 32, 33, 34, 35, 36, 37, 38, 39], 1)  # 3 blocks: two free ones, and one of the cached
    cluster.run_until_idle()
    prefix_lengths = []
    for first in (11, 21, 31):
        sequence = cluster.add([*range(first, first + 8), 2], 1)
        cluster.run_until_idle()
        prefix_lengths.append(sequence.num_cached_tokens)
    assert prefix_lengths[0] == 4  # the tail of the oldest went, its head stayed


def test_a_cached_prefix_in_use_costs_no_blocks_at_admission() -> None:
    # a holds 3 of 4 blocks; b has the same two full blocks, and needs but one of its own.
    cluster = make_cluster(num_blocks=4)
    a = cluster.add([*SHARED, 1], 3)
    cluster.step()
    b = cluster.add([*SHARED, 2], 3)
    assert cluster.step().sequences == [a, b]
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_an_evictable_prefix_counts_against_the_room_for_its_own_sequence() -> None:
    # 4 blocks: two cached, two taken by a sequence that runs. The prefix is there, but no block for the rest.
    cluster = make_cluster(num_blocks=4)
    cluster.add([*SHARED, 1], 1)
    cluster.run_until_idle()
    cluster.add([1, 2, 3, 4, 5], 3)
    cluster.step()
    assert cluster.stats().num_cached_blocks == 2
    late = cluster.add([*SHARED, 2], 1)
    cluster.step()
    assert late.seat is None
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_a_block_that_a_small_chunk_fills_is_shared(num_tokens: int) -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=num_tokens, watermark=0.0, pipeline_depth=1))
    cluster.add_worker(num_blocks=40)
    first = cluster.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    while first.num_computed_tokens < 4:
        cluster.step()
    hashes: list[bytes] = []
    extend_block_hashes(hashes, b"", first.token_ids, 4, 1)
    assert cluster.scheduler.workers.pin_blocks("w", "prefix", hashes)
