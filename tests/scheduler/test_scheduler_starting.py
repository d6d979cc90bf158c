"""Starts of single groups: what they find in the cache, share and allocate. Blocks hold 4 tokens."""

import random
from collections.abc import Iterable

import pytest

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.sharing import shared_blocks
from scheduler_svc.core.starting import (
    GroupStart,
    MemberStart,
    count_prefix_hits,
    has_room_for,
    plan_start,
    seat_members,
    share_all_blocks,
    start_group,
)
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.worker_states import cache_prompt, launch_rows, make_group, make_worker, new_step, start


def planned(worker: WorkerState, group: SequenceGroup) -> tuple[bool, list[tuple[int, int]], int, int]:
    """Return whether it is a fork, cached and shared blocks of each member, new blocks and unreferenced ones."""
    plan = plan_start(worker, group)
    members = [(len(member.prefix), member.num_shared_blocks) for member in plan.members]
    return plan.is_fork, members, plan.num_new_blocks, plan.num_unreferenced


def test_members_of_the_same_tokens_need_the_blocks_of_one() -> None:
    worker = make_worker()
    assert planned(worker, make_group([1] * 6, [], [])) == (True, [(0, 0), (0, 0)], 2, 0)
    cache_prompt(worker, [1] * 4)
    assert planned(worker, make_group([1] * 6, [], [])) == (True, [(1, 0), (0, 0)], 1, 1)
    start(worker, make_group([1] * 6, arrival=1))
    assert planned(worker, make_group([1] * 6, [], [])) == (True, [(1, 0), (0, 0)], 1, 0), "it is in use"


def test_other_members_share_what_they_have_in_common_or_find_as_much_in_the_cache() -> None:
    worker = make_worker()
    group = make_group([1] * 8, [2], [3], [3, 4])  # 9, 9 and 10 tokens
    assert planned(worker, group) == (False, [(0, 0), (0, 2), (0, 2)], 5, 0)
    cache_prompt(worker, [1] * 4)
    assert planned(worker, group) == (False, [(1, 0), (0, 2), (0, 2)], 4, 1)
    cache_prompt(worker, [1] * 8)
    assert planned(worker, group) == (False, [(2, 0), (2, 0), (2, 0)], 3, 2)
    assert group.shares == [(0, 0), (0, 2), (0, 2)]


def planned_one_by_one(worker: WorkerState, group: SequenceGroup) -> GroupStart:
    """Look up each of some members of different tokens from its beginning: `plan_start` finds the same."""
    live = group.live
    members = []
    for sequence, (earlier, num_shared) in zip(live, shared_blocks(live, 4), strict=True):
        prefix = worker.find_prefix(sequence)
        if len(prefix) >= num_shared:
            members.append(MemberStart(sequence, prefix))
        else:
            members.append(MemberStart(sequence, [], live[earlier], num_shared))
    num_begun = sum(max(len(member.prefix), member.num_shared_blocks) for member in members)
    found = {block for member in members for block in member.prefix}
    num_new = sum(worker.num_blocks_for(sequence.num_tokens) for sequence in live) - num_begun
    return GroupStart(members, False, num_new, worker.blocks.num_unreferenced(found))


def outline(plan: GroupStart) -> tuple[object, ...]:
    """Return what a plan says, without the group that it says it of."""
    index_of = {member.sequence: index for index, member in enumerate(plan.members)}
    members = [
        (member.prefix, index_of.get(member.source) if member.source else None, member.num_shared_blocks)
        for member in plan.members
    ]
    return plan.is_fork, members, plan.num_new_blocks, plan.num_unreferenced


def test_random_starts_are_those_of_a_lookup_of_each_member_from_its_beginning() -> None:
    rng = random.Random(4)
    num_found = set()
    for _ in range(500):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        outputs = [[rng.choice([0, 0, 1]) for _ in range(rng.randrange(13))] for _ in range(rng.randrange(2, 7))]
        outputs[0].append(2)  # they are not all the same
        worker = make_worker(enable_prefix_cache=rng.random() < 0.9)
        for _ in range(rng.randrange(4)):
            cached = prompt + rng.choice(outputs)
            cache_prompt(worker, cached[: rng.randrange(1, len(cached) + 1)])
        if worker.blocks.num_cached_blocks:
            worker.blocks.share([next(iter(worker.blocks._cached))])  # some of them are in use
        plan = plan_start(worker, make_group(prompt, *outputs))
        assert outline(plan) == outline(planned_one_by_one(worker, make_group(prompt, *outputs)))
        num_found |= {len(member.prefix) - len(prompt) // 4 for member in plan.members}
    assert num_found >= {-3, -2, -1, 0, 1, 2}


class CountedBlocks(BlockManager):
    """Blocks that count how many are looked up."""

    num_lookups = 0

    def lookup(self, block_hashes: Iterable[bytes]) -> list[int]:
        return super().lookup(map(self._count, block_hashes))

    def _count(self, block_hash: bytes) -> bytes:
        self.num_lookups += 1
        return block_hash


@pytest.mark.parametrize("num_cached", [0, 30, 63, 64])
def test_what_the_members_of_a_long_prompt_find_takes_one_lookup_of_it(num_cached: int) -> None:
    worker = make_worker()
    worker.blocks = blocks = CountedBlocks(500)
    prompt = list(range(4 * 64))
    if num_cached:
        launch_rows(worker, start(worker, make_group(prompt[: 4 * num_cached], arrival=1)), budget=4 * num_cached)
    group = make_group(prompt, *([index] * 5 for index in range(100)))
    for _ in range(2):
        blocks.num_lookups = 0
        plan = plan_start(worker, group)
        assert len(plan.members[0].prefix) == num_cached
        assert blocks.num_lookups <= 64 + 100


def test_members_of_a_long_prompt_take_its_hashes_from_the_first() -> None:
    worker = make_worker(num_blocks=400)
    group = make_group(list(range(4 * 64)), *([index] * 5 for index in range(100)))
    plan_start(worker, group)
    first, *others = (sequence.block_hashes for sequence in group.sequences)
    assert len(first) == 65
    assert all(a is b for hashes in others for a, b in zip(first[:64], hashes, strict=False))
    assert len({hashes[64] for hashes in (first, *others)}) == 100


@pytest.mark.parametrize(("num_new", "num_unreferenced", "num_watermark"), [(3, 2, 1), (6, 0, 0), (0, 6, 0), (0, 0, 6)])
def test_a_start_fits_to_the_last_block_above_the_watermark(
    num_new: int, num_unreferenced: int, num_watermark: int
) -> None:
    for num_blocks, fits in ((6, True), (5, False)):
        worker = make_worker(num_blocks=num_blocks, num_watermark_blocks=num_watermark)
        assert has_room_for(worker, GroupStart([], True, num_new, num_unreferenced)) is fits


def test_a_fork_waits_for_all_tokens_of_the_first() -> None:
    worker = make_worker()
    first, second = start(worker, make_group([1] * 6, [], [])).sequences
    assert second.source is first and second.num_shared_tokens == 6
    assert second.block_table == first.block_table[:1] and second.fork_tail == first.block_table[1]
    assert [worker.blocks.ref_count(block) for block in first.block_table] == [2, 2]
    assert worker.blocks.num_used_blocks == 2


def test_a_full_last_block_is_shared_without_a_tail() -> None:
    worker = make_worker()
    first, second = make_group([1] * 8, [], []).sequences
    first.block_table = worker.blocks.allocate(2)
    share_all_blocks(worker, first, second)
    assert second.block_table == first.block_table and second.fork_tail is None


def test_later_members_have_the_first_blocks_of_an_earlier_one_and_their_own() -> None:
    worker = make_worker()
    cache_prompt(worker, [1] * 4)
    first, second, third = start(worker, make_group([1] * 8, [2], [3], [3, 4, 5, 6, 7])).sequences
    assert second.source is first and (second.num_shared_tokens, second.num_registered_blocks) == (8, 2)
    assert third.source is first and third.num_shared_tokens == 8
    assert second.block_table[:2] == third.block_table[:2] == first.block_table[:2]
    assert [len(sequence.block_table) for sequence in (first, second, third)] == [3, 3, 4]
    assert worker.blocks.num_used_blocks == 2 + 1 + 1 + 2
    assert (first.num_computed_tokens, first.num_registered_blocks) == (4, 1)


def test_started_members_have_seats_and_their_place_in_the_order() -> None:
    worker = make_worker()
    later, earlier = make_group([1] * 5, [], [], [], arrival=2), make_group([1] * 5, arrival=1)
    later.num_times_left, later.shares = 3, []
    idle, finished = later.sequences[1:]
    idle.status, finished.status = SequenceStatus.IDLE, SequenceStatus.FINISHED
    for sequence in later.sequences:
        sequence.last_step = 9
    for group in (later, earlier):
        seat_members(worker, group)
        assert (group.state, group.worker_id, group.num_times_left, group.shares) == (GroupState.RUNNING, "w", 0, None)
    assert worker.running == [earlier.sequences[0], later.sequences[0]]
    assert [sequence.seat for sequence in later.sequences] == [0, 1, None] and worker.num_members == 3
    assert [sequence.worker_id for sequence in later.sequences] == ["w", "w", None]
    assert [sequence.status for sequence in later.live] == [SequenceStatus.RUNNING]
    assert (later.sequences[0].num_tokens_at_start, later.sequences[0].last_step) == (5, 0)


@pytest.mark.parametrize("change", [None, "preempted before", "lost before", "no lookup", "no cache"])
def test_prefix_hits_of_a_first_start_are_counted(change: str | None) -> None:
    worker = make_worker(enable_prefix_cache=change != "no cache")
    cache_prompt(worker, [1] * 4)
    group = make_group([1] * 6, [], [])
    for sequence in group.sequences:
        sequence.num_preemptions = int(change == "preempted before")
        sequence.num_lost_tokens = int(change == "lost before")
        sequence.use_prefix_cache = change != "no lookup"
    start_group(worker, group, plan := plan_start(worker, group), new_step(worker))
    count_prefix_hits(worker, plan)
    expected = (6, 4, [4, 4]) if change is None else (0, 0, [0, 0])
    num_cached = [sequence.num_cached_tokens for sequence in group.sequences]
    assert (worker.num_prefix_query_tokens, worker.num_prefix_hit_tokens, num_cached) == expected


def test_lost_tokens_count_as_recomputed_unless_they_are_found_or_shared() -> None:
    worker = make_worker()
    cache_prompt(worker, [1] * 4)
    group = make_group([1] * 8, [2], [3])
    for sequence, num_lost in zip(group.sequences, (7, 9), strict=True):
        sequence.num_lost_tokens = num_lost
    group.sequences[0].num_preemptions = 1
    start_group(worker, group, plan := plan_start(worker, group), new_step(worker))
    count_prefix_hits(worker, plan)
    assert worker.num_recomputed_tokens == group.num_recomputed_tokens == (7 - 4) + (9 - 8)
    assert [sequence.num_lost_tokens for sequence in group.sequences] == [0, 0]
    few = make_group([1] * 8, arrival=1)
    few.sequences[0].num_lost_tokens = 2
    start_group(worker, few, plan := plan_start(worker, few), new_step(worker))
    count_prefix_hits(worker, plan)
    assert few.num_recomputed_tokens == 0 and worker.num_recomputed_tokens == 4


def test_a_cached_prefix_is_not_evicted_for_the_blocks_of_the_same_start() -> None:
    worker = make_worker(num_blocks=2)
    cache_prompt(worker, [1] * 4)
    worker.blocks.allocate(1)
    group = make_group([1] * 4, [2], max_tokens=2)
    assert not has_room_for(worker, plan_start(worker, group))
    worker.blocks.free([1 - worker.find_prefix(group.sequences[0])[0]])
    start(worker, group)
    launch_rows(worker, group)
    assert group.sequences[0].num_computed_tokens == 5 and worker.in_flight[0].plan.num_tokens == [1]
