"""The watch of all shards, on a real store: who leads each, with which load, over one connection in one round trip."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from structlog.testing import capture_logs

from quire.v1 import cluster_pb2 as pb
from scheduler_svc.journal.keys import deployment_of
from scheduler_svc.journal.leases import HeldLease, Lease, ShardReading
from scheduler_svc.journal.redis_leases import RedisLeases, RedisShardReader
from scheduler_svc.journal.store import StoreUnavailableError
from scheduler_svc.leadership.shard_watch import ShardWatch, look_every_s
from tests.patience import patient
from tests.valkey import ValkeyProcess

LONG_MS = 60_000
LEASE_MS = 1500
NUM_SHARDS = 40
NAMES = [deployment_of("default", number) for number in range(NUM_SHARDS)]


@pytest.fixture
async def leases(valkey: ValkeyProcess) -> AsyncIterator[list[RedisLeases]]:
    opened = [RedisLeases(valkey.url, deployment=name) for name in NAMES]
    yield opened
    for each in opened:
        await each.close()


@pytest.fixture
async def watch(valkey: ValkeyProcess, leases: list[RedisLeases]) -> AsyncIterator[ShardWatch]:
    watch = ShardWatch(leases, RedisShardReader(valkey.url, deployments=NAMES), lease_ms=LEASE_MS)
    running = asyncio.create_task(watch.run())
    await watch.until_seen()
    yield watch
    running.cancel()
    await asyncio.wait({running})
    await watch.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(patient(20)):
        while not is_so():  # noqa: ASYNC110 - the watch is what looks
            await asyncio.sleep(0.01)


async def test_it_sees_leaders_loads_and_standbys_of_every_shard(leases: list[RedisLeases], watch: ShardWatch) -> None:
    for number in (0, 7, 39):
        await leases[number].take_lease(Lease("us", f"10.0.0.{number}:7847", 3), LONG_MS)
        load = pb.Shard(number=number, epoch=3, num_workers=number)
        await leases[number].publish_shard(load.SerializeToString(), b"", LONG_MS)
    await until(lambda: watch.leader_of(39) is not None)
    assert [shard.number for shard in watch.shards] == list(range(NUM_SHARDS))
    assert {s.number: (s.leader, s.num_workers) for s in watch.shards if s.leader} == {
        number: (f"10.0.0.{number}:7847", number) for number in (0, 7, 39)
    }
    await leases[7].announce("10.0.1.1:7847", 4 * LEASE_MS)
    await until(lambda: watch.views()[7].standbys == ("10.0.1.1:7847",))
    await until(lambda: watch.views()[1].is_in_need)  # nobody leads it for half a lease
    assert not watch.views()[7].is_in_need


async def test_what_an_earlier_leader_published_does_not_count(leases: list[RedisLeases], watch: ShardWatch) -> None:
    await leases[2].publish_shard(pb.Shard(number=2, epoch=3, num_workers=9).SerializeToString(), b"", LONG_MS)
    await leases[2].take_lease(Lease("us", "10.0.0.1:7847", 4), LONG_MS)
    await until(lambda: watch.leader_of(2) is not None)
    assert watch.shards[2].num_workers == 0


async def test_a_store_that_was_away_is_looked_at_again(
    valkey: ValkeyProcess, leases: list[RedisLeases], watch: ShardWatch
) -> None:
    valkey.freeze()
    with capture_logs() as logs:
        await until(lambda: any(each["event"] == "shards not seen" for each in logs))
    valkey.thaw()
    await leases[5].take_lease(Lease("us", "10.0.0.1:7847", 1), LONG_MS)
    await until(lambda: watch.leader_of(5) == "10.0.0.1:7847")


class HalfAway:
    """Reader of two shards; `is_away`: the part of the store that has shard 1 does not answer."""

    def __init__(self) -> None:
        self.is_away = False
        self.leaders = ["10.0.0.1:7847", "10.0.0.2:7847"]

    async def read_shards(self, longest_ms: int) -> Sequence[ShardReading | StoreUnavailableError]:
        readings: list[ShardReading | StoreUnavailableError] = []
        for number, leader in enumerate(self.leaders):
            load = pb.Shard(number=number, epoch=1, cache_version=3).SerializeToString()
            readings.append(ShardReading(HeldLease(Lease("us", leader, 1), LEASE_MS), load, ()))
        if self.is_away:
            readings[1] = StoreUnavailableError("10.1.0.2:6379: no answer within 0.5 s")
        return readings

    async def read_cached(self, shards: Sequence[int]) -> Sequence[bytes | None]:
        content = pb.CachedBeginnings(version=3).SerializeToString()
        return [None if shard == 1 and self.is_away else content for shard in shards]

    async def close(self) -> None:
        pass


async def test_a_node_that_does_not_answer_hides_its_shards_alone_and_is_named(leases: list[RedisLeases]) -> None:
    reader = HalfAway()
    watch = ShardWatch(leases[:2], reader, lease_ms=LEASE_MS)
    running = asyncio.create_task(watch.run())
    with capture_logs() as logs:
        await until(lambda: [each.version for each in watch.cached] == [3, 3])
        reader.is_away = True
        await until(lambda: bool(logs))
        reader.leaders[:] = ["10.0.0.3:7847", "10.0.0.4:7847"]
        await until(lambda: watch.leader_of(0) == "10.0.0.3:7847")
        assert watch.leader_of(1) == "10.0.0.2:7847"  # as it was seen last
        assert not watch.views()[1].is_in_need
        reader.is_away = False
        await until(lambda: watch.leader_of(1) == "10.0.0.4:7847")
    assert [(each["event"], each["shards"], each["reason"]) for each in logs] == [
        ("shards not seen", [1], "10.1.0.2:6379: no answer within 0.5 s")
    ]
    running.cancel()
    await asyncio.wait({running})


def test_the_store_is_asked_in_proportion_to_the_shards_and_not_to_their_square() -> None:
    """Schedulers are as many as shards, and each reads all of them."""
    assert look_every_s(1) == look_every_s(16) == 0.25
    asked = [shards * shards / look_every_s(shards) / shards for shards in (16, 64, 256)]
    assert asked == [asked[0]] * 3
