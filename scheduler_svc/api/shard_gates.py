"""Gates of the shards that a process leads or stands by for: each call goes to that of the shard that it is for.

Knows services by their names alone.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc

from quire.errors import NotLeaderError
from quire.rpc import SHARD_KEY
from scheduler_svc.api.leader_gate import LeaderGate

_MOST_DIGITS = 6


class ShardGates(grpc.GenericRpcHandler):
    """One per process, added to its server once. `gates` has a gate by the number of each shard.

    `address`: of this process, once it is known. A lease of ours outlasts our serving, and begins before it.
    """

    def __init__(
        self,
        services: Sequence[str],
        leader_of: Callable[[int], str | None],
        takes_requests: Callable[[int], bool] = lambda shard: True,
    ) -> None:
        """Take what is behind the gates.

        Args:
            services: full names of the services.
            leader_of: address of a shard's leader elsewhere.
            takes_requests: True for a shard that takes new requests: a call that names none goes to such a one.
        """
        self.gates: dict[int, LeaderGate] = {}
        self.address: str | None = None
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._leader_of = leader_of
        self._takes_requests = takes_requests

    def service(self, handler_call_details: Any) -> Any:
        """Handler of a call; None if its service is not behind the gates."""
        if not handler_call_details.method.startswith(self._prefixes):
            return None
        shard = _shard_wanted(handler_call_details.invocation_metadata)
        if shard is None:
            led = [number for number, gate in self.gates.items() if gate.is_open]
            shard = min(led or self.gates, key=lambda number: (not self._takes_requests(number), number), default=0)
        gate = self.gates.get(shard)
        leader = self._leader_of(shard)
        elsewhere = leader if leader != self.address else None
        if gate is None or (elsewhere is not None and not gate.is_open):  # the gate may not have heard of it yet
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, shard, elsewhere))
        return gate.service(handler_call_details)


def not_leader_of(shard: int, leader: str | None) -> NotLeaderError:
    """The refusal of a call for a shard that this process does not lead."""
    where = f"; {leader} does" if leader is not None else ", and no leader of it is known at the moment"
    return NotLeaderError(f"this scheduler does not lead shard {shard}{where}", leader)


async def _refuse(shard: int, leader: str | None, requests: AsyncIterator[bytes], context: Any) -> None:
    raise not_leader_of(shard, leader)


def _shard_wanted(metadata: Sequence[tuple[str, str | bytes]] | None) -> int | None:
    """The shard that a call is for; None if it does not say, or says nonsense."""
    for name, value in metadata or ():
        if name == SHARD_KEY:
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
    return None
