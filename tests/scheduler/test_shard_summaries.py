"""Summaries of caches in a real store: other schedulers see what leaders publish, and their clients are told once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from quire.prompt_beginnings import pack_hashes
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.api.topology import topology
from scheduler_svc.journal.keys import deployment_of
from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.redis_leases import RedisLeases
from scheduler_svc.journal.shard_store import ShardStore
from scheduler_svc.leadership.shard_watch import ShardWatch, open_watch
from tests.patience import patient
from tests.valkey import ValkeyProcess

NUM_SHARDS = 3
LEASE_MS = 60_000
LEADER = Lease("them", "10.0.0.1:7847", 4)


@asynccontextmanager
async def watching(store: ValkeyProcess) -> AsyncIterator[tuple[ShardWatch, Sequence[RedisLeases]]]:
    names = [deployment_of("default", shard) for shard in range(NUM_SHARDS)]
    leases = [RedisLeases(store.url, deployment=name) for name in names]
    shards = ShardStore(store.url, deployment="default", lease_ms=LEASE_MS)
    watch = await open_watch(shards, NUM_SHARDS, lease_ms=LEASE_MS, patience_s=patient(20))
    running = asyncio.create_task(watch.run())
    try:
        yield watch, leases
    finally:
        running.cancel()
        await asyncio.wait([running])
        await watch.close()
        for each in leases:
            await each.close()


def shard(epoch: int, version: int) -> pb.Shard:
    return pb.Shard(number=1, leader=LEADER.address, epoch=epoch, num_workers=2, cache_version=version)


def cached(version: int, *hashes: int) -> pb.CachedBeginnings:
    return pb.CachedBeginnings(shard=1, version=version, hashes=pack_hashes(hashes))


async def until_cached(watch: ShardWatch, wanted: pb.CachedBeginnings) -> None:
    async with asyncio.timeout(patient(20)):
        while watch.cached[1] != wanted:
            await watch.changed.wait()


async def test_a_leaders_summary_is_seen_until_it_or_the_leader_is_another(valkey: ValkeyProcess) -> None:
    async with watching(valkey) as (leading, leases), watching(valkey) as (other, _):
        await leases[1].hold(LEADER, LEASE_MS)
        for content in (cached(7, 1, 2, 3), cached(8, 2, 3), cached(0)):
            await leading.publish(shard(4, content.version), content)
            await until_cached(other, content)
            assert other.shards[1] == shard(4, content.version)
        await leading.publish(shard(4, 9), cached(9, 5))
        await until_cached(other, cached(9, 5))
        await leases[1].hold(Lease("next", "10.0.0.2:7847", 5), LEASE_MS)  # its workers have nothing cached
        await until_cached(other, cached(0))
        assert other.shards[1].leader == "10.0.0.2:7847"


async def test_a_client_is_told_each_summary_once_and_from_the_first_message_on(valkey: ValkeyProcess) -> None:
    async with watching(valkey) as (watch, leases):
        await leases[1].hold(LEADER, LEASE_MS)
        await watch.publish(shard(4, 7), cached(7, 1, 2, 3))
        told: list[list[pb.CachedBeginnings]] = []
        async for message in topology(watch):
            assert len(message.shards) == NUM_SHARDS
            told.append(list(message.cached))
            if len(told) == 1:
                await watch.publish(pb.Shard(number=1, epoch=4, num_running=1, cache_version=7), cached(7, 1, 2, 3))
            elif len(told) == 2:
                await watch.publish(shard(4, 0), cached(0))
            else:
                break
        assert told == [[cached(7, 1, 2, 3)], [], [cached(0)]]
