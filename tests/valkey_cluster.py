"""A real cluster of Valkeys for tests: primaries with a replica each, on free ports of this machine.

Each node is a ValkeyProcess, so that it can be killed, frozen and asked by itself. Slots are dealt out here, not by
chance, so that a test knows which node has the keys of a shard.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import groupby
from types import TracebackType
from typing import Self

from redis.crc import key_slot

from scheduler_svc.journal.keys import Keys, deployment_of
from tests.patience import patient
from tests.services import free_address
from tests.valkey import ValkeyProcess

NUM_SLOTS = 16384
_FORM_TIMEOUT_S = 60.0


class ClusterNode(ValkeyProcess):
    """One node; it has the same port after it was killed and started again."""

    def __init__(self, *, node_timeout_ms: int) -> None:
        self.address = free_address()
        self._bus = free_address()
        options = {
            "--cluster-enabled": "yes",
            "--cluster-port": self._bus.rpartition(":")[2],
            "--cluster-node-timeout": str(node_timeout_ms),
            "--cluster-require-full-coverage": "no",  # what is left goes on
            "--cluster-replica-validity-factor": "0",  # a replica takes over however long it was without its primary
            "--cluster-allow-replica-migration": "no",
            "--repl-diskless-sync-delay": "0",
            "--repl-ping-replica-period": "1",  # so that all hear soon how far a replica has got
        }
        words = [word for option in options.items() for word in option]
        super().__init__(port=int(self.address.rpartition(":")[2]), options=words)

    def meet(self, other: "ClusterNode") -> None:
        """Introduce another node."""
        host, _, port = other.address.rpartition(":")
        self.ask("CLUSTER", "MEET", host, port, other._bus.rpartition(":")[2])

    @property
    def node_id(self) -> str:
        return self.command("CLUSTER", "MYID").split(b"\r\n")[1].decode()

    def slots(self) -> set[int]:
        """Slots that it says to have."""
        (mine,) = [line for line in self.command("CLUSTER", "NODES").split(b"\n") if b"myself" in line]
        ranges = [word.split(b"-") for word in mine.split()[8:] if not word.startswith(b"[")]
        return {slot for first, *last in ranges for slot in range(int(first), int((last or [first])[0]) + 1)}

    @property
    def is_primary(self) -> bool:
        return b"role:master" in self.command("INFO", "replication")

    def ask(self, *words: str | bytes) -> bytes:
        """The reply to a command that must succeed."""
        reply = self.command(*words)
        assert not reply.startswith(b"-"), (words, reply)
        return reply


class ValkeyCluster:
    """`num_shards` shards of a deployment are spread over the primaries in turn, by the slots that these have."""

    def __init__(
        self, *, primaries: int = 3, replicas: int = 1, num_shards: int = 3, node_timeout_ms: int = 2000
    ) -> None:
        names = [Keys.of(deployment_of("default", shard)).journal for shard in range(num_shards)]
        self._slots = [key_slot(name.encode()) for name in names]
        self._stack = ExitStack()
        self._node_timeout_ms = node_timeout_ms
        self.primaries = [self._node() for _ in range(primaries)]
        self.replicas = [self._node() for _ in range(primaries * replicas)]  # in turn of the first, the second, …

    @property
    def nodes(self) -> list[ClusterNode]:
        return [*self.primaries, *self.replicas]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(node.address for node in self.nodes)

    def start(self) -> None:
        """Returns when every node answers for all slots, and every replica follows its primary."""
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.primaries):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            node.ask("CLUSTER", "ADDSLOTSRANGE", *map(str, self._ranges(number)))
        for node in self.nodes[1:]:
            self.primaries[0].meet(node)
        known = b"cluster_known_nodes:%d\r" % len(self.nodes)
        self.until(lambda: all(known in node.command("CLUSTER", "INFO") for node in self.nodes))
        for number, node in enumerate(self.replicas):
            node.ask("CLUSTER", "REPLICATE", self.primaries[number % len(self.primaries)].node_id)
        self.until(self.is_well)

    def is_well(self) -> bool:
        """True if all living nodes serve, and every living replica follows its primary, as all of them know."""
        living = [node for node in self.nodes if node.is_running]
        replicas = [node for node in living if not node.is_primary]
        return all(b"cluster_state:ok" in node.command("CLUSTER", "INFO") for node in living) and all(
            b"master_link_status:up" in replica.command("INFO", "replication")
            and all(_sees_replica(node, replica) for node in living)
            for replica in replicas
        )

    def slot_of(self, shard: int) -> int:
        """Slot of a shard's keys."""
        return self._slots[shard]

    def primary_of(self, shard: int) -> ClusterNode:
        """Living node that has the slot of a shard, as it says itself."""
        slot = self._slots[shard]
        (found,) = [node for node in self.nodes if node.is_running and node.is_primary and slot in node.slots()]
        return found

    def replica_of(self, shard: int) -> ClusterNode:
        """Living node that follows the one with the slot of a shard."""
        primary = self.primary_of(shard).address.rpartition(":")[2].encode()
        replicas = [node for node in self.nodes if node.is_running and not node.is_primary]
        (found,) = [node for node in replicas if b"master_port:%b\r" % primary in node.command("INFO", "replication")]
        return found

    def move(self, shard: int, target: ClusterNode) -> None:
        """Move a shard's slot."""
        self.begin_move(shard, target)
        self.move_keys(shard, target)
        self.end_move(shard, target)

    def move_at_once(self, shard: int, target: ClusterNode) -> None:
        """Move a shard's slot in the way of Valkey 9, which moves it as a whole."""
        slot, source = str(self._slots[shard]), self.primary_of(shard)
        source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.node_id)
        self.until(lambda: self._slots[shard] not in source.slots() and self._slots[shard] in target.slots())

    def until_taken_over(self, shard: int, *, without: ClusterNode | None = None) -> None:
        """Return when a living node has the slot of a shard: when a replica has followed its dead primary.

        `without`: one that is frozen, and is not asked.
        """
        slot = self._slots[shard]
        others = [node for node in self.nodes if node is not without]
        self.until(lambda: any(node.is_running and node.is_primary and slot in node.slots() for node in others))

    def begin_move(self, shard: int, target: ClusterNode) -> None:
        """Begin to move a shard's slot in the way of all versions: key by key, by `move_keys`, until `end_move`."""
        slot, source = str(self._slots[shard]), self.primary_of(shard)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id)

    def move_keys(self, shard: int, target: ClusterNode, *keys: str) -> None:
        """Move these keys; without any, all that are left."""
        source, (host, _, port) = self.primary_of(shard), target.address.rpartition(":")
        for key in keys or self.keys_of(shard):
            source.ask("MIGRATE", host, port, key, "0", "10000")

    def keys_of(self, shard: int) -> list[str]:
        """Keys that the node of a shard's slot has there."""
        reply = self.primary_of(shard).command("CLUSTER", "GETKEYSINSLOT", str(self._slots[shard]), "1000")
        return [line.decode() for line in reply.split(b"\r\n")[2::2]]

    def end_move(self, shard: int, target: ClusterNode) -> None:
        """Give the slot to the node that has its keys now."""
        slot, source, node_id = str(self._slots[shard]), self.primary_of(shard), target.node_id
        target.ask("CLUSTER", "SETSLOT", slot, "NODE", node_id)
        source.ask("CLUSTER", "SETSLOT", slot, "NODE", node_id)
        self.until(lambda: self._slots[shard] not in source.slots() and self._slots[shard] in target.slots())

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that nobody tells. Raises AssertionError if it takes too long."""
        give_up_at = time.monotonic() + patient(_FORM_TIMEOUT_S)
        while not is_so():
            assert time.monotonic() < give_up_at, "the cluster is not as it should be by now"
            time.sleep(0.02)

    def close(self) -> None:
        """Ends all nodes and deletes their data."""
        self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ranges(self, number: int) -> Iterable[int]:
        """First and last slot of each range of a primary: an equal part, but that of a shard is where it belongs."""
        owners = [slot * len(self.primaries) // NUM_SLOTS for slot in range(NUM_SLOTS)]
        for shard, slot in enumerate(self._slots):
            owners[slot] = shard % len(self.primaries)
        at = 0
        for owner, slots in groupby(owners):
            first, at = at, at + len(list(slots))
            if owner == number:
                yield from (first, at - 1)

    def _node(self) -> ClusterNode:
        node = ClusterNode(node_timeout_ms=self._node_timeout_ms)
        self._stack.callback(node.close)
        return node


def _sees_replica(node: ClusterNode, replica: ClusterNode) -> bool:
    """True if the node tells its clients of the replica, too: not before it has heard how far that one has got."""
    replica_id = replica.node_id.encode()
    lines = [line.split() for line in node.command("CLUSTER", "NODES").split(b"\n")]
    follows = any(b"slave" in words[2] and b"fail" not in words[2] for words in lines if replica_id in words)
    return follows and replica_id in node.command("CLUSTER", "SLOTS")
