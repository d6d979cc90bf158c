"""Map of a cluster: owners of slots by what nodes tell, and whom it asks next."""

from hypothesis import given
from hypothesis import strategies as st

from quire.store_url import NodeAddress
from scheduler_svc.journal.slot_map import SlotMap, SlotNodes, address_of

NUM_SLOTS = 16384
NODES = [NodeAddress("10.0.0.1", port) for port in range(7000, 7006)]
SEEDS = NODES[:2]
nodes = st.sampled_from(NODES)
slots = st.integers(0, NUM_SLOTS - 1)


@st.composite
def ranges(draw: st.DrawFn) -> list[SlotNodes]:
    """Slots parted among nodes, some of them nobody's."""
    cuts = sorted(draw(st.sets(slots, min_size=1, max_size=6)))
    edges = list(zip([0, *cuts], [*(cut - 1 for cut in cuts), NUM_SLOTS - 1], strict=True))
    owners = draw(st.lists(st.none() | nodes, min_size=len(edges), max_size=len(edges)))
    return [
        SlotNodes(first, last, owner, (NODES[-1],))
        for (first, last), owner in zip(edges, owners, strict=True)
        if owner is not None and first <= last
    ]


@given(st.sets(slots, min_size=1, max_size=8), st.lists(ranges(), min_size=1, max_size=3))
def test_the_owner_is_the_one_that_was_told_last(needed: set[int], told: list[list[SlotNodes]]) -> None:
    known = SlotMap(needed, SEEDS)
    assert all(known.owner(slot) is None for slot in needed)
    for each in told:
        known.learn(each)
    for slot in needed:
        expected = [item.primary for item in told[-1] if item.first <= slot <= item.last]
        assert known.owner(slot) == (expected[0] if expected else None)
        assert known.nodes_of(slot) == ((expected[0], NODES[-1]) if expected else ())


def test_a_cluster_has_one_primary_as_long_as_no_other_is_told() -> None:
    known = SlotMap([5], SEEDS)
    assert not known.has_one_primary
    known.learn([SlotNodes(0, 9, NODES[2], (NODES[3],)), SlotNodes(10, NUM_SLOTS - 1, NODES[2], ())])
    assert known.has_one_primary
    known.record_move(5, NODES[3])
    assert not known.has_one_primary
    known.learn([SlotNodes(0, NUM_SLOTS - 1, NODES[2], ())])
    known.record_failure(NODES[2])
    assert known.has_one_primary
    known.learn([SlotNodes(0, 9, NODES[2], ()), SlotNodes(10, NUM_SLOTS - 1, NODES[3], ())])
    assert not known.has_one_primary


@given(st.lists(st.one_of(nodes.map(lambda node: ("moved", node)), nodes.map(lambda node: ("failed", node)))))
def test_every_known_node_has_its_turn_whatever_happens_in_between(changes: list[tuple[str, NodeAddress]]) -> None:
    known = SlotMap([5], SEEDS)
    known.learn([SlotNodes(0, NUM_SLOTS - 1, NODES[2], (NODES[3],))])
    for change, node in changes:
        if change == "moved":
            known.record_move(5, node)
            assert known.owner(5) == node and known.owns_any(node)
        else:
            known.record_failure(node)
            assert not known.owns_any(node)
    moved = {node for change, node in changes if change == "moved"}
    expected = {*NODES[:4], *moved}
    asked = [known.next_to_ask() for _ in range(2 * len(expected))]
    assert {*asked[: len(expected)]} == expected and asked[: len(expected)] == asked[len(expected) :]


def test_nodes_that_are_told_no_more_are_forgotten_unless_they_are_seeds() -> None:
    known = SlotMap([5], SEEDS)
    known.learn([SlotNodes(0, NUM_SLOTS - 1, NODES[2], (NODES[3],))])
    known.learn([SlotNodes(0, NUM_SLOTS - 1, NODES[4], ())])
    assert {known.next_to_ask() for _ in range(9)} == {*SEEDS, NODES[4]}


def test_a_failed_node_is_asked_after_all_others() -> None:
    known = SlotMap([5], NODES)
    known.record_failure(NODES[0])
    assert [known.next_to_ask() for _ in NODES] == [*NODES[1:], NODES[0]]


def test_a_node_without_a_name_is_where_it_told_so() -> None:
    told_by = NodeAddress("10.0.0.9", 7000)
    for unnamed in (b"", None, b"?", ""):
        assert address_of(unnamed, 7001, told_by) == NodeAddress("10.0.0.9", 7001)
    item = [0, 99, [b"a", 7001, b"id"], [b"", 7002, b"id2", {}]]
    assert SlotNodes.parse(item, told_by) == SlotNodes(0, 99, NodeAddress("a", 7001), (NodeAddress("10.0.0.9", 7002),))
