"""Scheduler to which a call for a shard is sent by one that does not serve that shard."""

from types import SimpleNamespace

import pytest

from quire.errors import NotLeaderError
from quire.rpc import SHARD_KEY
from scheduler_svc.api.leader_gate import LeaderGate
from scheduler_svc.api.shard_gates import ShardGates

US, OTHER, NEXT = "10.0.0.1:7847", "10.0.0.2:7847", "10.0.0.3:7847"
SERVICE = "quire.v1.Inference"


async def named_leader(gates: ShardGates, shard: int) -> str | None:
    """Leader that a call for this shard is told of."""
    handler = gates.service(
        SimpleNamespace(method=f"/{SERVICE}/GetStats", invocation_metadata=[(SHARD_KEY, str(shard))])
    )
    with pytest.raises(NotLeaderError) as caught:
        await handler.stream_stream(None, None)
    return caught.value.leader


async def test_a_call_is_sent_to_the_leader_that_the_leases_show() -> None:
    gates = ShardGates((SERVICE,), {0: OTHER, 1: OTHER}.get)
    gates.gates[1] = LeaderGate((SERVICE,))
    assert [await named_leader(gates, shard) for shard in (0, 1, 2)] == [OTHER, OTHER, None]


async def test_a_call_is_not_sent_to_us_while_we_begin_or_cease_to_lead() -> None:
    """Regression: our lease, which counts a while longer, hid the scheduler that we had handed over to."""
    gates = ShardGates((SERVICE,), {0: US, 1: US}.get)
    gates.address = US
    gates.gates[0], gates.gates[1] = LeaderGate((SERVICE,)), LeaderGate((SERVICE,))
    gates.gates[1].open()
    gates.gates[1].close(NEXT)
    assert [await named_leader(gates, shard) for shard in (0, 1)] == [None, NEXT]
