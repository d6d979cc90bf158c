"""Running groups that go on at a worker with little to do. Blocks hold 4 tokens."""

from typing import Any

import pytest

from scheduler_svc.core.load_sharing import MIN_DIFFERENCE, MIN_TOKENS_TO_GO
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup
from tests.scheduler.core_cluster import Cluster

PROMPT = [5, 6, 7, 8, 9]


def busy_cluster(num_groups: int, num_sequences: int = 1, max_tokens: int = 60, **options: Any) -> Cluster:
    """Worker a runs these groups, each with some output."""
    config = SchedulerConfig(max_num_batched_tokens=64, watermark=0.0, block_fetch="always")
    cluster = Cluster(config)
    cluster.add_worker("a", num_blocks=400, block_format="f")
    for number in range(num_groups):
        cluster.add_group([number + 1, *PROMPT], num_sequences, max_tokens, **options)
    for _ in range(4):
        cluster.start("a")
        cluster.complete("a")
    return cluster


def run(cluster: Cluster, num_rounds: int) -> None:
    """Give both workers their turns; fetches take a round."""
    for _ in range(num_rounds):
        for fetch in list(cluster.fetches):
            cluster.end_fetch(fetch)
        for worker_id in cluster.workers:
            while cluster.start(worker_id) is not None:
                pass
            if cluster.in_flight[worker_id]:
                cluster.complete(worker_id)
        cluster.scheduler.check()


def running(cluster: Cluster) -> list[int]:
    return [cluster.stats(worker_id).num_running for worker_id in cluster.workers]


def moved(cluster: Cluster) -> list[SequenceGroup]:
    groups = dict.fromkeys(sequence.group for sequence in cluster.sequences)
    return [group for group in groups if group.num_fetched_blocks]


@pytest.mark.parametrize("num_groups", [4, 9, 20])
def test_a_worker_that_comes_gets_a_share_of_what_runs(num_groups: int) -> None:
    cluster = busy_cluster(num_groups)
    cluster.add_worker("b", num_blocks=400, block_format="f")
    run(cluster, 30)
    there, here = running(cluster)
    assert here >= 1 and there + here == num_groups
    assert there < 2 * here + MIN_DIFFERENCE  # no more is moved then
    num_moved = len(moved(cluster))
    assert num_moved == here and cluster.scheduler.stats().work.num_preemptions == 0
    cluster.finish_and_compare()


def test_a_small_difference_moves_nothing() -> None:
    cluster = busy_cluster(MIN_DIFFERENCE - 1)
    cluster.add_worker("b", num_blocks=400, block_format="f")
    run(cluster, 10)
    assert running(cluster) == [MIN_DIFFERENCE - 1, 0]


@pytest.mark.parametrize(
    ("options", "worker"),
    [
        ({"max_tokens": MIN_TOKENS_TO_GO}, {}),  # it ends soon
        ({"use_prefix_cache": False}, {}),
        ({}, {"block_format": "g"}),
        ({}, {"block_format": ""}),
        ({}, {"role": "prefill"}),
        ({}, {"num_blocks": 10}),  # it could not hold it to its end
        ({}, {"max_fetched_blocks": 0}),
    ],
)
def test_what_cannot_gain_stays(options: dict[str, Any], worker: dict[str, Any]) -> None:
    cluster = busy_cluster(8, **options)
    cluster.add_worker("b", **{"num_blocks": 400, "block_format": "f", **worker})
    run(cluster, 10)
    assert not moved(cluster)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_a_group_that_has_most_of_the_sequences_does_not_change_its_place() -> None:
    cluster = busy_cluster(1, num_sequences=6)
    cluster.add_worker("b", num_blocks=400, block_format="f")
    run(cluster, 10)
    assert running(cluster) == [6, 0]


@pytest.mark.parametrize("is_beam", [False, True])
def test_groups_move_whole(is_beam: bool) -> None:
    cluster = busy_cluster(4, num_sequences=2, is_beam=is_beam)
    cluster.add_worker("b", num_blocks=400, block_format="f")
    run(cluster, 30)
    assert running(cluster)[1] >= 2
    cluster.finish_and_compare()


def test_nothing_moves_while_anything_waits() -> None:
    cluster = busy_cluster(8)
    cluster.add_worker("b", num_blocks=400, num_seats=1, block_format="f")
    for _ in range(3):
        cluster.add([3] * 9, 60)
    cluster.scheduler.workers.drain_worker("a")
    cluster.scheduler.workers.undo_drain("a")
    cluster.start("b")
    assert not any(fetch.group.destination for fetch in cluster.fetches)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_one_group_at_a_time_is_on_its_way() -> None:
    cluster = busy_cluster(20)
    cluster.add_worker("b", num_blocks=400, block_format="f")
    for _ in range(6):
        while cluster.start("b") is not None:
            pass
        cluster.start("a")
        cluster.complete("a")
        assert len(cluster.fetches) <= 1
    assert len(cluster.fetches) == 1 and running(cluster) == [19, 0]


def test_the_destination_may_leave_before_the_last_token_is_known() -> None:
    cluster = busy_cluster(8)
    cluster.add_worker("b", num_blocks=400, block_format="f")
    cluster.start("a")
    cluster.start("b")
    (parked,) = [sequence.group for sequence in cluster.sequences if sequence.group.destination]
    cluster.remove_worker("b")
    run(cluster, 3)
    assert parked.destination is None and running(cluster) == [8]
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
