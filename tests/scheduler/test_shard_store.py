"""Shards as a scripted server has them, whose plan cannot be read."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.leases import ShardReading
from scheduler_svc.journal.shard_store import PlannedShards, ShardStore
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError
from tests.patience import patient
from tests.scheduler.scripted_cluster import ScriptedNode, scripted_nodes

KEYS = Keys.of("default")
NOTHING = ShardReading(None, b"", ())


@pytest.fixture
async def server() -> AsyncIterator[ScriptedNode]:
    """Server that has nothing of the shard."""
    async with scripted_nodes(1) as (node,):
        node.answers = {"GET": None, "PTTL": -2, "EVAL": []}
        yield node


async def read_shards(server: ScriptedNode) -> PlannedShards:
    """Read the first shard, again where this process was too busy for the short time limit."""
    store = ShardStore(f"redis://{server.address}", deployment="default", lease_ms=60_000)
    try:
        async with asyncio.timeout(patient(20.0)):
            while True:
                try:
                    return await store.read_shards(1, 1000)
                except StoreConfigurationError:
                    raise
                except StoreUnavailableError:
                    await asyncio.sleep(0.01)
    finally:
        await store.close()


async def test_a_plan_that_cannot_be_read_hides_no_shard(server: ScriptedNode) -> None:
    assert await read_shards(server) == PlannedShards(None, [NOTHING])
    server.answers[f"GET {KEYS.shards}"] = b"two"
    plan, shards = await read_shards(server)
    assert isinstance(plan, StoreConfigurationError) and KEYS.shards in plan.message
    assert shards == [NOTHING]


async def test_what_a_server_refuses_has_its_reason_in_the_place_of_plan_and_shard(server: ScriptedNode) -> None:
    server.refusals[KEYS.shards] = ["NOPERM no permission"]
    plan, (shard,) = await read_shards(server)
    for each in (plan, shard):
        assert isinstance(each, StoreConfigurationError) and "no permission" in each.message
