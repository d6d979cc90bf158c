"""Places of groups: where a group is listed as it is preempted, moved, paused and ended. Blocks hold 4 tokens."""

from typing import Any

import pytest

from scheduler_svc.core.group_places import GroupPlaces
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Cohort, SequenceGroup, SequenceStatus
from scheduler_svc.core.swapping import swap_out
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.worker_states import execute, launch_rows, make_group, make_new_group, make_worker, start


def make_places(*worker_ids: str, **options: Any) -> GroupPlaces:
    places = GroupPlaces("fcfs", WorkerLimits(max_num_seqs=16, pipeline_depth=2), "always")
    for worker_id in worker_ids:
        places.workers[worker_id] = make_worker(worker_id, **options)
    return places


def preempted(places: GroupPlaces, *, swaps: bool = False, in_flight: bool = False, arrival: int = 0) -> SequenceGroup:
    """Start a group on worker `a`, compute it, and preempt it there; it is in no list but, in flight, in `parked`."""
    worker = places.workers["a"]
    group = start(worker, make_group([arrival] * 6, [], [], arrival=arrival))
    launch_rows(worker, group)
    if not in_flight:
        execute(worker)
    if swaps:
        swap_out(worker, group, worker.next_step_id)
    else:
        worker.preempt(group)
    return group


def test_a_preempted_group_waits_in_the_queue_and_is_bound_to_no_worker() -> None:
    places = make_places("a")
    group = preempted(places)
    places.place_preempted(group)
    assert group.state is GroupState.WAITING and group in places.waiting
    assert [group.worker_id, *(sequence.worker_id for sequence in group.sequences)] == [None] * 3
    assert [sequence.status for sequence in group.sequences] == [SequenceStatus.PREEMPTED] * 2
    places.check()


def test_a_group_that_never_ran_waits_as_one_that_did_not() -> None:
    places = make_places("a")
    group = preempted(places)
    places.queue_again(group, SequenceStatus.WAITING)
    assert [sequence.status for sequence in group.sequences] == [SequenceStatus.WAITING] * 2


def test_a_group_stays_where_it_is_while_it_runs_or_tokens_of_it_are_in_flight() -> None:
    places = make_places("a")
    running = start(places.workers["a"], make_group([1] * 3, arrival=1))
    parked = preempted(places, in_flight=True)
    for group in (running, parked):
        places.place_preempted(group)
    assert (running.state, parked.state) == (GroupState.RUNNING, GroupState.PARKED)
    assert list(places.workers["a"].parked) == [parked] and len(places.waiting) == 0
    for sequence in parked.sequences:
        sequence.num_pending_tokens = 0
    places.place_parked(places.workers["a"])
    assert parked.state is GroupState.WAITING and not places.workers["a"].parked
    places.check()


@pytest.mark.parametrize(("is_draining", "has_other", "is_kept"), [(0, 1, True), (1, 0, True), (1, 1, False)])
def test_a_swapped_group_stays_with_its_worker_unless_that_drains_and_another_could_hold_it(
    is_draining: int, has_other: int, is_kept: bool
) -> None:
    places = make_places("a", num_host_blocks=8, preemption="swap")
    if has_other:
        places.workers["b"] = make_worker("b")
    worker = places.workers["a"]
    worker.is_draining = bool(is_draining)
    group = preempted(places, swaps=True)
    for _ in range(2):  # again is harmless
        places.place_preempted(group)
        assert group.state is (GroupState.SWAPPED if is_kept else GroupState.WAITING)
        assert worker.swapped == ([group] if is_kept else [])
        if not is_kept:
            break
    assert (group in places.waiting) is not is_kept and (group.swap_step is not None) is is_kept
    assert worker.host is not None and worker.host.num_used_blocks == (2 if is_kept else 0)
    places.check()


def test_paused_groups_are_unbound_once_their_tokens_are_known() -> None:
    places = make_places("a")
    worker = places.workers["a"]
    group = preempted(places, in_flight=True)
    worker.take_out(group)
    group.move_to(GroupState.PAUSED)
    worker.paused[group] = places.paused[group] = None
    places.place_parked(worker)
    assert list(worker.paused) == [group] and group.worker_id == "a"
    for sequence in group.sequences:
        sequence.num_pending_tokens = 0
    places.place_parked(worker)
    assert not worker.paused and group.worker_id is None and list(places.paused) == [group]


def test_a_group_is_taken_out_of_the_queue_of_the_paused_and_of_its_worker() -> None:
    places = make_places("a")
    waiting = make_new_group([1], arrival=1)
    places.waiting.push(waiting)
    parked = preempted(places, in_flight=True)
    paused = make_new_group([1], arrival=2)
    paused.move_to(GroupState.PAUSED)
    places.paused[paused] = None
    for group in (waiting, parked, paused):
        places.take_out(group)
    assert list(places.listed_states()) == [] and not places.paused and not places.workers["a"].parked
    parked.worker_id = "gone"
    places.take_out(parked)  # no-op


def test_a_group_that_ends_is_nowhere() -> None:
    places = make_places("a")
    group = preempted(places, in_flight=True)
    for sequence in group.sequences:
        sequence.status = SequenceStatus.FINISHED
    places.end_group(group)
    assert (group.state, group.worker_id) == (GroupState.ENDED, None) and list(places.listed_states()) == []


def test_groups_leave_a_draining_worker_for_one_that_could_hold_them() -> None:
    places = make_places("a", num_blocks=60, num_host_blocks=8, preemption="swap")
    places.workers["b"] = make_worker("b", num_blocks=29)
    worker = places.workers["a"]
    running = start(worker, make_group([1] * 3, arrival=1))
    too_large = start(worker, make_group([1] * 80, arrival=2))
    swapped = preempted(places, swaps=True, arrival=3)
    places.place_preempted(swapped)
    places.move_from_draining()
    assert [group.state for group in (running, swapped)] == [GroupState.RUNNING, GroupState.SWAPPED]
    worker.is_draining = True
    places.move_from_draining()
    states = [group.state for group in (running, too_large, swapped)]
    assert states == [GroupState.WAITING, GroupState.RUNNING, GroupState.WAITING]
    assert running.num_preemptions == 1 and worker.swapped == []
    places.check()


def fetching_places() -> GroupPlaces:
    """Two workers between which blocks pass."""
    return make_places("a", "b", block_format="f", max_fetched_blocks=9, max_placed_blocks=1)


@pytest.mark.parametrize(
    ("destination", "is_suspect", "state"),
    [
        ("b", False, GroupState.FETCHING),
        ("b", True, GroupState.QUARANTINED),
        (None, False, GroupState.WAITING),
        (None, True, GroupState.QUARANTINED),
    ],
)
def test_a_group_that_was_stopped_for_a_worker_is_fetched_there_unless_it_is_suspected(
    destination: str | None, is_suspect: bool, state: GroupState
) -> None:
    places = fetching_places()
    group = preempted(places)
    group.destination = destination
    group.cohort = Cohort({group: None}) if is_suspect else None
    places.place_preempted(group)
    assert group.state is state
    started = [fetch.destination.worker_id for fetch in places.fetches.take_started()]
    assert started == (["b"] if state is GroupState.FETCHING else [])


def test_nothing_is_held_any_more_for_a_group_that_is_taken_out() -> None:
    """A step of the destination, which has a row, places one of the two blocks that have come."""
    places = fetching_places()
    worker = places.workers["b"]
    launch_rows(worker, start(worker, make_group([9], arrival=9)))
    group = preempted(places)
    group.destination = "b"
    places.place_preempted(group)
    (fetch,) = places.fetches.take_started()
    assert places.fetches.end(fetch, 2) == 2 and list(worker.placed_by_fetches) == [fetch.fetch_id]
    places.take_out(group)
    assert not worker.placed_by_fetches and worker.num_coming_fetched == 0


def test_a_group_that_is_counted_as_it_was_is_noticed() -> None:
    places = make_places("a")
    group = make_new_group([1] * 3)
    places.waiting.push(group)
    places.check()
    group.sequences[0].token_ids.append(2)
    with pytest.raises(AssertionError, match="counted as it was"):
        places.check()


def test_a_paused_group_leaves_its_worker_when_the_member_with_a_token_in_flight_ends() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=1, pipeline_depth=1, watermark=0.0))
    cluster.add_worker(num_blocks=40)
    group = cluster.add_group([1], 2, 9)
    cluster.step()
    cluster.start()  # a row of the first member alone
    cluster.scheduler.pause(group, keep_on_host=False)
    assert [sequence.num_pending_tokens for sequence in group.sequences] == [1, 0] and group.worker_id == "w"
    cluster.scheduler.finish(group.sequences[0])
    assert group.is_paused and group.worker_id is None
    cluster.scheduler.check()


def test_a_group_that_is_paused_has_not_waited_so_far() -> None:
    cluster = Cluster(SchedulerConfig(max_num_seqs=1, pipeline_depth=1, watermark=0.0))
    cluster.add_worker(num_blocks=40)
    _, waits = (cluster.add_group([number], 1, 9) for number in (1, 2))
    cluster.now_s = 5.0
    cluster.step()
    assert waits.waits_since_s == 5.0
    cluster.scheduler.pause(waits, keep_on_host=False)
    assert waits.waits_since_s is None


def test_a_group_that_is_forgotten_has_no_members_to_keep_in_memory() -> None:
    cluster = Cluster(SchedulerConfig(watermark=0.0))
    cluster.add_worker(num_blocks=40)
    group = cluster.add_group([1], 2, 1)
    cluster.run_until_idle()
    cluster.scheduler.forget_group(group)
    assert group.sequences == [] and group.is_finished
