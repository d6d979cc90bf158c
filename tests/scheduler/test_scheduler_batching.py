"""Batch of one worker's step: order, token budget, chunked prefill, pipeline, limits.

Blocks hold 4 tokens; the pools are large unless said.
"""

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from tests.scheduler.core_cluster import Cluster, single


def make_cluster(
    *, budget: int = 64, max_num_seqs: int = 8, depth: int = 1, num_blocks: int = 100, num_seats: int = 8
) -> Cluster:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, pipeline_depth=depth))
    cluster.add_worker(num_blocks=num_blocks, num_seats=num_seats)
    return cluster


def test_a_prompt_is_computed_and_its_last_row_samples() -> None:
    cluster = make_cluster()
    a = cluster.add([1, 2, 3, 4, 5])
    plan = cluster.start()
    assert plan is not None
    assert (plan.sequences, plan.positions, plan.num_tokens, plan.sampled_rows) == ([a], [0], [5], [0])
    assert plan.whole == [a] and plan.append_pairs == [] and plan.copies == []
    assert len(a.block_table) == 2
    assert (a.num_computed_tokens, a.num_pending_tokens) == (5, 1)
    assert cluster.complete() == [a]
    assert (len(a.token_ids), a.num_pending_tokens) == (6, 0)


def test_a_long_prompt_goes_in_chunks_and_only_the_last_samples() -> None:
    cluster = make_cluster(budget=4)
    cluster.add(list(range(1, 11)))
    plans = [cluster.step() for _ in range(3)]
    assert [plan.num_tokens for plan in plans] == [[4], [4], [2]]
    assert [plan.positions for plan in plans] == [[0], [4], [8]]
    assert [plan.sampled_rows for plan in plans] == [[], [], [0]]
    assert [len(plan.whole) for plan in plans] == [1, 0, 0]


def test_prefill_and_decode_share_a_step_and_decode_goes_first() -> None:
    cluster = make_cluster(budget=4)
    a = cluster.add([1, 2, 3])
    cluster.step()
    b = cluster.add([4, 5, 6, 7, 8])
    plan = cluster.step()
    assert plan.sequences == [a, b]
    assert plan.num_tokens == [1, 3]
    assert plan.sampled_rows == [0]


def test_the_budget_is_never_exceeded_and_never_wasted() -> None:
    cluster = make_cluster(budget=5)
    for _ in range(4):
        cluster.add([1, 2, 3], max_tokens=2)
    # 12 prompt tokens and 4 tokens that are fed back.
    totals = []
    while not all(sequence.is_finished for sequence in cluster.sequences):
        totals.append(sum(cluster.step().num_tokens))
    assert totals == [5, 5, 5, 1]


def test_a_new_block_is_told_by_its_seat() -> None:
    cluster = make_cluster()
    a = cluster.add([1, 2, 3, 4], max_tokens=6)
    cluster.step()
    assert len(a.block_table) == 1
    plan = cluster.step()  # the fifth token
    assert plan.append_pairs == [a.seat, a.block_table[1]]
    assert plan.whole == []
    assert cluster.step().append_pairs == []


def test_sequences_start_in_order_of_priority_then_arrival() -> None:
    cluster = make_cluster(max_num_seqs=2)
    late = [cluster.add([1], priority=1) for _ in range(2)]
    first = [cluster.add([2]) for _ in range(2)]
    assert cluster.step().sequences == first
    assert late[0].status is SequenceStatus.WAITING


def test_running_sequences_are_served_in_order_of_priority_then_arrival() -> None:
    cluster = make_cluster(budget=3)
    low = cluster.add([1, 2, 3, 4, 5, 6, 7], priority=1)
    cluster.step()
    high = cluster.add([1, 2])
    assert cluster.step().sequences == [low]  # it runs; no token is left for the queue
    cluster.step()
    assert cluster.step().sequences == [high, low]


def test_nothing_passes_the_head_of_the_queue() -> None:
    # 10 blocks: the first takes 6, the second needs 6, the third would need 1.
    cluster = make_cluster(num_blocks=10)
    first = cluster.add(list(range(1, 23)), max_tokens=2)
    second = cluster.add(list(range(31, 53)), max_tokens=2)
    third = cluster.add([99], max_tokens=2)
    assert cluster.step().sequences == [first]
    assert cluster.step().sequences == [first]
    assert first.is_finished
    assert cluster.step().sequences == [second, third]


@pytest.mark.parametrize(("max_num_seqs", "num_seats"), [(2, 8), (8, 2)])
def test_no_more_run_than_seats_and_seats(max_num_seqs: int, num_seats: int) -> None:
    cluster = make_cluster(max_num_seqs=max_num_seqs, num_seats=num_seats)
    sequences = [cluster.add([1], max_tokens=1) for _ in range(3)]
    assert cluster.step().sequences == sequences[:2]
    assert cluster.step().sequences == sequences[2:]


def test_a_seat_freed_is_told_once_and_used_again_at_once() -> None:
    cluster = make_cluster(num_seats=1)
    a, b = cluster.add([1], max_tokens=1), cluster.add([2], max_tokens=2)
    assert cluster.step().freed_seats == []
    assert a.is_finished
    plan = cluster.step()
    assert plan.freed_seats == [0] and plan.whole == [b] and b.seat == 0
    assert cluster.step().freed_seats == []


def test_max_tokens_ends_scheduling_before_the_results_are_known() -> None:
    cluster = make_cluster(depth=2)
    a = cluster.add([1, 2], max_tokens=2)
    assert cluster.start() is not None
    assert cluster.start() is not None
    cluster.complete()
    assert a.num_output_tokens == 1
    assert cluster.start() is None  # the second token is pending, a third is not wanted
    cluster.complete()
    assert a.is_finished
    assert a.num_output_tokens == 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_steps_are_in_flight_as_the_pipeline_is_deep(depth: int) -> None:
    cluster = make_cluster(depth=depth)
    a = cluster.add([1, 2], max_tokens=10)
    for in_flight in range(1, depth + 1):
        plan = cluster.start()
        assert plan is not None and plan.step_id == in_flight
        assert a.num_pending_tokens == in_flight
    assert cluster.start() is None
    cluster.complete()
    assert cluster.start() is not None


def test_a_finished_sequence_in_flight_keeps_blocks_and_seat_until_its_last_step_is_done() -> None:
    cluster = make_cluster(depth=2, num_seats=1)
    a = cluster.add([1, 2, 3], max_tokens=10)
    cluster.start()
    cluster.start()
    cluster.complete()
    cluster.scheduler.finish(a)  # as if its first token were a stop token
    assert cluster.stats().num_used_blocks == 1
    b = cluster.add([7])
    assert cluster.start() is None  # the only seat is still in use
    cluster.scheduler.check()
    assert cluster.complete() == []  # the token of the second step is dropped
    assert a.num_output_tokens == 1
    assert cluster.stats().num_used_blocks == 0
    plan = cluster.start()
    assert plan is not None and plan.sequences == [b] and plan.freed_seats == [0]


def test_a_finished_sequence_that_is_not_in_flight_is_freed_at_once() -> None:
    cluster = make_cluster(depth=2)
    a, b = cluster.add([1, 2, 3], max_tokens=10), cluster.add([4])
    cluster.start()
    cluster.complete()
    cluster.scheduler.finish(a)
    assert cluster.stats().num_used_blocks == 1
    assert cluster.stats().num_running == 1
    assert b.status is SequenceStatus.RUNNING


def test_a_sequence_can_be_cancelled_in_every_state_and_twice() -> None:
    cluster = make_cluster(max_num_seqs=1)
    running, waiting = cluster.add([1]), cluster.add([2])
    cluster.step()
    for sequence in (waiting, running):
        cluster.scheduler.finish(sequence)
        cluster.scheduler.finish(sequence)
        assert sequence.is_finished
    cluster.assert_idle_and_unleaked()
    assert cluster.start() is None


def test_output_of_an_earlier_life_is_kept_and_counts() -> None:
    cluster = make_cluster()
    once = cluster.add([5, 6, 7], max_tokens=6)
    cluster.run_until_idle()
    again = Sequence(1, once.token_ids[:7], 3, 6, frozenset())
    cluster.sequences.append(again)
    cluster.scheduler.add(single(again))
    plan = cluster.step()
    assert plan.positions == [4] and plan.num_tokens == [3]  # its first block is still in the cache
    cluster.run_until_idle()
    assert again.token_ids == once.token_ids


def test_results_out_of_turn_and_of_the_wrong_length_are_refused_and_change_nothing() -> None:
    cluster = make_cluster(depth=2)
    a = cluster.add([1], max_tokens=5)
    cluster.start()
    cluster.start()
    for step_id, token_ids in [(2, [1]), (3, [1]), (1, []), (1, [1, 2])]:
        with pytest.raises(ValueError, match="worker w"):
            cluster.scheduler.apply("w", step_id, token_ids)
    cluster.scheduler.check()
    assert (a.num_output_tokens, a.num_pending_tokens) == (0, 2)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_sequence_is_added_once_and_only_with_something_to_do() -> None:
    cluster = make_cluster()
    a = cluster.add([1])
    with pytest.raises(ValueError, match="added before"):
        cluster.scheduler.add(a.group)
    cluster.scheduler.finish(a)
    with pytest.raises(ValueError, match="added before"):
        cluster.scheduler.add(a.group)
    with pytest.raises(ValueError, match="has its 1 tokens already"):
        cluster.scheduler.add(single(Sequence(7, [1, 2], 1, 1, frozenset())))


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 0: give at least 1"):
        SchedulerConfig(max_num_batched_tokens=0)
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        SchedulerConfig(max_num_seqs=0)
    with pytest.raises(ValueError, match="pipeline_depth is 0"):
        SchedulerConfig(pipeline_depth=0)
    for watermark in (-0.1, 1.0):
        with pytest.raises(ValueError, match="watermark"):
            SchedulerConfig(watermark=watermark)
    with pytest.raises(ValueError, match="preempt_every"):
        SchedulerConfig(preempt_every=0)


def test_without_a_worker_sequences_wait_and_nothing_fits() -> None:
    scheduler = Scheduler(SchedulerConfig())
    scheduler.add(single(Sequence(0, [1, 2], 2, 4, frozenset())))
    assert scheduler.workers.max_tokens_that_fit() == 0
    assert scheduler.stats().num_waiting == 1
    assert scheduler.waiting.size() == (1, 2)
    scheduler.check()


def test_statistics_count_blocks_and_filled_token_slots() -> None:
    cluster = make_cluster(num_blocks=10)
    cluster.add([1, 2, 3, 4, 5], max_tokens=2)  # 2 blocks: 8 token slots, 5 filled
    cluster.add([6], max_tokens=2)  # 1 block, 1 filled
    cluster.start()
    stats = cluster.stats()
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.num_free_blocks) == (3, 0, 7)
    assert (stats.num_allocated_token_slots, stats.num_filled_token_slots) == (12, 6)
    assert (stats.num_running, stats.num_in_flight_steps) == (2, 1)
    cluster.run_until_idle()
    stats = cluster.stats()
    # The five-token prompt filled one block, which stays as cache.
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.num_free_blocks) == (0, 1, 9)
