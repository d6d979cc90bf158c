"""Faults of a store that is a cluster: three shards, each on a primary of its own, which has a replica.

Nodes die, alone, with a leader, or all at once; freeze until their replicas have taken over; and slots are moved.
"""

import asyncio
import time
from functools import partial

from tests.chaos.client_load import ClientLoad
from tests.chaos.scenario import NOTHING_LOST, Figures, Target
from tests.chaos.shard_faults import Shards, begin_shards
from tests.chaos.stage import Scenario, Stage
from tests.valkey_cluster import ClusterNode, ValkeyCluster

NUM_SHARDS = 3
RESTATED = "every live request was written into the journal again"


class Scene:
    """Schedulers, workers and the cluster, under load."""

    def __init__(self, shards: Shards, cluster: ValkeyCluster, load: ClientLoad) -> None:
        self.shards = shards
        self.cluster = cluster
        self.load = load
        self.longest_s = 0.0  # from the death of a primary until a replica has its slots

    async def goes_on(self) -> None:
        """Wait until all nodes serve, all shards are led, and tokens come."""
        await asyncio.to_thread(self.cluster.until, self.cluster.is_well)
        await self.shards.until_led()
        await self.load.until_flowing()

    async def takes_over(self, shard: int, struck_s: float) -> None:
        """Wait until a replica has the slots of a primary that was struck."""
        await asyncio.to_thread(self.cluster.until_taken_over, shard)
        self.longest_s = max(self.longest_s, time.monotonic() - struck_s)

    def num_restated(self) -> int:
        """Times that a leader found that the store had lost something."""
        return sum(len(life.logged(RESTATED)) for life in self.shards.deployment.schedulers)


async def begin(stage: Stage) -> Scene:
    cluster = ValkeyCluster(num_shards=NUM_SHARDS)
    stage.cleanup(cluster.close)
    await asyncio.to_thread(cluster.start)
    shards = await begin_shards(stage, num_shards=NUM_SHARDS, store_url=cluster.url)
    scene = Scene(shards, cluster, stage.load(shards.deployment.client_address))
    await scene.load.until_flowing()
    return scene


async def nodes_die(stage: Stage) -> Figures:
    """Each primary by itself, the next together with the leader of its shard, a replica, and all nodes at once."""
    scene = await begin(stage)
    cluster, shards = scene.cluster, scene.shards
    for shard in (*range(NUM_SHARDS), *range(NUM_SHARDS)):
        killed, struck_s = cluster.primary_of(shard), time.monotonic()
        killed.kill()
        await scene.takes_over(shard, struck_s)
        await scene.load.until_flowing()
        await asyncio.to_thread(killed.start)
        await scene.goes_on()
    for shard in range(NUM_SHARDS):
        number = (await shards.until_led())[shard]
        killed, struck_s = cluster.primary_of(shard), time.monotonic()
        killed.kill()
        shards.schedulers[number].kill()
        await scene.takes_over(shard, struck_s)
        await shards.begin_scheduler(number)
        await asyncio.to_thread(killed.start)
        await scene.goes_on()
    replica = cluster.replica_of(0)
    replica.kill()
    await scene.load.until_flowing()
    await asyncio.to_thread(replica.start)
    await scene.goes_on()
    for node in cluster.nodes:
        node.kill()
    for node in cluster.nodes:
        await asyncio.to_thread(node.start)
    await scene.goes_on()
    return await _figures(stage, scene)


async def primaries_freeze(stage: Stage) -> Figures:
    """Each is frozen until its replica has taken over and requests go on, and then comes back with what it had."""
    scene = await begin(stage)
    for shard in (*range(NUM_SHARDS), *range(NUM_SHARDS)):
        frozen, struck_s = scene.cluster.primary_of(shard), time.monotonic()
        frozen.freeze()
        try:
            await asyncio.to_thread(scene.cluster.until_taken_over, shard, without=frozen)
            scene.longest_s = max(scene.longest_s, time.monotonic() - struck_s)
            await scene.load.until_flowing()
        finally:
            frozen.thaw()
        await asyncio.to_thread(scene.cluster.until, partial(_follows, frozen))
        await scene.goes_on()
    return await _figures(stage, scene)


async def slots_are_moved(stage: Stage) -> Figures:
    """Each shard's slot, key by key to another node and as a whole back, three times, and leaders die meanwhile."""
    scene = await begin(stage)
    cluster, shards = scene.cluster, scene.shards
    for turn in range(3 * NUM_SHARDS):
        shard = turn % NUM_SHARDS
        await shards.until_led()
        source, target = cluster.primary_of(shard), cluster.primary_of((shard + 1) % NUM_SHARDS)
        await asyncio.to_thread(cluster.begin_move, shard, target)
        await asyncio.to_thread(cluster.move_keys, shard, target)
        if turn % 2:
            number = (await shards.until_led())[shard]
            shards.schedulers[number].kill()
            await shards.begin_scheduler(number)
        await asyncio.to_thread(cluster.move_keys, shard, target)
        await asyncio.to_thread(cluster.end_move, shard, target)
        await scene.goes_on()
        await asyncio.to_thread(cluster.move_at_once, shard, source)
        await scene.goes_on()
    return await _figures(stage, scene)


def _follows(node: ClusterNode) -> bool:
    return not node.is_primary


async def _figures(stage: Stage, scene: Scene) -> Figures:
    more: dict[str, float] = {"restated": scene.num_restated()}
    if scene.longest_s:
        more["longest_take_over_s"] = scene.longest_s
    return await stage.figures(scene.load, scene.shards.deployment, **more)


NOTHING_MISSED = (*NOTHING_LOST, Target(figure="restated", at_most=0))

SCENARIOS = (
    Scenario(
        fault="F37",
        title="a cluster as store: primaries killed, alone and with the leader; a replica; all nodes at once",
        injected="SIGKILL; three shards on three primaries with a replica each, each entry on one replica first",
        promise="P1 P2 P4 P7 P8",
        play=nodes_die,
        targets=NOTHING_MISSED,
    ),
    Scenario(
        fault="F37",
        title="a cluster as store: each primary frozen twice until its replica has taken over",
        injected="SIGSTOP, SIGCONT",
        promise="P1 P2 P4 P7 P8",
        play=primaries_freeze,
        targets=NOTHING_MISSED,
    ),
    Scenario(
        fault="F37",
        title="a cluster as store: slots moved to other nodes and back, leaders killed meanwhile",
        injected="SETSLOT and MIGRATE key by key, back by MIGRATESLOTS; SIGKILL of leaders in between",
        promise="P1 P2 P4 P7",
        play=slots_are_moved,
        targets=NOTHING_MISSED,
    ),
)
