"""Reasons why a group waits, by the scheduler alone. Blocks hold 4 tokens."""

from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting_reasons import WaitingReason
from tests.scheduler.core_cluster import Cluster


def make_cluster(num_blocks: int = 64, *, num_seats: int = 64, num_host_blocks: int = 0) -> Cluster:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=64, pipeline_depth=1, watermark=0.0, preemption="swap"))
    cluster.add_worker(num_blocks=num_blocks, num_seats=num_seats, num_host_blocks=num_host_blocks)
    return cluster


def reason(cluster: Cluster, group: SequenceGroup) -> WaitingReason | None:
    cluster.scheduler.check()
    return cluster.scheduler.waiting_reason(group)


def test_who_runs_and_who_has_ended_waits_for_nothing() -> None:
    cluster = make_cluster()
    group = cluster.add_group([1, 2, 3], 1, 2)
    assert reason(cluster, group) is WaitingReason.NEXT_STEP
    cluster.start("w")
    assert reason(cluster, group) is None
    cluster.run_until_idle()
    assert reason(cluster, group) is None


def test_a_group_that_no_connected_worker_can_hold_waits_for_a_larger_one() -> None:
    cluster = make_cluster(8)
    large = cluster.add_group([1] * 8, 1, 8)  # 4 blocks
    cluster.remove_worker("w")
    assert reason(cluster, large) is WaitingReason.NO_WORKER
    cluster.add_worker("small", num_blocks=3)
    assert reason(cluster, large) is WaitingReason.NO_LARGER_WORKER
    cluster.start("small")  # which sets it aside
    assert reason(cluster, large) is WaitingReason.NO_LARGER_WORKER


def test_a_group_waits_for_what_no_connected_worker_has_be_it_context_width_or_memory() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=64, watermark=0.0))
    cluster.add_worker("short", num_blocks=64, max_model_len=15)
    group = cluster.add_group([1] * 8, 3, 8)  # of 16 tokens each: 2 blocks that all share, and 2 of each
    assert reason(cluster, group) is WaitingReason.NO_LONGER_WORKER
    cluster.add_worker("narrow", num_blocks=64, max_model_len=16, num_seats=2)
    assert reason(cluster, group) is WaitingReason.NO_WIDER_WORKER
    cluster.add_worker("small", num_blocks=7)
    assert reason(cluster, group) is WaitingReason.NO_LARGER_WORKER
    cluster.add_worker("enough", num_blocks=8, max_model_len=16, num_seats=3)
    assert reason(cluster, group) is WaitingReason.NEXT_STEP
    cluster.scheduler.workers.drain_worker("enough")
    assert reason(cluster, group) is WaitingReason.DRAINING


def test_while_all_seats_are_taken_the_first_waits_for_a_seat_and_the_others_for_it() -> None:
    cluster = make_cluster(num_seats=1)
    _, first, second = (cluster.add_group([number + 1], 1, 4) for number in range(3))
    cluster.start("w")
    assert reason(cluster, first) is WaitingReason.SEAT
    assert reason(cluster, second) is WaitingReason.EARLIER_REQUESTS
    cluster.run_until_idle()


def test_a_free_seat_of_a_worker_with_the_other_role_is_not_what_a_prompt_waits_for() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=64, pipeline_depth=1, watermark=0.0))
    cluster.add_worker("p", num_blocks=64, num_seats=1, role="prefill")
    cluster.add_worker("d", num_blocks=64, role="decode")
    _, second = (cluster.add_group([number + 1], 1, 4) for number in range(2))
    cluster.start("p")
    assert cluster.start("d") is None
    assert reason(cluster, second) is WaitingReason.SEAT
    cluster.scheduler.workers.drain_worker("p")  # then the other does both
    assert reason(cluster, second) is WaitingReason.NEXT_STEP
    cluster.run_until_idle()


def test_while_there_are_seats_and_too_few_blocks_the_first_waits_for_blocks() -> None:
    cluster = make_cluster(6)
    running, first = (cluster.add_group([number + 1] * 18, 1, 4) for number in range(2))
    cluster.start("w")
    assert reason(cluster, running) is None
    assert reason(cluster, first) is WaitingReason.BLOCKS
    cluster.run_until_idle()


def test_while_the_only_worker_drains_a_newcomer_waits_for_that() -> None:
    cluster = make_cluster()
    cluster.scheduler.workers.drain_worker("w")
    assert reason(cluster, cluster.add_group([1], 1, 2)) is WaitingReason.DRAINING


def test_who_was_swapped_out_waits_for_blocks() -> None:
    cluster = make_cluster(6, num_host_blocks=12)
    groups = [cluster.add_group([number + 1] * 8, 1, 12) for number in range(2)]  # 5 blocks each at their longest
    while all(group.swap_step is None for group in groups):
        cluster.start("w")
        cluster.complete("w")
    swapped = next(group for group in groups if group.swap_step is not None)
    assert reason(cluster, swapped) is WaitingReason.BLOCKS
    newcomer = cluster.add_group([9], 1, 2)
    assert reason(cluster, newcomer) is WaitingReason.EARLIER_REQUESTS, "what was preempted goes first"


def resumed_from_host(cluster: Cluster, *groups: SequenceGroup) -> None:
    """Pause groups that run, with their blocks on the host, and resume them: they are swapped out."""
    for group in groups:
        cluster.scheduler.pause(group, keep_on_host=True)
    cluster.step()  # copies the blocks
    for group in groups:
        cluster.scheduler.resume(group)
        assert group.swap_step is not None


def test_of_those_swapped_out_the_first_waits_for_the_next_step_and_the_others_for_it() -> None:
    cluster = make_cluster(num_host_blocks=12)
    first, second, _ = (cluster.add_group([number + 1] * 6, 1, 9) for number in range(3))
    cluster.step()
    resumed_from_host(cluster, first, second)
    assert reason(cluster, first) is WaitingReason.NEXT_STEP
    assert reason(cluster, second) is WaitingReason.EARLIER_REQUESTS
    cluster.run_until_idle()


def test_who_was_swapped_out_and_lost_its_seat_waits_for_one() -> None:
    cluster = make_cluster(num_seats=2, num_host_blocks=12)
    swapped, _ = (cluster.add_group([number + 1] * 6, 1, 9) for number in range(2))
    cluster.step()
    cluster.scheduler.pause(swapped, keep_on_host=True)
    cluster.add_group([9], 1, 9)
    cluster.step()
    cluster.scheduler.resume(swapped)
    assert swapped.swap_step is not None
    assert reason(cluster, swapped) is WaitingReason.SEAT
    cluster.run_until_idle()


def test_who_was_swapped_out_waits_for_blocks_exactly_if_the_next_step_has_none_for_it() -> None:
    reasons = []
    for num_blocks in (4, 5, 6):
        cluster = make_cluster(num_blocks, num_host_blocks=12)
        swapped, runs = (cluster.add_group([number + 1] * 5, 1, 9) for number in range(2))
        cluster.step()
        cluster.scheduler.pause(swapped, keep_on_host=True)
        while runs.sequences[0].num_tokens < 10:  # in three blocks
            cluster.step()
        cluster.scheduler.resume(swapped)
        reasons.append(reason(cluster, swapped))
        cluster.start("w")
        assert (reason(cluster, swapped) is None) is (reasons[-1] is WaitingReason.NEXT_STEP)
    assert reasons == [WaitingReason.BLOCKS, WaitingReason.NEXT_STEP, WaitingReason.NEXT_STEP]


def test_who_was_preempted_in_a_step_in_flight_waits_for_that_step() -> None:
    cluster = make_cluster()
    group = cluster.add_group([1, 2, 3], 1, 9)
    cluster.start("w")
    cluster.scheduler.pause(group, keep_on_host=False)
    assert reason(cluster, group) is WaitingReason.RESUMPTION
    cluster.scheduler.resume(group)
    assert reason(cluster, group) is WaitingReason.STEP_IN_FLIGHT
    cluster.run_until_idle()


def test_who_is_tried_apart_waits_for_its_turn() -> None:
    cluster = make_cluster()
    groups = [cluster.add_group([number + 1], 1, 9) for number in range(2)]
    plan = cluster.scheduler.schedule("w")
    assert plan is not None
    cluster.scheduler.rollback("w")
    cluster.scheduler.record_failed_step([plan])
    assert {reason(cluster, group) for group in groups} == {WaitingReason.TRIAL}


def test_who_can_be_in_time_no_more_waits_for_its_deadline() -> None:
    cluster = make_cluster()
    late = cluster.add_group([1, 2, 3], 1, 9)
    late.deadline_s = 1.0
    assert cluster.scheduler.schedule("w", now_s=2.0) is None
    assert reason(cluster, late) is WaitingReason.DEADLINE
