"""Swaps of single groups: what is copied, what a swap costs, and what it leaves behind. Blocks hold 4 tokens."""

from typing import Any

import pytest

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.preemption import MAX_TRIAL_SWAPS, PreemptionCosts
from scheduler_svc.core.sequence import Cohort, SequenceGroup, SequenceStatus
from scheduler_svc.core.swapping import (
    can_swap,
    drop_host_copy,
    free_host_blocks,
    has_room_to_swap_in,
    insert_swapped,
    num_filled_blocks,
    should_swap,
    swap_in,
    swap_out,
)
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.worker_states import execute, launch_rows, make_group, make_worker, new_step, start


def make_swapping(**options: Any) -> WorkerState:
    return make_worker(**{"num_host_blocks": 20, "preemption": "swap", **options})


def computed(worker: WorkerState, *outputs: list[int], arrival: int = 0, prompt: int = 6) -> SequenceGroup:
    """Start a group and compute all of its tokens; each member then has a next one."""
    group = start(worker, make_group([arrival] * prompt, *outputs, arrival=arrival))
    launch_rows(worker, group)
    execute(worker)
    return group


def swapped(worker: WorkerState, group: SequenceGroup) -> SequenceGroup:
    swap_out(worker, group, worker.next_step_id)
    group.move_to(GroupState.SWAPPED)
    insert_swapped(worker, group)
    return group


def test_a_group_can_be_swapped_unless_something_stands_in_the_way() -> None:
    worker = make_swapping()
    group = computed(worker, [1], [2])
    assert can_swap(worker, group)
    assert can_swap(make_swapping(preemption="auto"), group)
    assert not can_swap(make_swapping(preemption="recompute"), group)
    assert not can_swap(make_worker(preemption="swap"), group), "without a host pool"
    group.sequences[1].source = group.sequences[0]
    assert not can_swap(worker, group)
    group.sequences[1].source, group.cohort = None, Cohort()
    assert not can_swap(worker, group)


@pytest.mark.parametrize(("num_host_blocks", "is_swapped"), [(2, False), (3, True)])
def test_a_group_is_swapped_if_there_is_room_for_its_distinct_blocks(num_host_blocks: int, is_swapped: bool) -> None:
    worker = make_swapping()
    group = computed(worker, [1], [2])  # a shared block, and one of each member
    assert num_filled_blocks(worker, group) == 3
    assert should_swap(worker, group, num_host_blocks) is is_swapped
    group.cohort = Cohort()
    assert not should_swap(worker, group, num_host_blocks)


@pytest.mark.parametrize(("swap_blocks_per_s", "is_swapped"), [(6.0, False), (6.1, True)])
def test_tokens_that_members_share_are_computed_once(swap_blocks_per_s: float, is_swapped: bool) -> None:
    """Three blocks there and back, or 2 * 7 - 4 tokens at 10 a second."""
    worker = make_swapping(preemption="auto")
    group = computed(worker, [1], [2])
    worker.costs = PreemptionCosts(prefill_tokens_per_s=10.0, swap_blocks_per_s=swap_blocks_per_s)
    assert should_swap(worker, group, 3) is is_swapped


def test_swaps_are_counted_as_trials() -> None:
    worker = make_swapping(preemption="auto")
    worker.costs = PreemptionCosts(prefill_tokens_per_s=10.0)
    group = computed(worker, [])
    worker.num_swaps = MAX_TRIAL_SWAPS - 1
    assert should_swap(worker, group, 9)
    swap_out(worker, group, 1)
    assert worker.num_swaps == MAX_TRIAL_SWAPS and worker.num_preemptions == 1
    assert not should_swap(worker, computed(worker, [], arrival=1), 9)


def test_only_what_is_computed_is_copied_each_block_once() -> None:
    worker = make_swapping()
    group = computed(worker, [1], [2])
    first, second = group.sequences
    tables = [list(sequence.block_table) for sequence in group.sequences]
    first.num_computed_tokens = 4
    swap_out(worker, group, 7)
    assert (list(first.host_blocks), list(second.host_blocks)) == ([0], [0, 1])
    assert worker.unsent_swap_out == [tables[0][0], 0, tables[1][1], 1]
    assert (worker.num_swapped_out_blocks, group.num_swapped_out_blocks, group.swap_step) == (2, 2, 7)
    assert not first.has_host_tail and first.num_computed_tokens == 4 and not group.num_recomputed_tokens


def test_a_tail_is_copied_and_comes_back_as_a_tail() -> None:
    worker = make_swapping()
    group = computed(worker, [], [])  # the second holds the first's half-filled block
    first, second = group.sequences
    worker.free_seats = worker.free_seats[:3]
    swapped(worker, group)
    assert (list(first.host_blocks), list(second.host_blocks)) == ([0, 1], [0, 1])
    assert (first.has_host_tail, second.has_host_tail) == (False, True)
    assert worker.host is not None and worker.host.num_available_blocks == 18
    for num_left, has_room in ((3, True), (2, False)):  # two blocks, and one for the copy of the tail
        worker.num_watermark_blocks = worker.blocks.num_available_blocks - num_left
        assert has_room_to_swap_in(worker, group, 0) is has_room
    worker.num_watermark_blocks = worker.blocks.num_available_blocks - 4
    assert has_room_to_swap_in(worker, group, 1) and not has_room_to_swap_in(worker, group, 2)
    step = new_step(worker)
    swap_in(worker, group, step)
    full, tail = first.block_table
    assert second.block_table == [full] and second.fork_tail == tail
    assert [worker.blocks.ref_count(block) for block in (full, tail)] == [2, 2]
    assert step.plan.swap_in == [0, full, 1, tail] and step.reshaped == [group]
    assert (worker.num_swapped_in_blocks, group.num_swapped_in_blocks) == (2, 2)
    assert worker.host.num_available_blocks == 20 and worker.swapped == [] and group.swap_step is None
    assert not second.has_host_tail and not second.host_blocks and group.state is GroupState.RUNNING


@pytest.mark.parametrize(("num_ended", "num_needed"), [(0, 5), (1, 4), (2, 3), (3, 2)])
def test_a_tail_that_is_in_no_table_needs_no_block_beside_those_of_the_members_that_go_on_from_it(
    num_ended: int, num_needed: int
) -> None:
    worker = make_swapping()
    group = swapped(worker, computed(worker, [], [], [], []))  # a full block, and a half-filled one
    for sequence in group.sequences[:num_ended]:
        free_host_blocks(worker, [sequence])
        sequence.status = SequenceStatus.FINISHED
    for num_left, has_room in ((num_needed, True), (num_needed - 1, False)):
        worker.num_watermark_blocks = worker.blocks.num_available_blocks - num_left
        assert has_room_to_swap_in(worker, group, 0) is has_room
    step = new_step(worker)
    swap_in(worker, group, step)
    launch_rows(worker, group)
    assert worker.blocks.num_used_blocks == num_needed


def test_a_swapped_group_comes_back_with_room_for_its_next_token() -> None:
    worker = make_swapping()
    group = computed(worker, [], prompt=8)  # 9 tokens, of which two blocks are computed
    (sequence,) = group.sequences
    swapped(worker, group)
    assert len(sequence.host_blocks) == 2
    for num_left, has_room in ((3, True), (2, False)):
        worker.num_watermark_blocks = worker.blocks.num_available_blocks - num_left
        assert has_room_to_swap_in(worker, group, 0) is has_room
    swap_in(worker, group, new_step(worker))
    assert len(sequence.block_table) == 3


@pytest.mark.parametrize(("num_computed", "num_kept"), [(7, 6), (6, 6)])
def test_candidates_of_beams_are_computed_again_after_a_swap(num_computed: int, num_kept: int) -> None:
    worker = make_swapping()
    group = start(worker, make_group([1] * 7, awaits_host=True))
    launch_rows(worker, group, budget=num_computed)
    execute(worker)
    swap_out(worker, group, 1)
    assert group.sequences[0].num_computed_tokens == num_kept


def test_unsent_copies_of_freed_host_blocks_are_cancelled_and_no_others() -> None:
    worker = make_swapping()
    groups = [swapped(worker, computed(worker, [], arrival=arrival)) for arrival in (1, 2)]
    copies = list(worker.unsent_swap_out)
    assert len(copies) == 8
    free_host_blocks(worker, groups[0].live)
    assert worker.unsent_swap_out == copies[4:]
    drop_host_copy(worker, groups[1])
    assert worker.unsent_swap_out == [] and groups[1].swap_step is None
    (sequence,) = groups[1].sequences
    assert (sequence.num_computed_tokens, sequence.num_lost_tokens, list(sequence.host_blocks)) == (0, 6, [])
    assert worker.host is not None and worker.host.num_available_blocks == 20


def test_swapped_groups_are_listed_by_their_order() -> None:
    worker = make_swapping()
    groups = {arrival: swapped(worker, computed(worker, [], arrival=arrival)) for arrival in (2, 3, 1)}
    assert worker.swapped == [groups[1], groups[2], groups[3]]


def test_blocks_that_came_back_are_put_into_the_cache_again() -> None:
    worker = make_swapping()
    group = computed(worker, [], prompt=8)
    (sequence,) = group.sequences
    swapped(worker, group)
    for block_hash in sequence.block_hashes:
        worker.blocks.forget(block_hash)  # as if others had needed the blocks meanwhile
    swap_in(worker, group, new_step(worker))
    launch_rows(worker, group)
    execute(worker)
    worker.stop_sequence(sequence)
    assert len(sequence.block_hashes) == 2 and all(map(worker.blocks.is_cached, sequence.block_hashes))
