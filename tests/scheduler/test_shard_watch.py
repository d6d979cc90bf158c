"""The watch of all shards, on a real store: who leads each, with which load, over one connection in one round trip."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from quire.errors import UnavailableError, to_status
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.api.topology import set_shards
from scheduler_svc.journal.keys import Keys, deployment_of
from scheduler_svc.journal.leases import HeldLease, Lease, ShardReading
from scheduler_svc.journal.redis_leases import RedisLeases
from scheduler_svc.journal.redis_link import RedisLink, pack
from scheduler_svc.journal.shard_plan import ShardPlan
from scheduler_svc.journal.shard_store import PlannedShards, ShardStore
from scheduler_svc.journal.store import StoreUnavailableError
from scheduler_svc.leadership.shard_watch import ShardWatch, look_every_s, open_watch
from tests.patience import patient
from tests.valkey import ValkeyProcess

LONG_MS = 60_000
LEASE_MS = 1500
NUM_SHARDS = 40
NAMES = [deployment_of("default", number) for number in range(NUM_SHARDS)]


@pytest.fixture
async def leases(valkey: ValkeyProcess) -> AsyncIterator[list[RedisLeases]]:
    opened = [RedisLeases(valkey.url, deployment=name, timeout_s=patient(20)) for name in NAMES]
    yield opened
    for each in opened:
        await each.close()


@pytest.fixture
async def watch(valkey: ValkeyProcess) -> AsyncIterator[ShardWatch]:
    store = ShardStore(valkey.url, deployment="default", lease_ms=LEASE_MS)
    watch = await open_watch(store, NUM_SHARDS, lease_ms=LEASE_MS, patience_s=patient(20))
    running = asyncio.create_task(watch.run("10.0.0.0:7847"))
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
    await until(lambda: watch.shards[39].num_workers == 39)
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


def test_the_store_is_asked_in_proportion_to_the_shards_and_not_to_their_square() -> None:
    """Schedulers are as many as shards, and each reads all of them."""
    assert look_every_s(1) == look_every_s(16) == 0.25
    asked = [shards * shards / look_every_s(shards) / shards for shards in (16, 64, 256)]
    assert asked == [asked[0]] * 3


async def opened(valkey: ValkeyProcess, num_shards: int) -> ShardWatch:
    """Watch of a scheduler with this setting."""
    store = ShardStore(valkey.url, deployment="default", lease_ms=LEASE_MS)
    return await open_watch(store, num_shards, lease_ms=LEASE_MS, patience_s=patient(20))


async def test_the_setting_counts_in_an_empty_store_alone(valkey: ValkeyProcess) -> None:
    first = await opened(valkey, 2)
    with capture_logs() as logs:
        second = await opened(valkey, 3)
    assert [watch.plan.num_shards for watch in (first, second)] == [2, 2]
    assert [each["setting"] for each in logs if "quire shards" in each["event"]] == [3]
    for watch in (first, second):
        await watch.close()


async def test_of_two_changes_at_once_each_counts_and_every_scheduler_sees_the_later(valkey: ValkeyProcess) -> None:
    first, second = await opened(valkey, 2), await opened(valkey, 2)
    await asyncio.gather(first.set_wanted(4), second.set_wanted(1))
    for watch in (first, second):
        await watch.read_plan()
    assert first.plan == second.plan and first.plan.version == 3 and first.plan.num_kept == 4
    assert len(first.shards) == len(first.cached) == len(first.views()) == 4
    for watch in (first, second):
        await watch.close()


async def test_who_changes_the_number_while_the_store_is_away_is_not_told_where_it_is(valkey: ValkeyProcess) -> None:
    watch = await opened(valkey, 2)
    valkey.kill()
    with suppress(StoreUnavailableError):
        await watch.read_plan()  # the next call cannot connect
    with pytest.raises(UnavailableError) as caught:
        await set_shards(watch, pb.SetShardsRequest(num_shards=3))
    said = to_status(caught.value).message
    assert "repeat the call" in said and str(valkey.socket_path) not in said
    await watch.close()


async def test_one_shard_is_watched_for_a_change_alone(valkey: ValkeyProcess) -> None:
    watch, other = await opened(valkey, 1), await opened(valkey, 1)
    running = asyncio.create_task(watch.run("10.0.0.0:7847"))
    await watch.until_seen()
    assert not watch.is_several and watch.plan_read_s
    await other.set_wanted(2)
    await asyncio.wait_for(watch.several.wait(), patient(20))
    assert len(watch.shards) == 2 and not watch.takes_requests(1)
    running.cancel()
    await asyncio.wait({running})
    for each in (watch, other):
        await each.close()


async def test_new_shards_take_requests_when_each_has_a_leader_and_a_worker_and_go_when_nothing_is_left(
    leases: list[RedisLeases], watch: ShardWatch
) -> None:
    async def publish(number: int, num_workers: int = 0, settled_version: int = 0) -> None:
        await leases[number].hold(Lease("us", "10.0.0.0:7847", 1), LONG_MS)
        load = pb.Shard(number=number, epoch=1, num_workers=num_workers, settled_version=settled_version)
        await leases[number].publish_shard(load.SerializeToString(), b"", LONG_MS)

    await watch.set_wanted(NUM_SHARDS - 1)
    for number in range(NUM_SHARDS):
        await publish(number, num_workers=1)
    await until(lambda: watch.leader_of(NUM_SHARDS - 1) is not None)
    assert (watch.plan.num_shards, len(watch.shards)) == (NUM_SHARDS - 1, NUM_SHARDS)
    for number in range(NUM_SHARDS):
        await publish(number, num_workers=1, settled_version=watch.plan.version)
    await until(lambda: len(watch.shards) == NUM_SHARDS - 1)
    assert watch.plan.is_settled and watch.leader_of(NUM_SHARDS - 1) is None

    await publish(NUM_SHARDS - 1)  # in place of what its former leader published
    await watch.set_wanted(NUM_SHARDS)
    await until(lambda: watch.leader_of(NUM_SHARDS - 1) is not None)
    assert not watch.takes_requests(NUM_SHARDS - 1)
    await publish(NUM_SHARDS - 1, num_workers=1)
    await until(lambda: watch.takes_requests(NUM_SHARDS - 1))


async def test_a_store_that_was_emptied_gets_the_number_again(valkey: ValkeyProcess, watch: ShardWatch) -> None:
    await watch.set_wanted(7)
    link = RedisLink(valkey.url, timeout_s=patient(5), repeatable=True)
    await link.call(pack("FLUSHALL"))
    late = await opened(valkey, 2)  # it begins before the other has looked, or after
    await until(lambda: late.plan.num_wanted == 7 or watch.plan.num_wanted == 7)
    await watch.read_plan()
    await late.read_plan()
    assert watch.plan.num_wanted == late.plan.num_wanted == 7
    await late.close()
    await link.close()


class HalfAway(ShardStore):
    """Store of two shards; `is_away`: the part of the store that has shard 1 does not answer."""

    def __init__(self, url: str) -> None:
        super().__init__(url, deployment="default", lease_ms=LEASE_MS)
        self.is_away = False
        self.leaders = ["10.0.0.1:7847", "10.0.0.2:7847"]

    async def read_shards(self, num_shards: int, longest_ms: int) -> PlannedShards:
        readings: list[ShardReading | StoreUnavailableError] = []
        for number, leader in enumerate(self.leaders):
            load = pb.Shard(number=number, epoch=1, cache_version=3).SerializeToString()
            readings.append(ShardReading(HeldLease(Lease("us", leader, 1), LEASE_MS), load, ()))
        if self.is_away:
            readings[1] = StoreUnavailableError("10.1.0.2:6379: no answer within 0.5 s")
        return PlannedShards((await super().read_shards(num_shards, longest_ms)).plan, readings)

    async def read_cached(self, shards: Sequence[int]) -> Sequence[bytes | None]:
        content = pb.CachedBeginnings(version=3).SerializeToString()
        return [None if shard == 1 and self.is_away else content for shard in shards]


async def test_a_node_that_does_not_answer_hides_its_shards_alone_and_is_named(valkey: ValkeyProcess) -> None:
    reader = HalfAway(valkey.url)
    watch = await open_watch(reader, 2, lease_ms=LEASE_MS, patience_s=patient(20))
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
    await watch.close()


class WithoutPlan(HalfAway):
    """`HalfAway` whose part with the number of shards does not answer, either, once it is away."""

    async def read_shards(self, num_shards: int, longest_ms: int) -> PlannedShards:
        plan, shards = await super().read_shards(num_shards, longest_ms)
        return PlannedShards(StoreUnavailableError("10.1.0.2:6379: no answer") if self.is_away else plan, shards)


async def test_shards_are_seen_while_their_number_cannot_be_read(valkey: ValkeyProcess) -> None:
    reader = WithoutPlan(valkey.url)
    watch = await open_watch(reader, 2, lease_ms=LEASE_MS, patience_s=patient(20))
    running = asyncio.create_task(watch.run())
    await until(lambda: watch.leader_of(1) is not None)
    reader.is_away = True
    reader.leaders[:] = ["10.0.0.3:7847", "10.0.0.4:7847"]
    await until(lambda: watch.leader_of(0) == "10.0.0.3:7847")
    assert watch.leader_of(1) == "10.0.0.2:7847"
    running.cancel()
    await asyncio.wait({running})
    await watch.close()


class CountingReads(ShardStore):
    """Store that counts how often the number of shards is read by itself."""

    num_reads = 0

    async def read_plan(self) -> ShardPlan | None:
        self.num_reads += 1
        return await super().read_plan()


async def test_the_number_of_several_shards_comes_with_them_in_one_round_trip(valkey: ValkeyProcess) -> None:
    store = CountingReads(valkey.url, deployment="default", lease_ms=LEASE_MS)
    watch, other = await open_watch(store, 2, lease_ms=LEASE_MS, patience_s=patient(20)), await opened(valkey, 2)
    running = asyncio.create_task(watch.run())
    await watch.until_seen()
    num_reads = store.num_reads
    for num_shards in (5, 3):
        await other.set_wanted(num_shards)
        await until(lambda num_shards=num_shards: watch.plan.num_wanted == num_shards)  # type: ignore[misc]
    assert len(watch.shards) == 5 and store.num_reads == num_reads
    running.cancel()
    await asyncio.wait({running})
    for each in (watch, other):
        await each.close()


async def test_the_connection_for_a_lease_is_closed_when_nothing_needs_it(valkey: ValkeyProcess) -> None:
    def num_connections() -> int:
        return valkey.command("CLIENT", "LIST").count(b" name=")

    store = ShardStore(valkey.url, deployment="default", lease_ms=LEASE_MS)
    before = num_connections()
    for shard in (0, 1, 2):
        await store.leases(shard).read()
    assert num_connections() == before + 3
    for shard in (1, 2, 7):
        await store.close_leases(shard)
    await until(lambda: num_connections() == before + 1)
    assert await store.leases(2).read() is None  # it comes again
    await store.close()
    await until(lambda: num_connections() == before)


async def test_a_damaged_lease_hides_its_shard_alone(leases: list[RedisLeases], watch: ShardWatch) -> None:
    await leases[4].take_lease(Lease("us", "10.0.0.4:7847", 1), LONG_MS)
    await until(lambda: watch.leader_of(4) is not None)
    link = RedisLink(watch.store._url, timeout_s=patient(5), repeatable=True)
    await link.call(pack("SET", Keys.of(NAMES[5]).lease, b"\xff damaged", "PX", LONG_MS))
    await until(lambda: watch.unseen == {5})
    await leases[6].take_lease(Lease("us", "10.0.0.6:7847", 1), LONG_MS)
    await until(lambda: watch.leader_of(6) == "10.0.0.6:7847")
    await link.close()


async def test_of_two_plans_of_one_version_a_later_one_is_made(valkey: ValkeyProcess) -> None:
    """A primary died before its replica had the first, and another scheduler has written one in its place."""
    first, second = await opened(valkey, 2), await opened(valkey, 2)
    lost = first.plan.with_wanted(1)
    assert await second._replace_plan(second.plan.with_wanted(3))
    first._take_plan(lost)
    assert lost.version == second.plan.version and lost != second.plan
    await first.read_plan()
    await second.read_plan()
    assert first.plan == second.plan and first.plan.version == lost.version + 1
    assert {each.num_shards for each in first.plan.former} | {first.plan.num_shards} == {1, 2}
    for watch in (first, second):
        await watch.close()
