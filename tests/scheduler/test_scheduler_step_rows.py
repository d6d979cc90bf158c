"""Rows of a step one by one: what a row computes, and which group makes room for it. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.sequence import Cohort, SequenceStatus
from scheduler_svc.core.step_rows import add_row, add_running_rows, force_preemption
from tests.scheduler.worker_states import execute, launch, launch_rows, make_group, make_worker, new_step, start


def test_a_member_has_no_row_before_its_source_has_computed_what_they_share() -> None:
    worker = make_worker()
    first, second = start(worker, make_group([1] * 8, [2], [3])).sequences
    assert second.source is first and second.num_shared_tokens == 8
    step = new_step(worker)
    assert add_row(worker, step, first, 7) == 7
    assert add_row(worker, step, second, 64) == 0 and step.plan.sequences == [first]
    launch(worker, step)
    step = new_step(worker)
    assert add_row(worker, step, first, 1) == 1  # to the last shared token, and not past it
    assert add_row(worker, step, second, 64) == 1 and step.plan.positions == [7, 8]


def test_a_row_without_a_block_computes_nothing() -> None:
    worker = make_worker(num_blocks=1)
    group = start(worker, make_group([1] * 4))
    (sequence,) = group.sequences
    launch_rows(worker, group)
    step = new_step(worker)
    assert add_row(worker, step, sequence, 8) == 0
    assert step.preempted == [group] and not step.plan.sequences


@pytest.mark.parametrize(("num_first", "num_cached"), [(3, 0), (2, 1)])
def test_a_row_of_one_token_puts_no_block_into_the_cache_and_one_of_two_does(num_first: int, num_cached: int) -> None:
    worker = make_worker()
    (sequence,) = start(worker, make_group([1] * 6)).sequences
    first, second = new_step(worker), new_step(worker)
    add_row(worker, first, sequence, num_first)
    launch(worker, first)
    second.plan.step_id += 1
    add_row(worker, second, sequence, 4 - num_first)
    assert (len(first.registered), len(second.registered)) == (0, num_cached)


def test_a_sequence_decodes_once_its_whole_group_has_caught_up() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 4, [2], [3]))
    first, second = group.sequences
    launch_rows(worker, group, budget=5)
    assert first.num_pending_tokens == second.num_pending_tokens == 1
    assert (first.is_decoding, second.is_decoding) == (False, True)


def test_a_preemption_is_forced_once_for_each_step() -> None:
    worker = make_worker()
    groups = [start(worker, make_group([1 + arrival] * 4, arrival=arrival)) for arrival in range(3)]
    launch_rows(worker, *groups)
    execute(worker)
    for num_preempted in (1, 1):
        force_preemption(worker, step := new_step(worker))
        force_preemption(worker, step)
        statuses = [group.sequences[0].status for group in groups]
        assert statuses.count(SequenceStatus.PREEMPTED) == num_preempted
    launch(worker, step)
    force_preemption(worker, new_step(worker))
    assert [group.sequences[0].status for group in groups[1:]] == [SequenceStatus.PREEMPTED] * 2


def test_what_was_placed_for_groups_that_wait_gives_way_before_a_group_that_runs() -> None:
    worker = make_worker(num_blocks=4)
    group = start(worker, make_group([1] * 4))
    launch_rows(worker, group)
    execute(worker)
    worker.placed_by_fetches = {5: worker.blocks.allocate(2), 6: [], 7: worker.blocks.allocate(1)}
    step = new_step(worker)
    assert add_row(worker, step, group.sequences[0], 8) == 1 and step.preempted == []
    assert worker.placed_by_fetches == {5: [], 6: [], 7: []} and worker.blocks.num_available_blocks == 2
    assert not worker.free_placed()


def test_a_sequence_that_decodes_holds_what_it_has_until_its_last_step_is_done() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 3))
    launch_rows(worker, group)
    execute(worker)
    assert group.sequences[0].is_decoding
    for _ in range(2):
        add_running_rows(worker, step := new_step(worker), 64, has_suspects=False)
        launch(worker, step)
    worker.stop_sequence(group.sequences[0])
    num_used = []
    while worker.in_flight:
        num_used.append((worker.blocks.num_used_blocks, len(worker.free_seats)))
        worker.complete_step()
    assert num_used == [(2, 15), (2, 15)] and (worker.blocks.num_used_blocks, len(worker.free_seats)) == (0, 16)


def test_a_row_waits_for_a_block_that_a_step_in_flight_will_free() -> None:
    worker = make_worker(num_blocks=2)
    goes_on, ends = (start(worker, make_group([arrival] * 4, arrival=arrival)) for arrival in (1, 2))
    launch_rows(worker, goes_on, ends)
    worker.stop_sequence(ends.sequences[0])
    step = new_step(worker)
    assert add_row(worker, step, goes_on.sequences[0], 8) == 0
    assert step.num_starved == 1 and step.preempted == []
    execute(worker)
    assert add_row(worker, new_step(worker), goes_on.sequences[0], 8) == 1


@pytest.mark.parametrize("budget", [3, 8])
def test_who_catches_up_leaves_a_token_to_each_that_decodes_behind_it(budget: int) -> None:
    """Regression: requests of a lost worker stopped the streams of the worker that took them over, for many steps."""
    worker = make_worker()
    behind = [start(worker, make_group([arrival] * 4, arrival=arrival)) for arrival in (2, 3)]
    launch_rows(worker, *behind)
    execute(worker)
    first, second = (start(worker, make_group([9 + arrival] * 30, arrival=arrival)) for arrival in (0, 1))
    for _ in range(3):
        step = new_step(worker)
        assert add_running_rows(worker, step, budget, has_suspects=False) == 0
        assert {group.sequences[0] for group in behind} <= {*step.plan.sequences}
        assert step.plan.sequences[0] is first.sequences[0] and step.plan.num_tokens[0] == budget - 2
        assert second.sequences[0] not in step.plan.sequences
        launch(worker, step)
        execute(worker)


def test_who_catches_up_goes_on_though_more_decode_behind_it_than_a_step_has_tokens() -> None:
    worker = make_worker()
    behind = [start(worker, make_group([arrival] * 4, arrival=arrival)) for arrival in (1, 2, 3)]
    launch_rows(worker, *behind)
    execute(worker)
    first = start(worker, make_group([9] * 6))
    step = new_step(worker)
    assert add_running_rows(worker, step, 2, has_suspects=False) == 0
    assert step.plan.sequences == [first.sequences[0], behind[0].sequences[0]]


def test_who_catches_up_last_gets_all_that_is_left() -> None:
    worker = make_worker()
    ahead = start(worker, make_group([1] * 4, arrival=1))
    launch_rows(worker, ahead)
    execute(worker)
    start(worker, make_group([9] * 30, arrival=2))
    add_running_rows(worker, step := new_step(worker), 20, has_suspects=False)
    assert step.plan.num_tokens == [1, 19]


def test_who_catches_up_in_a_trial_leaves_nothing_to_those_that_have_no_part_in_it() -> None:
    worker = make_worker()
    outside = [start(worker, make_group([arrival] * 4, arrival=arrival)) for arrival in (1, 2)]
    launch_rows(worker, *outside)
    execute(worker)
    suspect = start(worker, make_group([9] * 30))
    suspect.cohort = worker.trial = Cohort()
    add_running_rows(worker, step := new_step(worker), 8, has_suspects=True)
    assert step.plan.sequences == suspect.sequences and step.plan.num_tokens == [8]
