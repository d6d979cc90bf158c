"""Groups that are paused at any moment: what they hold, who may go before them, and that they go on exactly.

Blocks hold 4 tokens. The executor checks every read of a context against its tokens.
"""

import pytest

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.pausing import bind_paused, num_reclaimable_host_blocks, reclaim_host_blocks, stop_for_pause
from scheduler_svc.core.pins import PinRefusedError
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.test_scheduler_swap import PROMPT, make_cluster, step_until_preempted
from tests.scheduler.worker_states import execute, launch_rows, make_group, make_worker, start


def pause(cluster: Cluster, group: SequenceGroup, *, keep_on_host: bool = True) -> None:
    cluster.scheduler.pause(group, keep_on_host=keep_on_host)
    cluster.scheduler.check()
    assert cluster.scheduler.stats().num_paused_groups == 1
    assert all(sequence.seat is None and not sequence.block_table for sequence in group.sequences)


def resume_and_compare(cluster: Cluster, group: SequenceGroup) -> None:
    cluster.scheduler.resume(group)
    cluster.scheduler.check()
    cluster.finish_and_compare()
    assert all(sequence.is_finished for sequence in group.sequences)
    assert cluster.scheduler.stats().num_paused_groups == 0


def complete_all(cluster: Cluster) -> None:
    """Run until nothing is left except paused groups."""
    while cluster.start() is not None or cluster.in_flight["w"]:
        if cluster.in_flight["w"]:
            cluster.complete()
        cluster.scheduler.check()


@pytest.mark.parametrize("keep_on_host", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["one", "samples", "beams"])
def test_a_group_paused_at_any_step_holds_nothing_on_the_device_and_goes_on_exactly(
    kind: str, depth: int, num_steps: int, keep_on_host: bool
) -> None:
    cluster = make_cluster(depth=depth, budget=5)  # the prompt takes two steps
    group = cluster.add_group(PROMPT, 1 if kind == "one" else 3, 9, is_beam=kind == "beams")
    for _ in range(num_steps):
        while cluster.start() is not None:
            pass
        cluster.complete()
    cluster.start()
    pause(cluster, group, keep_on_host=keep_on_host)
    complete_all(cluster)
    stats = cluster.stats()
    assert stats.num_used_blocks == stats.num_running == 0
    if not keep_on_host:
        assert stats.num_used_host_blocks == 0
    elif num_steps > 2:
        assert stats.num_used_host_blocks > 0
    assert cluster.scheduler.stats().num_waiting_groups == 0
    resume_and_compare(cluster, group)
    stats = cluster.stats()
    assert stats.num_preemptions == stats.num_swaps == group.num_preemptions == 0
    if keep_on_host and num_steps > 2:
        assert stats.num_recomputed_tokens == 0 and stats.num_swapped_in_blocks > 0


@pytest.mark.parametrize("keep_on_host", [True, False])
def test_samples_that_had_ended_stay_ended(keep_on_host: bool) -> None:
    cluster = make_cluster()
    group = cluster.add_group(PROMPT, 3, 12)
    for _ in range(3):
        cluster.step()
    cluster.scheduler.finish(group.sequences[1])
    pause(cluster, group, keep_on_host=keep_on_host)
    cluster.scheduler.finish(group.sequences[0])
    cluster.scheduler.check()
    resume_and_compare(cluster, group)
    assert [len(s.output_token_ids) for s in group.sequences] == [3, 3, 12]


@pytest.mark.parametrize("keep_on_host", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_swapped_or_parked_group_is_paused_where_it_is(depth: int, keep_on_host: bool) -> None:
    cluster = make_cluster(num_blocks=4, depth=depth)
    cluster.add([1, 2, 3, 4], 9)
    b = cluster.add([5, 6, 7, 8], 9)
    step_until_preempted(cluster, b.group)
    pause(cluster, b.group, keep_on_host=keep_on_host)
    assert bool(b.host_blocks) == keep_on_host
    complete_all(cluster)
    assert not b.is_finished
    resume_and_compare(cluster, b.group)


def test_nothing_waits_for_the_tokens_in_flight_of_a_paused_group() -> None:
    cluster = make_cluster(depth=2)
    a = cluster.add(PROMPT, 9)
    cluster.start()
    cluster.start()
    pause(cluster, a.group)
    assert a.num_pending_tokens == 2
    cluster.complete()
    b = cluster.add(PROMPT, 2)
    plan = cluster.start()
    assert plan is not None and plan.sequences == [b]
    complete_all(cluster)
    assert b.is_finished and a.num_output_tokens == 2 and a.num_pending_tokens == 0
    resume_and_compare(cluster, a.group)


def test_a_group_that_is_resumed_at_once_waits_for_its_tokens_in_flight() -> None:
    cluster = make_cluster(depth=2)
    a = cluster.add(PROMPT, 9)
    cluster.start()
    cluster.start()
    pause(cluster, a.group, keep_on_host=False)
    cluster.scheduler.resume(a.group)
    cluster.scheduler.check()
    cluster.complete()
    assert cluster.start() is None, "its next token is not known"
    resume_and_compare(cluster, a.group)


def test_the_last_tokens_in_flight_end_a_paused_group() -> None:
    cluster = make_cluster(depth=2)
    a = cluster.add(PROMPT, 2)
    cluster.start()
    cluster.start()
    pause(cluster, a.group)
    complete_all(cluster)
    assert a.is_finished and not a.group.is_paused
    assert cluster.scheduler.stats().num_paused_groups == 0
    cluster.finish_and_compare()


def test_a_resumed_group_goes_before_those_that_came_after_it() -> None:
    cluster = make_cluster(num_blocks=3)
    a, b = cluster.add(PROMPT, 6), cluster.add(PROMPT, 6)  # 3 blocks each at the end: one after the other
    cluster.step()
    pause(cluster, a.group, keep_on_host=False)
    cluster.step()
    assert b.status is SequenceStatus.RUNNING
    c = cluster.add(PROMPT, 6)
    cluster.scheduler.resume(a.group)
    while not b.is_finished:
        cluster.step()
    assert not a.is_finished and c.num_output_tokens == 0
    while not a.is_finished:
        cluster.step()
    assert c.num_output_tokens == 0
    cluster.finish_and_compare()


def test_the_host_blocks_of_a_paused_group_are_given_up_to_one_that_is_preempted() -> None:
    # 4 blocks as in the swaps: one of the two gives way; the host pool has room for what is paused there, and no more.
    cluster = make_cluster(num_blocks=4, num_host_blocks=2)
    first, second = cluster.add([9, 8, 7, 6], 9), cluster.add([9, 8, 7, 5], 9)
    for _ in range(2):
        cluster.step()
    for held in (first, second):
        cluster.scheduler.pause(held.group, keep_on_host=True)
        cluster.scheduler.check()
    assert (len(first.host_blocks), len(second.host_blocks)) == (2, 0), "a pause takes what is free, and no more"
    cluster.scheduler.finish(second)
    a, b = cluster.add([1, 2, 3, 4], 9), cluster.add([5, 6, 7, 8], 9)
    step_until_preempted(cluster, b.group)
    assert len(b.host_blocks) == 2 and not first.host_blocks
    assert first.group.is_paused and first.group.worker_id is None
    complete_all(cluster)
    assert a.is_finished and b.is_finished
    resume_and_compare(cluster, first.group)
    assert first.group.num_recomputed_tokens > 0


def test_the_last_of_two_paused_groups_gives_up_its_host_blocks_first() -> None:
    # A keeper gives way with 3 blocks; 2 are held for each paused group, and 1 is free.
    cluster = make_cluster(num_blocks=6, num_host_blocks=5)
    first, second = cluster.add([9, 8, 7, 6], 9), cluster.add([9, 8, 7, 5], 9)
    for _ in range(2):
        cluster.step()
    cluster.scheduler.pause(second.group, keep_on_host=True)
    cluster.scheduler.pause(first.group, keep_on_host=True)
    keepers = [cluster.add([k, 2, 3, 4], 13) for k in (1, 5)]  # 4 blocks each at the end
    step_until_preempted(cluster, keepers[1].group)
    cluster.scheduler.check()
    assert first.host_blocks and not second.host_blocks
    complete_all(cluster)
    cluster.scheduler.resume(second.group)
    resume_and_compare(cluster, first.group)


def test_pausing_again_for_the_tokens_alone_gives_up_the_host_blocks() -> None:
    cluster = make_cluster()
    a = cluster.add(PROMPT, 9)
    for _ in range(3):
        cluster.step()
    pause(cluster, a.group)
    assert cluster.stats().num_used_host_blocks == 2
    pause(cluster, a.group)
    assert cluster.stats().num_used_host_blocks == 2
    pause(cluster, a.group, keep_on_host=False)
    assert cluster.stats().num_used_host_blocks == 0
    resume_and_compare(cluster, a.group)


def test_without_room_on_the_host_or_where_nothing_is_swapped_the_tokens_alone_are_kept() -> None:
    for cluster in (make_cluster(num_host_blocks=1), make_cluster(preemption="recompute")):
        a = cluster.add(PROMPT, 9)
        for _ in range(3):
            cluster.step()
        pause(cluster, a.group)
        assert not a.host_blocks and a.group.worker_id is None
        resume_and_compare(cluster, a.group)


@pytest.mark.parametrize("keep_on_host", [True, False])
def test_a_paused_group_stays_paused_when_its_worker_goes_or_takes_its_steps_back(keep_on_host: bool) -> None:
    for happens in (Cluster.fail_steps, lambda cluster: cluster.remove_all_memory("w", num_blocks=100)):
        cluster = make_cluster(depth=2)
        a = cluster.add(PROMPT, 9)
        cluster.step()
        cluster.start()
        cluster.start()
        pause(cluster, a.group, keep_on_host=keep_on_host)
        happens(cluster)
        cluster.scheduler.check()
        assert a.group.is_paused and not a.host_blocks and a.num_pending_tokens == 0
        assert cluster.start() is None
        resume_and_compare(cluster, a.group)


def test_a_finished_group_is_neither_paused_nor_resumed_and_a_paused_one_may_be_finished() -> None:
    cluster = make_cluster()
    a = cluster.add(PROMPT, 1)
    cluster.step()
    cluster.scheduler.pause(a.group, keep_on_host=True)
    cluster.scheduler.resume(a.group)
    b = cluster.add(PROMPT, 5)
    cluster.scheduler.pause(b.group, keep_on_host=True)
    c = cluster.add(PROMPT, 5)
    cluster.step()
    cluster.scheduler.pause(c.group, keep_on_host=True)
    for group in (b.group, c.group):
        cluster.scheduler.finish_group(group)
        cluster.scheduler.check()
    cluster.assert_idle_and_unleaked()
    assert cluster.scheduler.stats().num_paused_groups == 0


def test_a_paused_group_does_not_count_as_waiting() -> None:
    cluster = make_cluster()
    a = cluster.add(PROMPT, 5)
    pause(cluster, a.group)
    assert cluster.scheduler.waiting.size() == (0, 0)
    assert cluster.start() is None
    cluster.scheduler.resume(a.group)
    assert cluster.scheduler.waiting.size() == (1, len(PROMPT))
    resume_and_compare(cluster, a.group)


@pytest.mark.parametrize("keep_on_host", [True, False])
def test_no_pin_takes_the_memory_that_a_paused_group_will_need(keep_on_host: bool) -> None:
    cluster = make_cluster(num_blocks=6, enable_prefix_cache=True)
    seed = cluster.add([1, 2, 3, 4, 5], 1)
    cluster.step()
    a = cluster.add(PROMPT, 17)  # 23 tokens: all 6 blocks
    cluster.step()
    pause(cluster, a.group, keep_on_host=keep_on_host)
    with pytest.raises(PinRefusedError):
        cluster.scheduler.workers.pin_blocks("w", "x", seed.block_hashes[:1])
    resume_and_compare(cluster, a.group)


def test_a_group_that_is_resumed_on_a_draining_worker_goes_on_elsewhere() -> None:
    cluster = make_cluster(num_host_blocks=30)
    a = cluster.add(PROMPT, 20)
    for _ in range(3):
        cluster.step()
    pause(cluster, a.group)
    assert cluster.stats().num_used_host_blocks > 0
    cluster.add_worker("other", num_blocks=60)
    cluster.scheduler.workers.drain_worker("w")
    cluster.scheduler.resume(a.group)
    cluster.scheduler.check()
    assert cluster.scheduler.workers.num_sequences_on("w") == cluster.stats().num_used_host_blocks == 0
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert cluster.workers["other"].num_computed_tokens > 0


def test_no_pin_takes_the_memory_that_a_group_paused_on_a_draining_worker_will_need() -> None:
    cluster = make_cluster(num_blocks=20, num_host_blocks=30, enable_prefix_cache=True)
    a = cluster.add(PROMPT, 60)
    for _ in range(3):
        cluster.step()
    pause(cluster, a.group)
    cluster.add_worker("other", num_blocks=20)
    cluster.scheduler.workers.drain_worker("w")
    prefix = cluster.add([7] * 20, 1)
    cluster.step("other")
    assert prefix.is_finished
    with pytest.raises(PinRefusedError):
        cluster.scheduler.workers.pin_blocks("other", "x", prefix.block_hashes[:5])
    cluster.scheduler.finish_group(a.group)
    assert cluster.scheduler.workers.pin_blocks("other", "x", prefix.block_hashes[:5])


def test_a_group_that_is_added_paused_waits_for_its_resumption_in_no_queue() -> None:
    cluster = make_cluster()
    scheduler = cluster.scheduler
    a = cluster.new_group(PROMPT, 3, 5)
    scheduler.add(a, is_paused=True)
    scheduler.check()
    assert scheduler.waiting.size() == (0, 0) and scheduler.stats().num_paused_groups == 1 and cluster.start() is None
    with pytest.raises(ValueError, match="was added before"):
        scheduler.add(a)
    b = cluster.add(PROMPT, 5)
    scheduler.resume(a)
    plan = cluster.start()
    assert plan is not None and plan.sequences[0] is a.sequences[0] and b in plan.sequences
    cluster.finish_and_compare()


def started(worker: WorkerState, num_tokens: int, arrival: int = 0) -> SequenceGroup:
    """Start a group of which so many tokens are computed."""
    group = start(worker, make_group([arrival] * 20, arrival=arrival))
    if num_tokens:
        launch_rows(worker, group, budget=num_tokens)
        execute(worker)
    return group


@pytest.mark.parametrize(("num_tokens", "num_kept"), [(0, 0), (1, 1), (4, 1), (8, 2), (9, 0)])
def test_a_pause_keeps_what_is_computed_if_there_is_anything_and_room_for_it(num_tokens: int, num_kept: int) -> None:
    worker = make_worker(num_host_blocks=2, preemption="swap")
    group = started(worker, num_tokens)
    stop_for_pause(worker, group, keep_on_host=True)
    (sequence,) = group.sequences
    assert len(sequence.host_blocks) == num_kept
    assert group.swap_step == (worker.next_step_id if num_kept else None)
    assert sequence.num_computed_tokens == (num_tokens if num_kept else 0)
    assert (sequence.num_preemptions, group.num_preemptions, worker.num_preemptions) == (1, 0, 0)


def test_a_pause_for_the_tokens_alone_copies_nothing() -> None:
    worker = make_worker(num_host_blocks=2, preemption="swap")
    group = started(worker, 4)
    stop_for_pause(worker, group, keep_on_host=False)
    assert not group.sequences[0].host_blocks and not worker.unsent_swap_out


def paused(worker: WorkerState, num_tokens: int, arrival: int) -> SequenceGroup:
    group = started(worker, num_tokens, arrival)
    stop_for_pause(worker, group, keep_on_host=True)
    group.move_to(GroupState.PAUSED)
    bind_paused(worker, group, keep_on_host=True)
    return group


def test_host_blocks_of_paused_groups_are_given_up_as_far_as_they_are_needed() -> None:
    worker = make_worker(num_host_blocks=9, preemption="swap")
    groups = [paused(worker, num_tokens, arrival) for num_tokens, arrival in ((4, 3), (5, 2), (9, 1))]
    last, middle, first = groups
    assert list(worker.paused) == groups and worker.host is not None
    assert (worker.host.num_available_blocks, num_reclaimable_host_blocks(worker)) == (3, 9)
    reclaim_host_blocks(worker, 3)
    assert list(worker.paused) == groups
    reclaim_host_blocks(worker, 5)
    assert list(worker.paused) == [first] and worker.host.num_available_blocks == 6
    for group in (last, middle):
        assert (group.worker_id, group.sequences[0].worker_id) == (None, None)
    assert (first.worker_id, first.sequences[0].worker_id) == ("w", "w")
    assert num_reclaimable_host_blocks(make_worker()) == 0


def test_a_paused_group_with_a_token_in_flight_and_no_host_blocks_gives_up_nothing() -> None:
    worker = make_worker(num_host_blocks=4, preemption="swap")
    group = start(worker, make_group([1] * 3))
    launch_rows(worker, group)
    stop_for_pause(worker, group, keep_on_host=False)
    group.move_to(GroupState.PAUSED)
    bind_paused(worker, group, keep_on_host=False)
    assert list(worker.paused) == [group] and group.worker_id == "w"
    other = paused(worker, 4, arrival=-1)
    reclaim_host_blocks(worker, 4)
    assert list(worker.paused) == [group] and other.worker_id is None
