"""Undoing of steps that were not executed: counters, blocks and hashes are as before. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step_rows import swap_or_preempt
from scheduler_svc.core.swapping import insert_swapped
from scheduler_svc.core.undoing import undo_steps
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.worker_states import (
    cache_prompt,
    execute,
    launch,
    launch_rows,
    make_group,
    make_worker,
    new_step,
    start,
)


def test_of_a_group_that_was_started_in_an_undone_step_nothing_counts_as_lost() -> None:
    worker = make_worker()
    cache_prompt(worker, [1] * 4)
    before, after = (start(worker, make_group([1] * 4 + [arrival] * 5, arrival=arrival)) for arrival in (2, 3))
    launch_rows(worker, before, budget=2)
    execute(worker)
    step = launch_rows(worker, before, after, budget=2)
    step.reshaped.append(before)
    worker.needs_snapshot = False
    assert undo_steps(worker) == [before, after]
    assert [group.sequences[0].num_lost_tokens for group in (before, after)] == [6, 0]
    assert [group.sequences[0].num_computed_tokens for group in (before, after)] == [0, 0]
    assert [group.state for group in (before, after)] == [GroupState.PARKED] * 2
    assert worker.needs_snapshot and not worker.in_flight


def swapped_in_step(worker: WorkerState, arrival: int) -> SequenceGroup:
    """Put a step in flight that swaps a group out."""
    group = start(worker, make_group([arrival] * 6, arrival=arrival))
    launch_rows(worker, group)
    execute(worker)
    step = new_step(worker)
    swap_or_preempt(worker, step, group)
    launch(worker, step)
    assert group.swap_step == step.plan.step_id
    return group


@pytest.mark.parametrize("state", [GroupState.SWAPPED, GroupState.PARKED, GroupState.PAUSED])
def test_swaps_of_undone_steps_are_undone_and_earlier_ones_are_not(state: GroupState) -> None:
    worker = make_worker(num_host_blocks=8, preemption="swap")
    groups: list[SequenceGroup] = []
    for arrival in (2, 3):
        if groups:
            execute(worker)
        group = swapped_in_step(worker, arrival)
        groups.append(group)
        if state is GroupState.PARKED:
            worker.parked[group] = None
            continue
        group.move_to(state)
        if state is GroupState.SWAPPED:
            insert_swapped(worker, group)
        else:
            worker.paused[group] = None
    first, second = groups
    assert undo_steps(worker) == ([] if state is GroupState.PAUSED else [second])
    assert first.swap_step is not None and second.swap_step is None
    assert [len(group.sequences[0].host_blocks) for group in groups] == [2, 0]


def test_a_preempted_group_that_is_to_be_computed_again_is_not_queued_twice() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 6))
    launch_rows(worker, group)
    worker.preempt(group)
    assert group in worker.parked
    assert undo_steps(worker) == []


def test_counters_blocks_and_hashes_of_those_that_run_on_are_those_of_before() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 6))
    (sequence,) = group.sequences
    launch_rows(worker, group, budget=2)
    execute(worker)
    for budget in (2, 2, 1, 1, 1):  # the rest of the prompt, and up to a third block
        step = launch_rows(worker, group, budget=budget)
    assert len(sequence.block_table) == 3 and step.plan.positions == [8]
    assert worker.blocks.is_findable(sequence.block_table[0])
    sequence.is_decoding = True
    assert undo_steps(worker) == []
    assert (sequence.num_computed_tokens, sequence.num_pending_tokens, sequence.num_registered_blocks) == (2, 0, 0)
    assert len(sequence.block_table) == 2 and worker.blocks.num_used_blocks == 2
    assert not worker.blocks.is_findable(sequence.block_table[0])
    assert not sequence.is_decoding and group.state is GroupState.RUNNING


def test_a_sequence_that_has_moved_keeps_its_count() -> None:
    worker, other = make_worker(), make_worker("other")
    group = start(worker, make_group([1] * 6))
    launch_rows(worker, group, budget=2)
    worker.preempt(group)
    group.move_to(GroupState.WAITING)
    start(other, group)
    launch_rows(other, group, budget=3)
    undo_steps(worker)
    assert group.sequences[0].num_computed_tokens == 3


def test_with_nothing_in_flight_what_has_not_begun_is_queued_again() -> None:
    worker = make_worker()
    ran, fresh = (start(worker, make_group([arrival] * 6, arrival=arrival)) for arrival in (1, 2))
    launch_rows(worker, ran)
    execute(worker)
    assert undo_steps(worker) == []
    fresh.sequences[0].first_step_id = worker.next_step_id  # of a plan that was not put in flight
    assert undo_steps(worker) == [fresh]


def test_blocks_of_a_group_that_is_computed_again_are_not_put_into_the_cache() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 6))
    for budget in (3, 1):  # a row of one token registers no block
        launch_rows(worker, group, budget=budget)
        execute(worker)
    launch_rows(worker, group, budget=1).reshaped.append(group)
    assert undo_steps(worker) == [group]
    assert worker.blocks.num_cached_blocks == worker.blocks.num_used_blocks == 0


def test_what_an_undone_step_held_is_free_and_its_candidates_are_not_awaited() -> None:
    worker = make_worker()
    beams, other = (start(worker, make_group([arrival] * 6, arrival=arrival)) for arrival in (1, 2))
    beams.awaits_host = True
    launch_rows(worker, beams, other)
    worker.stop_sequence(other.sequences[0])
    assert (worker.blocks.num_used_blocks, beams.num_pending_tokens) == (4, 1)
    assert undo_steps(worker) == [beams]
    assert worker.blocks.num_used_blocks == beams.num_pending_tokens == 0


def test_after_a_rollback_only_those_that_never_ran_may_come_too_late() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=8, pipeline_depth=1, watermark=0.0))
    cluster.add_worker(num_blocks=40)
    with_output, without = (cluster.add([number] * 6, 9, deadline_s=5.0) for number in (1, 2))
    cluster.step()  # 6 tokens of the first prompt, 2 of the second
    for sequence in (with_output, without):
        cluster.scheduler.pause(sequence.group, keep_on_host=False)
        cluster.scheduler.resume(sequence.group)
    fresh = cluster.add([3] * 6, 9, deadline_s=5.0)
    plan = cluster.start()
    assert plan is not None and plan.whole == [with_output, without, fresh]
    cluster.refuse_steps()
    statuses = [sequence.status for sequence in (with_output, without, fresh)]
    assert statuses == [SequenceStatus.PREEMPTED, SequenceStatus.PREEMPTED, SequenceStatus.WAITING]
    assert cluster.scheduler.expired_groups(9.0) == [fresh.group]
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
