"""Forks and copies of shared blocks one by one. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.forking import copy_tail, sample_for_forks, take_over_tail
from scheduler_svc.core.step_rows import add_row
from tests.scheduler.worker_states import execute, launch_rows, make_group, make_worker, new_step, start


def test_the_row_of_all_tokens_samples_for_those_that_waited_for_all_of_them_alone() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 6, [], [], [], []))
    parent, child, other_child, shorter = group.sequences
    other_child.source = child
    shorter.num_shared_tokens = 4
    step = new_step(worker)
    step.plan.step_id = 3
    add_row(worker, step, parent, 6)
    plan = step.plan
    assert (plan.sampled_rows, plan.sampled_sequences, plan.whole) == ([0, 0], [parent, child], [parent, child])
    assert child.source is None and (child.num_computed_tokens, child.num_pending_tokens) == (6, 1)
    assert (child.first_step_id, child.last_step, child.num_registered_blocks) == (3, 3, 1)
    assert child.block_hashes == parent.block_hashes and len(parent.block_hashes) == 1
    assert child.block_hashes is not parent.block_hashes
    assert other_child.source is child and shorter.source is parent
    assert other_child.num_computed_tokens == shorter.num_pending_tokens == 0


def test_children_sample_from_the_row_that_is_named() -> None:
    worker = make_worker()
    parent, child = start(worker, make_group([1] * 6, [], [])).sequences
    sample_for_forks(step := new_step(worker), parent, 5)
    assert (step.plan.sampled_rows, step.plan.sampled_sequences) == ([5], [child])


@pytest.mark.parametrize("change", [None, "held", "findable", "no tail"])
def test_the_last_holder_of_a_tail_that_nobody_can_find_writes_in_place(change: str | None) -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 6, [], []))
    parent, child = group.sequences
    launch_rows(worker, group)
    execute(worker)
    tail = child.fork_tail
    assert tail == parent.block_table[1]
    if change != "held":
        worker.stop_sequence(parent)
    if change == "findable":
        worker.blocks.register(tail, b"of another")
    if change == "no tail":
        child.fork_tail = None
    step = new_step(worker)
    taken = take_over_tail(worker, step, child)
    if change is None:
        assert taken == tail and child.fork_tail is None and step.reshaped == [group]
    else:
        assert taken is None and child.fork_tail == (None if change == "no tail" else tail) and step.reshaped == []


def test_a_tail_is_copied_from_while_its_step_is_in_flight() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 6, [], []))
    parent, child = group.sequences
    launch_rows(worker, group)
    execute(worker)
    tail, block = parent.block_table[1], worker.blocks.allocate_block()
    step = new_step(worker)
    copy_tail(worker, step, child, block)
    assert step.plan.copies == [tail, block] and step.copy_sources == [tail]
    assert child.fork_tail is None and step.reshaped == [group]
    assert worker.blocks.ref_count(tail) == 2 and worker.num_holders(tail) == 1
    assert (worker.num_copied_blocks, group.num_copied_blocks) == (1, 1)
