"""Map of a cluster, as far as one link knows it: which node has which slot, and which node to ask next.

Pure: does no I/O. Nodes are asked in turn, since one that is cut off from the others keeps telling what was.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from quire.store_url import NodeAddress


class SlotNodes(NamedTuple):
    """Nodes that have a range of slots: the primary, and its replicas."""

    first: int
    last: int
    primary: NodeAddress
    replicas: tuple[NodeAddress, ...]

    @classmethod
    def parse(cls, item: Sequence[Any], told_by: NodeAddress) -> "SlotNodes":
        """Parse one range of the reply to CLUSTER SLOTS."""
        first, last, *nodes = item
        primary, *replicas = (address_of(node[0], node[1], told_by) for node in nodes)
        return cls(int(first), int(last), primary, tuple(replicas))


class SlotMap:
    """Owners of the slots that a link needs; invariant: `_to_ask` has each known node once.

    `has_one_primary`: one node has all slots of the cluster, as was told last. None of its replicas can be elected.

    Known are the seeds, and the nodes that were told last: those of a cluster may be replaced again and again.
    """

    def __init__(self, slots: Iterable[int], seeds: Iterable[NodeAddress]) -> None:
        """`slots`: those that are needed; `seeds`: nodes to begin with."""
        self._slots = sorted(set(slots))
        self._seeds = tuple(seeds)
        self._to_ask = list(dict.fromkeys(self._seeds))
        self._nodes_of: dict[int, SlotNodes] = {}  # by slot
        self._owners: dict[int, NodeAddress] = {}  # by slot
        self.has_one_primary = False

    def owner(self, slot: int) -> NodeAddress | None:
        """Node that has a slot; None: ask for it."""
        return self._owners.get(slot)

    def owns_any(self, node: NodeAddress) -> bool:
        """True if the node has one of the slots."""
        return node in self._owners.values()

    def nodes_of(self, slot: int) -> tuple[NodeAddress, ...]:
        """Primary and replicas of a slot as they were told last; empty if they are not known."""
        nodes = self._nodes_of.get(slot)
        return () if nodes is None else (nodes.primary, *nodes.replicas)

    def known(self) -> tuple[NodeAddress, ...]:
        """Every known node."""
        return tuple(self._to_ask)

    def next_to_ask(self) -> NodeAddress:
        """Node to ask for the slots now; each node has its turn."""
        self._to_ask.append(self._to_ask.pop(0))
        return self._to_ask[-1]

    def learn(self, ranges: Iterable[SlotNodes]) -> None:
        """Learn what a node told of all slots."""
        self._nodes_of.clear()
        self._owners.clear()
        known, primaries = dict.fromkeys(self._seeds), set[NodeAddress]()
        for each in ranges:
            primaries.add(each.primary)
            for slot in self._slots:
                if each.first <= slot <= each.last:
                    self._nodes_of[slot], self._owners[slot] = each, each.primary
            known |= dict.fromkeys((each.primary, *each.replicas))
        asked = [node for node in self._to_ask if node in known]
        self._to_ask = list(dict.fromkeys([*asked, *known]))
        self.has_one_primary = len(primaries) == 1

    def record_move(self, slot: int, node: NodeAddress) -> None:
        """Record that a slot is at another node now."""
        self._owners[slot] = node
        self.has_one_primary = False
        if node not in self._to_ask:
            self._to_ask.append(node)

    def record_failure(self, node: NodeAddress) -> None:
        """Record that a node did not answer, or cannot: its slots may be elsewhere soon, and it is asked last."""
        for slot in [slot for slot, owner in self._owners.items() if owner == node]:
            del self._owners[slot]
        if node in self._to_ask:
            self._to_ask.remove(node)
            self._to_ask.append(node)


def address_of(host: bytes | str | None, port: int, told_by: NodeAddress) -> NodeAddress:
    """Address that a node tells; one that does not know its own host leaves it out, or writes a question mark."""
    name = host.decode() if isinstance(host, bytes) else host
    return NodeAddress(name if name and name != "?" else told_by.host, int(port))
