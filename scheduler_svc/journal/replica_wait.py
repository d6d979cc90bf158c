"""Wait for replicas: an entry counts as written once as many replicas have it as there are, up to a number.

A replica that is gone is not waited for, so that the journal goes on after a failover; one that is only cut off still
counts as there, so that a primary which is cut off from all others acknowledges nothing that they may never get.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import structlog

from scheduler_svc.journal.links import StoreLink
from scheduler_svc.journal.redis_link import Packed, pack
from scheduler_svc.journal.store import StoreUnavailableError

log = structlog.get_logger()

LONGEST_LAG_S = 20  # a replica that was silent for longer is gone; a primary that is cut off ends serving before
_LOOK_AGAIN_S = 1.0
_INFO = pack("INFO", "replication")


class ReplicaQuery(NamedTuple):
    """Commands to send behind a write, and how many replicas must answer."""

    commands: list[Packed]
    expected: int


class ReplicaWait:
    """Owned by the loop's thread, for the writes of one link, one after another.

    Each link has its own: two of them may be at two nodes, of which one was frozen while the other took its place, and
    that one of these has no replica says nothing of the other.

    `wanted`: replicas that must have an entry, if there are so many; `expected`: those that must, as far as is known;
    `is_unconfirmed`: they may lack the last write, and the next one may go to another node.
    """

    def __init__(self, wanted: int, timeout_s: float, *, logs_changes: bool = True) -> None:
        """`timeout_s`: for which a node may wait for its replicas; `logs_changes`: of the number that is waited for."""
        self.wanted = wanted
        self._timeout_ms = round(timeout_s * 1000)
        self._logs_changes = logs_changes
        self.expected = wanted
        self._looked_s = -math.inf
        self.is_unconfirmed = False

    def begin(self) -> "ReplicaQuery":
        """Make the commands to send behind a write."""
        if self.is_unconfirmed:
            self._looked_s = -math.inf
        self.is_unconfirmed = self.wanted > 0
        commands = [self._wait()] if self.expected else []
        if self.expected < self.wanted and self._is_due():
            commands.append(_INFO)
        return ReplicaQuery(commands, self.expected)

    async def check(self, waiting: "ReplicaQuery", replies: Sequence[Any], link: StoreLink) -> None:
        """Return if the replicas have the write. Raises StoreUnavailableError.

        `replies`: to the commands of `waiting`; `link`: asks the same node how many replicas it has, if too few answer.
        No other call of the link may come between the write and this.
        """
        num_with = replies[0] if waiting.expected else 0
        is_late = waiting.expected < self.wanted and self._is_due()  # the node may have been frozen meanwhile
        if len(replies) > bool(waiting.expected):
            await self._look_closer(num_with, replies[-1], link)
        elif num_with < waiting.expected or is_late:
            await self._look_closer(num_with, await link.call(_INFO), link)
        self.is_unconfirmed = False

    async def _look_closer(self, num_with: int, info: bytes, link: StoreLink) -> None:
        """Return if all replicas that a node has now, or had when it was frozen, have its last write."""
        expected = self.expected
        self.learn(info)
        if self.expected > expected:  # one is there that was not waited for, or has left, which the node does not know
            num_with = await link.call(self._wait())
        if num_with < self.expected:
            raise StoreUnavailableError(f"{num_with} of {self.expected} replicas have answered for what was written")
        if self.expected < self.wanted:
            await link.confirm_owner()  # a replica may be gone because it leads, where this node was frozen or cut off

    def _wait(self) -> Packed:
        return pack("WAIT", self.expected, self._timeout_ms)

    def _is_due(self) -> bool:
        return time.monotonic() > self._looked_s + _LOOK_AGAIN_S

    def learn(self, info: bytes) -> None:
        """Learn how many replicas there are, from a node's INFO replication."""
        self._looked_s = time.monotonic()
        num_there = num_replicas(info)
        expected = min(self.wanted, num_there)
        if self._logs_changes and expected < self.expected:
            log.warning("the journal waits for fewer replicas, since the node has no more", replicas=expected)
        elif self._logs_changes and expected > self.expected:
            log.info("the journal waits for more replicas again", replicas=expected)
        self.expected = expected


def num_replicas(info: bytes) -> int:
    """Replicas that follow a node, by its INFO replication, without those that have been silent for long."""
    lines = [line.partition(b":")[::2] for line in info.splitlines()]
    replicas = [
        dict(part.partition(b"=")[::2] for part in value.split(b",")) for _, value in lines if b"state=" in value
    ]
    return sum(
        replica[b"state"] == b"online" and int(replica.get(b"lag", b"0")) <= LONGEST_LAG_S for replica in replicas
    )
