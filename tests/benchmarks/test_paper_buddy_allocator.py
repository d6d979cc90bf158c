"""Ranges of a buddy allocator: where they may lie, and that all of them come together again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper.buddy_allocator import BuddyAllocator

PAPER_SLOTS = 15_728


@given(
    num_slots=st.integers(1, 600),
    actions=st.lists(st.one_of(st.integers(1, 200), st.floats(0, 0.999)), max_size=60),
)
def test_ranges_are_aligned_do_not_overlap_and_merge_fully(num_slots: int, actions: list[int | float]) -> None:
    allocator = BuddyAllocator(num_slots)
    untouched = allocator.free_ranges()
    held: list[tuple[int, int]] = []
    for action in actions:
        if isinstance(action, int):  # asks for so many
            address = allocator.allocate(action)
            size = 1 << (action - 1).bit_length()
            if address is None:
                assert all(free < size for _, free in allocator.free_ranges())
            else:
                held.append((address, size))
        elif held:  # gives one of them back
            allocator.free(held.pop(int(action * len(held)))[0])
        ranges = sorted([*held, *allocator.free_ranges()])
        assert all(address % size == 0 for address, size in ranges)
        ends = [address + size for address, size in ranges]
        assert [address for address, _ in ranges] == [0, *ends[:-1]] and ends[-1] == num_slots
        assert allocator.num_free == num_slots - sum(size for _, size in held)
    for address, _ in held:
        allocator.free(address)
    assert allocator.free_ranges() == untouched


def test_the_papers_pool_has_room_for_seven_whole_contexts() -> None:
    allocator = BuddyAllocator(PAPER_SLOTS)
    addresses = [allocator.allocate(2048) for _ in range(8)]
    assert addresses[7] is None and None not in addresses[:7]
    assert allocator.num_free == PAPER_SLOTS - 7 * 2048


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (16, 16), (17, 32), (1025, 2048)])
def test_a_range_is_rounded_up_to_a_power_of_two(asked: int, given: int) -> None:
    allocator = BuddyAllocator(4096)
    assert allocator.allocate(asked) == 0
    assert allocator.num_free == 4096 - given
