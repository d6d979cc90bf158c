"""Groups of copies, carried out as they promise, leave what reading everything first would leave."""

from hypothesis import given
from hypothesis import strategies as st

from kernels.blocks.copy_order import Pair, copy_groups

NUM_BLOCKS = 8


@st.composite
def copies(draw: st.DrawFn) -> list[Pair]:
    """Pairs with each destination once, in any order."""
    destinations = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True))
    return [(draw(st.integers(0, NUM_BLOCKS - 1)), destination) for destination in destinations]


def carried_out(groups: list[list[Pair]]) -> list[int]:
    blocks = list(range(NUM_BLOCKS))
    for (source, destination), *others in groups:
        held = blocks[source]
        for other_source, other_destination in others:
            blocks[other_destination] = blocks[other_source]
        blocks[destination] = held
    return blocks


@given(copies())
def test_every_source_is_read_before_it_is_overwritten(pairs: list[Pair]) -> None:
    expected = list(range(NUM_BLOCKS))
    for source, destination in pairs:
        expected[destination] = source
    groups = copy_groups(pairs)
    assert sorted(pair for group in groups for pair in group) == sorted(pairs)
    assert carried_out(groups) == expected


@given(copies())
def test_no_group_writes_what_another_reads_or_writes(pairs: list[Pair]) -> None:
    groups = copy_groups(pairs)
    for group in groups:
        written = {destination for _, destination in group}
        others = [pair for other in groups if other is not group for pair in other]
        assert written.isdisjoint(block for pair in others for block in pair)


def test_copies_of_a_block_that_nobody_overwrites_need_no_order() -> None:
    assert copy_groups([(0, 1), (0, 2), (3, 4)]) == [[(0, 2)], [(0, 1)], [(3, 4)]]


def test_a_chain_is_copied_from_its_end() -> None:
    assert copy_groups([(0, 1), (1, 2), (2, 3)]) == [[(2, 3), (1, 2), (0, 1)]]


def test_a_long_chain_costs_no_recursion() -> None:
    pairs = [(block, block + 1) for block in range(5000)]
    assert copy_groups(pairs) == [pairs[::-1]]
