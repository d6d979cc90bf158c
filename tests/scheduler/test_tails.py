"""Tails: partial blocks of stopped sequences, found again and copied. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.block_hash import hash_block, hash_tail, root_hash
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup, Tail
from scheduler_svc.core.starting import plan_start, start_group
from scheduler_svc.core.tails import cache_tail
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.worker_states import cache_prompt, execute, launch_rows, make_group, make_worker, new_step, start

PROMPT = list(range(1, 11))  # two blocks and a half


def stopped(worker: WorkerState, *outputs: list[int], budget: int = 64) -> SequenceGroup:
    """A group that was stopped after a step, and could start again."""
    group = start(worker, make_group(PROMPT, *outputs, arrival=5))
    launch_rows(worker, group, budget=budget)
    execute(worker)
    worker.set_aside(group)
    group.move_to(GroupState.WAITING)
    return group


def tail_of(worker: WorkerState, group: SequenceGroup) -> int | None:
    """The tail that the first member would start from."""
    return plan_start(worker, group).members[0].tail


def test_a_tail_has_a_name_that_no_full_block_has() -> None:
    parent = root_hash(b"")
    assert hash_tail(parent, [1, 2]) != hash_block(parent, [1, 2])
    assert len({hash_tail(parent, tokens) for tokens in ([1], [1, 2], [2, 1], [1, 2, 3])}) == 4


def test_what_a_stopped_sequence_had_computed_in_its_last_block_is_found_and_copied() -> None:
    worker = make_worker()
    group = stopped(worker)
    (sequence,) = group.sequences
    assert sequence.tail is not None and sequence.tail.num_tokens == 10
    tail = tail_of(worker, group)
    assert tail is not None and worker.blocks.ref_count(tail) == 0
    step = new_step(worker)
    start_group(worker, group, plan_start(worker, group), step)
    assert (sequence.num_computed_tokens, sequence.num_registered_blocks) == (10, 2)
    assert step.plan.copies == [tail, sequence.block_table[2]] and step.copy_sources == [tail]
    assert tail not in sequence.block_table and worker.blocks.is_findable(tail)
    assert not worker.blocks.is_findable(sequence.block_table[2]) and step.reshaped == [group]
    assert worker.num_copied_blocks == group.num_copied_blocks == 0, "nothing was shared"


def test_members_copy_the_same_tail_each_for_itself() -> None:
    worker = make_worker()
    group = start(worker, make_group(PROMPT, [], []))
    launch_rows(worker, group)
    for index, sequence in enumerate(group.sequences):
        sequence.num_pending_tokens -= 1
        sequence.token_ids.append(7 + index)
    worker.complete_step()
    worker.set_aside(group)
    group.move_to(GroupState.WAITING)
    plan = plan_start(worker, group)
    tails = {member.tail for member in plan.members}
    assert len(tails) == 1 and None not in tails and plan.num_unreferenced == 2 + 1
    step = new_step(worker)
    start_group(worker, group, plan, step)
    copied = [sequence.block_table[2] for sequence in group.sequences]
    assert len(set(copied)) == 2 and step.plan.copies[1::2] == copied and set(step.plan.copies[::2]) == tails
    assert step.copy_sources == list(tails)
    assert [sequence.num_computed_tokens for sequence in group.sequences] == [10, 10]


def test_members_of_the_same_tokens_fork_from_the_copy_of_the_first() -> None:
    worker = make_worker()
    group = stopped(worker, [], [])  # each sample is 7
    plan = plan_start(worker, group)
    assert plan.is_fork and [member.tail is not None for member in plan.members] == [True, False]
    start_group(worker, group, plan, new_step(worker))
    first, second = group.sequences
    assert first.num_computed_tokens == 10 and second.fork_tail == first.block_table[2]


def test_a_member_waits_for_the_block_that_another_fills_behind_its_tail() -> None:
    worker = make_worker()
    group = stopped(worker, [7, 8, 1], [7, 8, 2], budget=10)
    plan = plan_start(worker, group)
    assert [member.tail is not None for member in plan.members] == [True, False]
    step = new_step(worker)
    start_group(worker, group, plan, step)
    first, second = group.sequences
    assert first.block_table[:3] == second.block_table[:3] and step.plan.copies[1::2] == [first.block_table[2]]
    assert first.num_computed_tokens == 10 and (second.source, second.num_shared_tokens) == (first, 12)


def test_a_prompt_that_was_stopped_half_way_goes_on_from_its_tail() -> None:
    worker = make_worker()
    group = stopped(worker, budget=6)
    (sequence,) = group.sequences
    assert tail_of(worker, group) is not None
    start(worker, group)
    assert sequence.num_computed_tokens == 6 and len(sequence.block_table) == 3


@pytest.mark.parametrize("change", ["full", "longer prefix", "shorter prefix", "swap", "end", "no lookup", "no cache"])
def test_no_tail_is_found_where_none_continues_the_prefix(change: str) -> None:
    worker = make_worker(enable_prefix_cache=change != "no cache")
    lengths = {"full": 8, "no lookup": 3, "no cache": 3}  # without a lookup no longer tail continues anything
    group = make_group(PROMPT[: lengths.get(change, 10)])
    (sequence,) = group.sequences
    sequence.use_prefix_cache = change != "no lookup"
    start(worker, group)
    launch_rows(worker, group, budget=6 if change == "longer prefix" else 64)
    execute(worker)
    if change == "end":
        worker.stop_sequence(sequence)
    else:
        worker.set_aside(group, keeps_computed=change == "swap")
    if change == "longer prefix":
        cache_prompt(worker, PROMPT[:8])
    if change == "shorter prefix":
        worker.blocks.forget(sequence.block_hashes[1])
    assert tail_of(worker, group) is None


def test_a_tail_whose_last_token_is_the_only_one_to_compute_leaves_that() -> None:
    worker = make_worker()
    group = stopped(worker)
    (sequence,) = group.sequences
    assert sequence.tail is not None
    sequence.tail = Tail(11, sequence.tail.block_hash)  # as of a beam whose candidates were lost
    start(worker, group)
    assert sequence.num_computed_tokens == sequence.num_tokens - 1 == 10


def test_without_a_block_for_the_copy_the_tail_is_computed_again() -> None:
    for num_others, copies in ((0, True), (1, False)):
        worker = make_worker(num_blocks=4)
        group = stopped(worker)
        worker.blocks.allocate(num_others)
        plan = plan_start(worker, group)
        assert (plan.members[0].tail is not None) is copies
        assert plan.num_new_blocks + plan.num_unreferenced == 3 + copies
        start_group(worker, group, plan, new_step(worker))
        assert group.sequences[0].num_computed_tokens == (10 if copies else 8)


def test_a_tail_of_a_step_that_was_not_executed_is_not_found() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=64, pipeline_depth=2, watermark=0.0))
    cluster.add_worker("w", num_blocks=20)
    sequence = cluster.add(PROMPT, 9)
    cluster.start("w")
    cluster.scheduler.pause(sequence.group, keep_on_host=False)
    assert sequence.tail is not None
    worker = cluster.scheduler._places.workers["w"]
    assert worker.blocks.is_cached(sequence.tail.block_hash)
    cluster.fail_steps("w")
    assert not worker.blocks.is_cached(sequence.tail.block_hash)
    cluster.scheduler.resume(sequence.group)
    cluster.finish_and_compare()


@pytest.mark.parametrize(("num_sequences", "is_beam"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 10])
def test_groups_of_every_kind_that_are_preempted_all_the_time_compute_hardly_anything_again(
    num_sequences: int, is_beam: bool, length: int
) -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, pipeline_depth=1, watermark=0.0, preempt_every=2)
    cluster = Cluster(config)
    cluster.add_worker("w", num_blocks=40)
    group = cluster.add_group(PROMPT[:length], num_sequences, 9, is_beam=is_beam)
    cluster.finish_and_compare()
    assert group.num_preemptions > 2
    assert cluster.workers["w"].num_computed_tokens <= length + num_sequences * 8


def test_a_group_whose_answer_is_not_believed_does_not_start_from_its_tail_again() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=64, pipeline_depth=1, watermark=0.0))
    cluster.add_worker("w", num_blocks=20)
    sequence = cluster.add([1, 2, 3], 9)
    cluster.start("w")
    cluster.complete("w")
    cluster.scheduler.pause(sequence.group, keep_on_host=False)
    cluster.scheduler.resume(sequence.group)
    plan = cluster.start("w")
    assert plan is not None and plan.copies and plan.positions == [3]
    cluster.fail_steps("w")
    cluster.scheduler.record_failed_step([plan], suspects=[sequence.group], is_disbelieved=True)
    again = cluster.start("w")
    assert again is not None and not again.copies and again.positions == [0]


def test_a_tail_that_would_save_no_token_is_not_copied() -> None:
    worker = make_worker()
    group = start(worker, make_group(PROMPT[:9]))
    launch_rows(worker, group)
    execute(worker)
    worker.set_aside(group)
    assert tail_of(worker, group) is not None
    group.sequences[0].token_ids.pop()  # as of a beam whose candidates were lost: its ninth token is to be computed
    assert tail_of(worker, group) is None


def test_a_member_without_a_row_takes_the_name_of_a_tail_that_another_member_makes_findable() -> None:
    worker = make_worker()
    group = start(worker, make_group(PROMPT, [], []))
    launch_rows(worker, group)
    execute(worker)
    first, second = group.sequences
    second.last_step, second.block_hashes = 0, []  # as of a beam that was forked from the other
    assert cache_tail(worker.blocks, second, 4) is None and not worker.blocks.is_findable(first.block_table[2])
    assert cache_tail(worker.blocks, first, 4) == first.block_table[2]
    assert first.tail == second.tail and first.block_hashes == second.block_hashes
