"""Workers that drain: they get nothing new, and what is there moves or ends there. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup
from tests.scheduler.core_cluster import Cluster


def make_cluster(workers: dict[str, int], *, depth: int = 2, num_host_blocks: int = 0) -> Cluster:
    """`workers`: their pools, in blocks."""
    cluster = Cluster(
        SchedulerConfig(max_num_batched_tokens=32, pipeline_depth=depth, watermark=0.0, preemption="swap")
    )
    for worker_id, num_blocks in workers.items():
        cluster.add_worker(worker_id, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    return cluster


def add_mixed(cluster: Cluster) -> list[SequenceGroup]:
    """One that is still in its prompt when the others decode, samples, and a search."""
    groups = [cluster.add_group([number + 1, 2, 3], 1 + number % 2, 12) for number in range(4)]
    groups.append(cluster.add_group([9, 8, 7], 3, 12, is_beam=True))
    groups.append(cluster.add_group([5] * 70, 1, 12))
    return groups


def go_on(cluster: Cluster, worker_id: str, num_steps: int) -> None:
    for _ in range(num_steps):
        while cluster.start(worker_id) is not None:
            pass
        cluster.complete(worker_id)


@pytest.mark.parametrize("depth", [1, 2])
def test_all_groups_move_at_once_whatever_they_are_at(depth: int) -> None:
    cluster = make_cluster({"a": 200}, depth=depth)
    add_mixed(cluster)
    go_on(cluster, "a", 2)
    cluster.add_worker("b", num_blocks=200)
    cluster.start("a")
    cluster.scheduler.workers.drain_worker("a")
    cluster.scheduler.check()
    assert cluster.stats("a").num_running == 0 and cluster.stats("a").is_draining
    while cluster.in_flight["a"]:
        cluster.complete("a")
    assert cluster.scheduler.workers.num_sequences_on("a") == 0 and cluster.start("a") is None
    cluster.finish_and_compare()
    assert cluster.workers["b"].num_computed_tokens > 0


def test_with_no_other_worker_what_runs_ends_there_and_nothing_new_begins() -> None:
    cluster = make_cluster({"a": 200})
    groups = add_mixed(cluster)
    go_on(cluster, "a", 6)
    cluster.scheduler.workers.drain_worker("a")
    new = cluster.add([1, 2], 4)
    while cluster.start("a") is not None or cluster.in_flight["a"]:
        if cluster.in_flight["a"]:
            cluster.complete("a")
    assert all(group.is_finished for group in groups) and new.num_output_tokens == 0
    cluster.scheduler.workers.undo_drain("a")
    cluster.finish_and_compare()


def test_what_fits_nowhere_else_stays_and_the_rest_moves() -> None:
    cluster = make_cluster({"large": 60})
    long = cluster.add([1] * 100, 20)
    short = cluster.add([2] * 4, 20)
    go_on(cluster, "large", 6)
    cluster.add_worker("small", num_blocks=10)
    cluster.scheduler.workers.drain_worker("large")
    assert (long.worker_id, short.worker_id) == ("large", "large" if short.num_pending_tokens else None)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert (long.num_preemptions, short.num_preemptions) == (0, 1)


def test_what_is_preempted_where_it_has_to_stay_comes_back_there() -> None:
    cluster = make_cluster({"a": 14})
    for number in range(3):
        cluster.add([number + 1] * 8, 30)  # 10 blocks each at the end
    go_on(cluster, "a", 2)
    cluster.scheduler.workers.drain_worker("a")
    cluster.run_until_idle()
    assert cluster.stats("a").num_preemptions > 0
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()


def test_swapped_groups_move_too_when_another_worker_comes() -> None:
    cluster = make_cluster({"a": 14}, num_host_blocks=20)
    sequences = [cluster.add([number + 1] * 8, 30) for number in range(3)]
    while not cluster.stats("a").num_used_host_blocks:
        go_on(cluster, "a", 1)
    cluster.scheduler.workers.drain_worker("a")
    assert cluster.stats("a").num_used_host_blocks > 0  # there is nowhere else
    cluster.add_worker("b", num_blocks=40)
    while cluster.in_flight["a"]:
        cluster.complete("a")
    assert cluster.stats("a").num_used_host_blocks == 0 == cluster.scheduler.workers.num_sequences_on("a")
    go_on(cluster, "b", 1)
    assert {sequence.worker_id for sequence in sequences} == {"b"}
    cluster.finish_and_compare()


def test_a_worker_that_drains_is_no_measure_of_what_fits() -> None:
    cluster = make_cluster({"small": 10, "large": 50})
    assert cluster.scheduler.workers.max_tokens_that_fit() == 40
    cluster.scheduler.workers.drain_worker("small")
    assert cluster.scheduler.workers.max_tokens_that_fit() == 200
    cluster.scheduler.workers.drain_worker("large")
    assert cluster.scheduler.workers.max_tokens_that_fit() == 40


def test_a_worker_back_in_service_takes_new_work_again() -> None:
    cluster = make_cluster({"a": 20})
    cluster.scheduler.workers.drain_worker("a")
    cluster.add([1, 2, 3], 4)
    assert cluster.start("a") is None
    cluster.scheduler.workers.undo_drain("a")
    assert cluster.start("a") is not None


def test_new_costs_put_only_those_in_order_again_that_seemed_too_late() -> None:
    """Groups in order that no worker may take: the next plan looks at each of them."""
    cluster = make_cluster({"w": 40})
    costs = PreemptionCosts(prefill_tokens_per_s=1.0)
    cluster.scheduler.workers.record_costs("w", costs)
    late = cluster.add([1] * 8, 2, deadline_s=5.0)
    assert cluster.start("w") is None
    cluster.scheduler.workers.drain_worker("w")
    others = [cluster.add([number + 2], 2) for number in range(3)]
    assert cluster.start("w") is None
    assert [each.group.state for each in (late, *others)] == [GroupState.DEFERRED] * 4
    cluster.scheduler.workers.record_costs("w", costs)
    cluster.scheduler.check()
    assert [each.group.state for each in (late, *others)] == [GroupState.WAITING] + [GroupState.DEFERRED] * 3
    cluster.scheduler.workers.undo_drain("w")
    assert [each.group.state for each in others] == [GroupState.WAITING] * 3
