"""State of one worker: who holds its seats and blocks, and what steps in flight keep. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.memory_use import work_of
from scheduler_svc.core.scheduler_stats import TotalCounters
from scheduler_svc.core.sequence import SequenceStatus
from tests.scheduler.worker_states import execute, launch, launch_rows, make_group, make_worker, new_step, start


def test_the_copy_of_a_worker_is_empty_and_as_large() -> None:
    worker = make_worker(
        num_blocks=7,
        num_seats=5,
        num_watermark_blocks=2,
        max_num_batched_tokens=3,
        num_host_blocks=9,
        preemption="swap",
        max_model_len=11,
    )
    start(worker, make_group([1] * 6))
    copy = worker.empty_copy()
    assert copy.blocks.num_available_blocks == 7 and copy.capacity_blocks == 5
    assert copy.host is not None and copy.host.num_blocks == 9
    assert (copy.worker_id, copy.block_size, copy.num_seats, copy.max_num_batched_tokens) == ("w", 4, 5, 3)
    assert (copy.enable_prefix_cache, copy.preemption, copy.max_model_len) == (True, "swap", 11)
    assert make_worker(num_host_blocks=0).empty_copy().host is None


@pytest.mark.parametrize(("budget", "num_spare"), [(3, 0), (4, 0), (5, 0), (6, 1), (20, 15)])
def test_what_the_running_sequences_leave_of_a_step_is_to_spare(budget: int, num_spare: int) -> None:
    worker = make_worker(max_num_batched_tokens=budget)
    groups = [make_group([arrival] * 3, arrival=arrival, max_tokens=1) for arrival in (1, 2)]
    for group in groups:
        start(worker, group)
    launch_rows(worker, groups[0], budget=1)
    assert worker.num_spare_tokens() == num_spare
    assert worker.has_spare_tokens() is (num_spare > 0)
    launch_rows(worker, groups[0])  # it has all its tokens now: nothing is left to compute
    assert worker.num_spare_tokens() == max(0, budget - 3)
    assert worker.has_spare_tokens() is (budget > 3)


def test_sequences_run_in_order_whatever_order_they_start_in_and_catch_up_until_they_decode() -> None:
    worker = make_worker()
    groups = {arrival: make_group([arrival] * 6, arrival=arrival) for arrival in (2, 4, 1, 3)}
    for group in groups.values():
        start(worker, group)
    in_order = [groups[arrival].sequences[0] for arrival in (1, 2, 3, 4)]
    assert worker.running == in_order and worker.catching_up.keys() == set(in_order)
    launch_rows(worker, groups[1], budget=5)
    assert in_order[0] in worker.catching_up, "one token of its prompt is left"
    launch_rows(worker, groups[1], groups[2])
    assert worker.catching_up.keys() == set(in_order[2:])
    for group in (groups[2], groups[3]):
        worker.stop_sequence(group.sequences[0])
    assert worker.running == [in_order[0], in_order[3]] and worker.catching_up.keys() == {in_order[3]}


def test_a_prefix_is_looked_up_as_far_as_it_leaves_the_last_token() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 9))
    launch_rows(worker, group)
    execute(worker)
    table = list(group.sequences[0].block_table)
    (known,) = make_group([1] * 8, arrival=1).sequences
    known.block_hashes = list(group.sequences[0].block_hashes)  # of both blocks, as of one that was longer
    assert worker.find_prefix(known) == table[:1]
    assert worker.find_prefix(make_group([1] * 9, arrival=2).sequences[0]) == table[:2]
    assert worker.find_prefix(make_group([1] * 4, arrival=3).sequences[0]) == []
    known.use_prefix_cache = False
    assert worker.find_prefix(known) == []


def test_a_worker_without_a_prefix_cache_finds_nothing() -> None:
    worker = make_worker(enable_prefix_cache=False)
    launch_rows(worker, start(worker, make_group([1] * 9)))
    assert worker.find_prefix(make_group([1] * 9, arrival=1).sequences[0]) == []


def test_a_seat_is_told_to_be_free_if_the_worker_was_told_of_it() -> None:
    worker = make_worker()
    told, untold = (start(worker, make_group([arrival] * 3, arrival=arrival)) for arrival in (1, 2))
    (seat,) = [sequence.seat for sequence in told.sequences]
    launch_rows(worker, told)
    execute(worker)
    for group in (untold, told):
        worker.stop_sequence(group.sequences[0])
    assert worker.freed_seats == [seat]
    assert sorted(worker.free_seats) == list(range(16)) and worker.num_members == 0


def test_blocks_and_seat_of_a_sequence_are_kept_for_its_last_step_in_flight() -> None:
    worker = make_worker()
    groups = [start(worker, make_group([arrival] * 3, arrival=arrival)) for arrival in (1, 2, 3)]
    for number in range(3):
        launch_rows(worker, *groups[number:], budget=1)
    num_used = []
    for group in groups:
        worker.stop_sequence(group.sequences[0])
    assert [len(step.releases) for step in worker.in_flight] == [1, 1, 1]
    assert worker.num_coming_blocks() == 3
    while worker.in_flight:
        worker.complete_step()
        num_used.append((worker.blocks.num_used_blocks, len(worker.free_seats)))
    assert num_used == [(2, 14), (1, 15), (0, 16)]


def test_of_a_stopped_group_all_that_was_computed_is_lost_unless_it_is_kept() -> None:
    worker = make_worker(num_host_blocks=8, preemption="swap")
    lost, kept = (start(worker, make_group([arrival] * 6, arrival=arrival)) for arrival in (1, 2))
    launch_rows(worker, lost, kept)
    worker.stop_group(lost)
    worker.stop_group(kept, keeps_computed=True)
    assert [(group.sequences[0].num_computed_tokens, group.sequences[0].num_lost_tokens) for group in (lost, kept)] == [
        (0, 6),
        (6, 0),
    ]
    assert list(worker.parked) == [lost, kept], "their tokens are in flight"
    assert all(group.sequences[0].status is SequenceStatus.PREEMPTED for group in (lost, kept))


def test_a_preemption_is_counted_for_worker_group_and_members() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 3, [2], [3]))
    worker.preempt(group)
    assert (worker.num_preemptions, group.num_preemptions) == (1, 1)
    assert [sequence.num_preemptions for sequence in group.sequences] == [1, 1]
    assert group not in worker.parked, "nothing of it is in flight"


def test_nothing_is_put_into_the_cache_before_the_first_row() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 9))
    (sequence,) = group.sequences
    sequence.num_computed_tokens = 8
    worker.cache_full_blocks(sequence, None)
    assert not worker.blocks.is_findable(sequence.block_table[0])
    sequence.last_step = 1
    worker.cache_full_blocks(sequence, None)
    assert [worker.blocks.is_findable(block) for block in sequence.block_table] == [True, True, False]
    assert sequence.num_registered_blocks == 2


def test_a_group_that_may_be_wrong_leaves_the_cache_but_for_pinned_blocks() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 9))
    launch_rows(worker, group)
    first, second, third = group.sequences[0].block_table
    worker.pins["system"] = [first]
    worker.uncache_blocks(group)
    assert [worker.blocks.is_findable(block) for block in (first, second, third)] == [True, False, False]


def test_a_block_that_steps_copy_from_is_held_once_by_each_until_it_is_done() -> None:
    worker = make_worker()
    (block,) = worker.blocks.allocate(1)
    steps = []
    for _ in range(2):
        steps.append(step := new_step(worker))
        worker.hold_copy_source(block, step)
        worker.hold_copy_source(block, step)
        launch(worker, step)
    assert worker.blocks.ref_count(block) == 3 and worker.num_holders(block) == 1
    worker.blocks.free([block])
    assert worker.num_coming_blocks() == 1 and worker.num_holders(block) == 0
    worker.complete_step()
    assert worker.copy_holds == {block: 1} and worker.blocks.ref_count(block) == 1
    worker.complete_step()
    assert list(worker.copy_holds) == [] and worker.blocks.num_used_blocks == 0


def test_blocks_filled_by_decoding_are_put_into_the_cache_of_their_worker_alone() -> None:
    worker, other = make_worker(), make_worker("other")
    groups = [start(worker, make_group([arrival] * 3, arrival=arrival)) for arrival in (1, 2, 3)]
    launch_rows(worker, *groups)
    execute(worker)
    launch_rows(worker, *groups)
    for group in groups:
        group.sequences[0].last_step = worker.in_flight[0].plan.step_id
    execute(worker)
    worker.uncached = [group.sequences[0] for group in groups]
    worker.stop_group(groups[1])
    groups[2].sequences[0].worker_id = other.worker_id
    num_cached = worker.blocks.num_cached_blocks
    worker.cache_decoded_blocks()
    assert worker.uncached == [] and worker.blocks.num_cached_blocks == num_cached
    assert [worker.blocks.is_findable(group.sequences[0].block_table[0]) for group in (groups[0], groups[2])] == [
        True,
        False,
    ]


def test_a_group_is_taken_out_of_the_list_that_its_state_names() -> None:
    worker = make_worker(num_host_blocks=8)
    groups = [make_group([1], arrival=arrival) for arrival in range(4)]
    for group in groups:
        group.move_to(GroupState.PAUSED)
    groups[1].move_to(GroupState.PARKED)
    groups[2].move_to(GroupState.PARKED)
    groups[2].move_to(GroupState.SWAPPED)
    worker.parked, worker.paused = dict.fromkeys(groups), dict.fromkeys(groups)
    worker.swapped = list(groups)
    for group in groups[:3]:
        worker.take_out(group)
    assert list(worker.paused) == groups[1:]
    assert list(worker.parked) == [groups[0], *groups[2:]]
    assert worker.swapped == [*groups[:2], groups[3]]
    for group in groups[:2]:
        worker.take_out(group)  # no-op


def test_of_a_worker_that_has_just_come_nothing_is_counted() -> None:
    assert work_of(make_worker()) == TotalCounters()


def test_tails_that_may_be_wrong_are_found_no_more() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 6))
    launch_rows(worker, group)
    execute(worker)
    worker.set_aside(group)
    tail = group.sequences[0].tail
    assert tail is not None and worker.blocks.is_cached(tail.block_hash)
    worker.forget_tails(group)
    assert group.sequences[0].tail is None and not worker.blocks.is_cached(tail.block_hash)


@pytest.mark.parametrize(
    ("here", "there", "most", "passes"),
    [("f", "f", 1, True), ("f", "f", 0, False), ("f", "g", 1, False), ("", "", 1, False)],
)
def test_blocks_pass_to_a_worker_that_keeps_some_in_the_same_format(
    here: str, there: str, most: int, passes: bool
) -> None:
    worker = make_worker(block_format=here, max_fetched_blocks=most)
    assert worker.can_fetch_from(make_worker("other", block_format=there)) is passes
