"""Arrival, draining and loss of workers: what they mean for groups and for admission. Blocks hold 4 tokens."""

from collections.abc import Iterator
from typing import Any

import pytest

from scheduler_svc.core.pins import PinRefusedError, check_promises
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.present_workers import PresentWorkers
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.seat_use import RunningGroup, SeatUse
from scheduler_svc.core.waiting_reasons import WaitingReason
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.worker_states import make_group, make_worker


def make_cluster(**workers: dict[str, Any]) -> Cluster:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, pipeline_depth=1, watermark=0.0))
    for worker_id, shape in workers.items():
        cluster.add_worker(worker_id, **shape)
    return cluster


def largest(workers: PresentWorkers) -> tuple[int, int]:
    return workers.max_tokens_that_fit(), workers.max_sequences_that_fit()


@pytest.mark.parametrize("shape", [{"num_seats": 0}, {"block_size": 0}])
def test_a_worker_without_a_seat_or_with_blocks_of_no_token_is_refused(shape: dict[str, Any]) -> None:
    cluster = make_cluster()
    with pytest.raises(ValueError, match="both are >= 1"):
        cluster.add_worker("w", **{"num_blocks": 8, **shape})


def test_a_worker_with_one_seat_and_blocks_of_one_token_serves() -> None:
    cluster = make_cluster(w={"num_blocks": 8, "num_seats": 1, "block_size": 1})
    cluster.add([1, 2, 3], 4)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_what_may_be_admitted_is_what_each_serving_worker_could_hold_or_the_last_that_was_here() -> None:
    cluster = make_cluster()
    workers = cluster.scheduler.workers
    assert largest(workers) == (0, 0)
    cluster.add_worker("small", num_blocks=10, num_seats=3)
    cluster.add_worker("large", num_blocks=20)
    assert largest(workers) == (40, 3)
    workers.drain_worker("small")
    assert largest(workers) == (80, 8)  # as many sequences as may run at once
    workers.drain_worker("large")
    assert largest(workers) == (40, 3)
    workers.undo_drain("large")
    assert largest(workers) == (80, 8)
    cluster.remove_worker("large")
    assert largest(workers) == (40, 3)
    cluster.remove_worker("small")
    assert largest(workers) == (40, 3)
    cluster.add_worker("narrow", num_blocks=5)
    assert largest(workers) == (20, 5)  # a block for each sequence


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_sequences", "num_tokens"),
    [(0, 1, 40), (0, 3, 12), (0, 4, 0), (8, 3, 16), (11, 3, 16), (12, 3, 20), (40, 3, 40), (44, 2, 40), (99, 1, 40)],
)
def test_samples_share_the_full_blocks_of_their_prompt_and_divide_the_others(
    num_prompt_tokens: int, num_sequences: int, num_tokens: int
) -> None:
    cluster = make_cluster(w={"num_blocks": 10, "num_seats": 3})
    assert cluster.scheduler.workers.max_tokens_that_fit(num_prompt_tokens, num_sequences) == num_tokens


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 7, 8])
def test_behind_the_longest_prompt_each_sample_has_room_for_a_token_and_behind_a_longer_one_not(
    num_sequences: int,
) -> None:
    workers = make_cluster(w={"num_blocks": 10}).scheduler.workers
    longest = workers.longest_prompt_that_fits(num_sequences)
    has_room = [workers.max_tokens_that_fit(length, num_sequences) > length for length in range(1, 60)]
    assert has_room == [length <= longest for length in range(1, 60)]


def test_a_pinned_block_counts_once_and_nothing_that_needs_it_is_admitted() -> None:
    cluster = make_cluster(w={"num_blocks": 10})
    workers = cluster.scheduler.workers
    first = cluster.add([*range(1, 9), 20], 5)
    cluster.run_until_idle()
    assert workers.pin_blocks("w", "prefix", first.block_hashes[:2])
    with pytest.raises(ValueError, match="prefix is pinned on worker w already"):
        workers.pin_blocks("w", "prefix", first.block_hashes[:1])
    assert workers.pin_blocks("w", "another", first.block_hashes[:1])
    assert (workers.max_tokens_that_fit(), workers.max_tokens_that_fit(with_pins=False)) == (32, 40)
    cluster.add_worker("x", num_blocks=12)
    assert not workers.pin_blocks("x", "prefix", first.block_hashes[:2]), "it has none of them"
    assert workers.num_pinned_blocks() == 2, "of the worker that has the most"
    workers.unpin_blocks("w", "prefix")
    assert (workers.num_pinned_blocks(), workers.max_tokens_that_fit()) == (1, 36)
    workers.unpin_blocks("w", "another")
    workers.unpin_blocks("w", "unknown")
    assert (workers.num_pinned_blocks(), workers.max_tokens_that_fit()) == (0, 40)
    for worker_id in "wx":
        cluster.remove_worker(worker_id)
    assert workers.num_pinned_blocks() == 0


def test_a_pin_that_would_take_the_memory_of_a_waiting_group_is_refused() -> None:
    cluster = make_cluster(w={"num_blocks": 10})
    first = cluster.add([*range(1, 9), 20], 5)
    cluster.run_until_idle()
    waits = cluster.add([3] * 8, 28)  # 9 blocks
    with pytest.raises(PinRefusedError, match="would leave 8 KV blocks"):
        cluster.scheduler.workers.pin_blocks("w", "prefix", first.block_hashes[:2])
    assert cluster.scheduler.workers.num_pinned_blocks() == 0
    assert cluster.scheduler.workers.pin_blocks("w", "prefix", first.block_hashes[:1])
    cluster.run_until_idle()
    assert waits.is_finished


def test_a_group_that_was_too_large_beside_a_pin_starts_once_it_is_unpinned() -> None:
    cluster = make_cluster(w={"num_blocks": 10})
    first = cluster.add([*range(1, 9), 20], 5)
    cluster.run_until_idle()
    assert cluster.scheduler.workers.pin_blocks("w", "prefix", first.block_hashes[:2])
    large = cluster.add([3] * 8, 28)
    assert cluster.start() is None
    cluster.scheduler.workers.unpin_blocks("w", "prefix")
    assert large in cluster.step().sequences
    cluster.run_until_idle()


def test_who_cannot_leave_a_draining_worker_leaves_once_another_serves_again() -> None:
    cluster = make_cluster(a={"num_blocks": 10}, b={"num_blocks": 10})
    workers = cluster.scheduler.workers
    workers.drain_worker("b")
    stays = cluster.add([1, 2, 3], 20)
    cluster.step("a")
    workers.drain_worker("a")
    cluster.step("a")
    assert stays.worker_id == "a"
    workers.undo_drain("b")
    cluster.step("b")
    assert stays.worker_id == "b"
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_who_seemed_too_late_for_a_slow_worker_starts_once_it_is_known_to_be_faster() -> None:
    cluster = make_cluster(w={"num_blocks": 10})
    workers = cluster.scheduler.workers
    workers.record_costs("w", PreemptionCosts(prefill_tokens_per_s=1.0))
    hurried = cluster.add([1] * 20, 4, deadline_s=10.0)
    assert cluster.start() is None
    assert cluster.scheduler.waiting_reason(hurried.group) is WaitingReason.DEADLINE
    workers.record_costs("w", PreemptionCosts(prefill_tokens_per_s=100.0))
    assert cluster.step().sequences == [hurried]


@pytest.mark.parametrize("block_size", [2, 8])
def test_what_members_shared_in_blocks_of_another_size_is_forgotten(block_size: int) -> None:
    cluster = make_cluster(w={"num_blocks": 40})
    group = cluster.add_group([11, 12, 13, 14, 15, 16], 3, 12)
    for _ in range(4):
        cluster.step()
    cluster.remove_worker("w")
    cluster.add_worker("w", num_blocks=40)
    assert cluster.scheduler.waiting_reason(group) is WaitingReason.NEXT_STEP  # looks at what they share
    cluster.remove_worker("w")
    cluster.add_worker("w", num_blocks=80, block_size=block_size)
    cluster.step()
    table, other = (sequence.block_table for sequence in group.sequences[:2])
    num_shared = 6 // block_size  # blocks of the common prompt
    assert table[:num_shared] == other[:num_shared] and set(table[num_shared:]).isdisjoint(other[num_shared:])
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_the_use_of_seats_is_that_of_the_workers_that_serve() -> None:
    cluster = make_cluster(a={"num_blocks": 20, "num_seats": 4}, b={"num_blocks": 20})
    cluster.scheduler.workers.drain_worker("b")
    cluster.add_group([1, 2, 3], 2, 9)
    cluster.step("a")
    cluster.step("a")
    expected: list[Any] = [SeatUse("a", 2, [RunningGroup(2, 9)])]
    assert cluster.scheduler.workers.seat_use() == expected


def test_groups_that_wait_at_a_worker_have_a_claim_to_its_seats() -> None:
    cluster = Cluster(SchedulerConfig(pipeline_depth=1, watermark=0.0, preemption="swap"))
    cluster.add_worker("a", num_blocks=4, num_seats=4, num_host_blocks=8)
    first, second = cluster.add([1, 2, 3, 4], 9), cluster.add([5, 6, 7, 8], 9)
    while second.group.swap_step is None:
        cluster.step("a")
    assert not first.is_finished
    (use,) = cluster.scheduler.workers.seat_use()
    assert (use.num_free, len(use.groups)) == (2, 1)


@pytest.mark.parametrize("keep_on_host", [True, False])
def test_a_group_that_was_paused_on_a_worker_that_is_gone_goes_on_at_another(keep_on_host: bool) -> None:
    cluster = make_cluster(w={"num_blocks": 10, "num_host_blocks": 10})
    paused = cluster.add([1, 2, 3], 9)
    cluster.step()
    cluster.start()
    cluster.scheduler.pause(paused.group, keep_on_host=keep_on_host)
    cluster.remove_worker("w")
    cluster.add_worker("x", num_blocks=10)
    cluster.scheduler.resume(paused.group)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_pin_is_refused_for_the_largest_of_the_groups_that_were_admitted() -> None:
    cluster = make_cluster(w={"num_blocks": 10})
    first = cluster.add([*range(1, 9), 20], 5)
    cluster.run_until_idle()
    for max_tokens in (4, 28, 4):  # 3, 9 and 3 blocks
        cluster.add([3] * 8, max_tokens)
    with pytest.raises(PinRefusedError, match="may need 9"):
        cluster.scheduler.workers.pin_blocks("w", "prefix", first.block_hashes[:2])
    cluster.run_until_idle()


class AskedWorkers(list[WorkerState]):
    """Workers that count how often they are all gone through."""

    num_times = 0

    def __iter__(self) -> Iterator[WorkerState]:
        self.num_times += 1
        return super().__iter__()


def test_only_waiting_groups_that_do_not_fit_beside_a_pin_are_looked_for_on_other_workers() -> None:
    workers = AskedWorkers([make_worker("a", num_blocks=10), make_worker("b", num_blocks=40)])
    waiting = [make_group([3] * 8, arrival=arrival, max_tokens=28 if arrival == 5 else 4) for arrival in range(9)]
    limits = WorkerLimits(max_num_seqs=8, pipeline_depth=1)
    check_promises(workers[0], [0], workers, waiting, limits)  # the sixth needs the nine blocks left, the others three
    assert workers.num_times == 0
    check_promises(workers[0], [0, 1], workers, waiting, limits)
    assert workers.num_times == 1
    del workers[1]
    with pytest.raises(PinRefusedError, match=r"would leave 8 KV blocks on worker a, .* may need 9"):
        check_promises(workers[0], [0, 1], workers, waiting, limits)


def test_a_block_is_cached_as_long_as_any_worker_has_it() -> None:
    cluster = make_cluster(a={"num_blocks": 10})
    first = cluster.add([*range(1, 9), 20], 5)
    cluster.run_until_idle()
    cluster.add_worker("b", num_blocks=10)
    workers = cluster.scheduler.workers
    assert [workers.is_cached(each) for each in (*first.block_hashes[:2], b"unknown")] == [True, True, False]
    cluster.remove_worker("a")
    assert not workers.is_cached(first.block_hashes[0])


def test_the_sequences_on_a_worker_are_those_that_run_and_those_that_wait_there() -> None:
    cluster = Cluster(SchedulerConfig(pipeline_depth=2, watermark=0.0, preemption="swap"))
    cluster.add_worker("a", num_blocks=40, num_host_blocks=40)
    groups = [cluster.add_group([number] * 5, number, 9) for number in (1, 2, 4)]
    cluster.step("a")
    assert cluster.scheduler.workers.num_sequences_on("a") == 7
    cluster.start("a")
    for group in groups[1:]:
        cluster.scheduler.pause(group, keep_on_host=group is groups[1])
        cluster.scheduler.resume(group)
    assert cluster.scheduler.workers.num_sequences_on("a") == 7, "their tokens are in flight"
    cluster.complete("a")
    assert cluster.scheduler.workers.num_sequences_on("a") == 3, "of the last group nothing is there any more"
    cluster.run_until_idle()
    assert cluster.scheduler.workers.num_sequences_on("a") == 0


def test_a_group_that_waits_for_its_last_token_has_a_claim_to_its_seat() -> None:
    cluster = make_cluster(a={"num_blocks": 20, "num_seats": 4})
    group = cluster.add_group([1, 2, 3], 1, 9)
    cluster.start("a")
    cluster.scheduler.pause(group, keep_on_host=False)
    assert cluster.scheduler.workers.seat_use() == [SeatUse("a", 3, [])], "its seat is free after the step"
    cluster.scheduler.resume(group)
    assert cluster.scheduler.workers.seat_use() == [SeatUse("a", 2, [])]
    cluster.complete("a")
    assert cluster.scheduler.workers.seat_use() == [SeatUse("a", 4, [])]
    cluster.run_until_idle()


@pytest.mark.parametrize(("own", "most"), [(None, 64), (8, 8), (100, 64)])
def test_a_step_computes_no_more_tokens_than_the_worker_and_the_settings_allow(own: int | None, most: int) -> None:
    workers = (cluster := make_cluster()).scheduler.workers
    assert workers.block_size is None
    workers.add_worker("w", num_blocks=100, block_size=4, num_seats=4, max_num_batched_tokens=own)
    assert workers.block_size == 4
    cluster.add([1] * 200, 4)
    plan = cluster.scheduler.schedule("w")
    assert plan is not None and plan.num_tokens == [most]


def test_what_a_worker_has_counted_counts_on_when_it_is_gone() -> None:
    cluster = make_cluster(w={"num_blocks": 10}, x={"num_blocks": 10})
    for number in range(4):
        cluster.add([number] * 5, 3)
    cluster.run_until_idle()
    counted = cluster.scheduler.stats().work
    assert counted.num_prefix_query_tokens == 20
    for worker_id in "wx":
        cluster.remove_worker(worker_id)
        assert cluster.scheduler.stats().work == counted
