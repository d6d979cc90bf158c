"""Fetched blocks that several steps place, since these have rows of others. Blocks hold 4 tokens."""

from typing import Any

import pytest

from scheduler_svc.core.fetching import Fetch
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.placing import num_placeable_blocks
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.test_scheduler_fetching import PROMPT, make_cluster, run, running_on_a


def coming_beside(cluster: Cluster, num_placed: int) -> tuple[SequenceGroup, Fetch]:
    """A group whose 12 blocks are on their way to b, which places so many with a step, and has another to run."""
    group = running_on_a(cluster, max_placed_blocks=num_placed)
    cluster.scheduler.workers.drain_worker("a")
    while cluster.in_flight["a"]:
        cluster.complete("a")
    group.fetch_id = 99  # as if it had been fetched for, so that the other goes first
    cluster.scheduler.pause(group, keep_on_host=False)
    cluster.add([9] * 3, 30)
    run(cluster, "b", 2)
    group.fetch_id = 0
    cluster.scheduler.resume(group)
    cluster.start("b")
    (fetch,) = cluster.fetches
    assert fetch.group is group
    return group, fetch


def waiting_beside(cluster: Cluster, **options: Any) -> SequenceGroup:
    """A group of which a has 12 blocks, in the queue of b, which has another to run."""
    group = cluster.add_group(PROMPT, 1, 12)
    run(cluster, "a", 6)
    cluster.add_worker("b", num_blocks=100, block_format="f", **options)
    cluster.scheduler.workers.drain_worker("a")
    while cluster.in_flight["a"]:
        cluster.complete("a")
    cluster.scheduler.pause(group, keep_on_host=False)
    cluster.add([9] * 3, 30)
    run(cluster, "b", 2)
    cluster.scheduler.resume(group)
    return group


def running_beside(cluster: Cluster, num_placed: int) -> tuple[SequenceGroup, Fetch]:
    """The same, once they have come."""
    group, fetch = coming_beside(cluster, num_placed)
    assert cluster.end_fetch(fetch) == 12
    return group, fetch


@pytest.mark.parametrize("num_placed", [1, 5, 12, 50])
def test_what_has_come_is_placed_by_several_steps_while_others_decode(num_placed: int) -> None:
    cluster = make_cluster(a={})
    group, _ = running_beside(cluster, num_placed)
    placed = []
    while group.state is not GroupState.RUNNING:
        plan = cluster.start("b")
        assert plan is not None and len(plan.sequences) in (1, 2) and set(plan.num_tokens) == {1}
        placed.append(len(plan.placed) // 3)
        cluster.complete("b")
        cluster.scheduler.check()
    assert sum(placed) == 12 and max(placed) == min(num_placed, 12) and len(placed) == -(-12 // num_placed)
    cluster.finish_and_compare()
    assert group.num_recomputed_tokens == 0 and group.num_fetched_blocks == 12


def test_what_is_left_is_placed_at_once_where_nothing_runs_any_more() -> None:
    cluster = make_cluster(a={})
    group, fetch = running_beside(cluster, 1)
    run(cluster, "b", 2)
    placed_before = fetch.num_placed - len(fetch.destination.unsent_placed)
    assert placed_before == 2
    (other,) = [sequence for sequence in cluster.sequences if sequence.group is not group]
    cluster.scheduler.finish(other)
    while cluster.in_flight["b"]:
        cluster.complete("b")
    plan = cluster.start("b")
    assert plan is not None and group.state is GroupState.RUNNING and len(plan.placed) == 3 * (12 - placed_before)
    cluster.finish_and_compare()


@pytest.mark.parametrize("event", ["finish", "pause", "drop", "lose", "refuse", "fail", "drain", "no room"])
def test_between_the_steps_that_place_a_fetch_anything_may_happen(event: str) -> None:
    cluster = make_cluster(a={})
    group, fetch = running_beside(cluster, 2)
    run(cluster, "b", 2)
    assert group.state is GroupState.FETCHING and len(fetch.destination.placed_by_fetches[fetch.fetch_id]) >= 4
    workers = cluster.scheduler.workers
    match event:
        case "finish":
            cluster.scheduler.finish_group(group)
        case "pause":
            cluster.scheduler.pause(group, keep_on_host=True)
            cluster.scheduler.resume(group)
        case "drop":
            cluster.drop_fetch(fetch)
        case "lose":
            cluster.lose_worker("b")
            cluster.add_worker("b", num_blocks=100, block_format="f")
        case "refuse" | "fail":
            cluster.start("b")
            (cluster.refuse_steps if event == "refuse" else cluster.fail_steps)("b")
        case "drain":
            workers.undo_drain("a")
            workers.drain_worker("b")
        case "no room":
            blocks = fetch.destination.blocks
            pinned = blocks.allocate(blocks.num_available_blocks - 3)
            for number in range(3):
                run(cluster, "b", 1)
                assert (group.state is GroupState.FETCHING) == (number < 1)
            blocks.free(pinned)
    cluster.assert_groups_are_listed()
    cluster.finish_and_compare()


@pytest.mark.parametrize("event", ["finish", "no room", "refuse"])
def test_the_worker_keeps_nothing_of_a_fetch_that_no_plan_places_any_more(event: str) -> None:
    cluster = make_cluster(a={})
    group, fetch = running_beside(cluster, 2)
    run(cluster, "b", 2)
    assert cluster.scheduler.fetches.is_needed(fetch) and cluster.workers["b"].fetches.num_kept
    match event:
        case "finish":
            cluster.scheduler.finish_group(group)
        case "no room":
            blocks = fetch.destination.blocks
            pinned = blocks.allocate(blocks.num_available_blocks - 3)
        case "refuse":
            cluster.start("b")
            cluster.refuse_steps("b")
    run(cluster, "b", 3)
    assert not cluster.scheduler.fetches.is_needed(fetch) and not cluster.workers["b"].fetches.num_kept
    if event == "no room":
        blocks.free(pinned)
    cluster.finish_and_compare()


def test_a_snapshot_places_nothing_since_the_worker_may_have_lost_it() -> None:
    cluster = make_cluster(a={})
    _, fetch = running_beside(cluster, 2)
    run(cluster, "b", 1)
    cluster.workers["b"].fetches.forget(fetch.fetch_id)  # its call has ended, and the news is under way
    cluster.start("b")
    assert cluster.plans["b"][-1].placed
    cluster.refuse_steps("b")
    plan = cluster.start("b")
    assert plan is not None and plan.snapshot and not plan.placed
    cluster.complete("b")
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_the_largest_fetch_takes_so_many_steps_and_beside_a_prompt_it_takes_one() -> None:
    worker = worker_with_rows(is_prefilling=False)
    assert [num_placeable_blocks(worker, 1000, 1000), num_placeable_blocks(worker, 40, 40)] == [32, 2]
    assert num_placeable_blocks(worker_with_rows(is_prefilling=True), 1000, 1000) == 1000


def worker_with_rows(*, is_prefilling: bool) -> WorkerState:
    """A worker that places two blocks a step beside its one row, if that decodes."""
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=4, pipeline_depth=1))
    cluster.add_worker("w", num_blocks=20, max_placed_blocks=2)
    cluster.add([1, 2, 3] * 3, 5)
    for _ in range(1 if is_prefilling else 4):
        run(cluster, "w", 1)
    return cluster.scheduler._places.workers["w"]


def test_what_was_placed_gives_way_to_rows_before_any_group_does() -> None:
    cluster = make_cluster(a={})
    group, fetch = running_beside(cluster, 2)
    run(cluster, "b", 2)
    worker = fetch.destination
    pinned = worker.blocks.allocate(worker.blocks.num_available_blocks)
    run(cluster, "b", 8)  # more than two blocks of its row
    (other,) = [sequence for sequence in cluster.sequences if sequence.group is not group]
    assert other.num_preemptions == 0 and other.num_output_tokens >= 8
    worker.blocks.free(pinned)
    cluster.finish_and_compare()


def test_a_group_whose_destination_is_gone_is_in_order_again_at_once() -> None:
    cluster = make_cluster(a={})
    group, _ = running_beside(cluster, 2)
    states = [group.state]
    cluster.remove_worker("b")
    assert [*states, group.state] == [GroupState.FETCHING, GroupState.WAITING]


def fetched_parts(cluster: Cluster, group: SequenceGroup) -> list[int]:
    """Have b go on until the group has started; return the sizes of its fetches."""
    sizes = []
    while group.state is not GroupState.RUNNING:
        assert cluster.start("b") is not None
        for fetch in list(cluster.fetches):
            sizes.append(len(fetch.blocks))
            cluster.end_fetch(fetch)
        cluster.complete("b")
        cluster.scheduler.check()
    return sizes


@pytest.mark.parametrize(("room", "sizes"), [(5, [5, 5, 2]), (11, [11, 1]), (12, [12])])
def test_what_has_no_room_at_once_comes_in_parts_while_others_run(room: int, sizes: list[int]) -> None:
    cluster = make_cluster(a={})
    group = waiting_beside(cluster, max_fetched_blocks=room)
    assert fetched_parts(cluster, group) == sizes
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()
    assert group.num_recomputed_tokens == 0 and group.num_fetched_blocks == 12


@pytest.mark.parametrize(
    "event", ["the others end", "the destination drains", "a rollback", "a pause", "the source goes"]
)
def test_a_group_does_not_wait_for_the_next_part_of_a_fetch_in_vain(event: str) -> None:
    cluster = make_cluster(a={})
    group = waiting_beside(cluster, max_fetched_blocks=5)
    other = cluster.sequences[-1]
    cluster.start("b")
    (fetch,) = cluster.fetches
    cluster.end_fetch(fetch)
    cluster.scheduler.check()
    assert group.state is GroupState.FETCHING and not cluster.fetches
    match event:
        case "the others end":
            cluster.scheduler.finish(other)
        case "the destination drains":
            cluster.add_worker("c", num_blocks=100)
            cluster.scheduler.workers.drain_worker("b")
        case "a rollback":
            cluster.refuse_steps("b")
        case "a pause":
            cluster.scheduler.pause(group, keep_on_host=False)
            cluster.scheduler.resume(group)
        case _:
            cluster.remove_worker("a")
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()
    assert group.num_fetched_blocks == 5
