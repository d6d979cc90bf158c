"""The store in a real cluster: redirections while a slot is moved, replicas, a primary that dies, nodes that fail."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from scheduler_svc.journal.keys import Keys, deployment_of
from scheduler_svc.journal.leases import Lease, ShardReading
from scheduler_svc.journal.open_store import open_leases, open_store, open_tail
from scheduler_svc.journal.redis_leases import RedisShardReader
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.store import (
    JOURNAL_START,
    EntryId,
    StaleEntryError,
    StoreConfigurationError,
    StoreUnavailableError,
)
from tests.patience import patient
from tests.scheduler.journal_setup import (
    Writer,
    admission,
    assert_nothing_lost_or_doubled,
    put_records,
    running_journal,
    tokens_of,
    until,
)
from tests.valkey_cluster import ClusterNode, ValkeyCluster

NAMES = [deployment_of("default", shard) for shard in range(3)]
LONG_MS = 60_000


@pytest.fixture(scope="module")
def whole_cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(whole_cluster: ValkeyCluster) -> ValkeyCluster:
    """Cluster of which all nodes are up, and empty."""
    for node in whole_cluster.nodes:
        if not node.is_running:
            node.start()
    whole_cluster.until(whole_cluster.is_well)
    for shard in range(3):
        whole_cluster.primary_of(shard).ask("FLUSHALL")
    return whole_cluster


@asynccontextmanager
async def store_of(cluster: ValkeyCluster, shard: int = 0, *, replicas: int = 1) -> AsyncIterator[RedisStore]:
    store = RedisStore(cluster.url, deployment=NAMES[shard], replicas=replicas)
    try:
        await store.connect(patience_s=patient(20.0))
        yield store
    finally:
        await store.close()


def other_primary(cluster: ValkeyCluster, shard: int) -> ClusterNode:
    return cluster.primary_of((shard + 1) % 3)


async def until_put(store: RedisStore, request_id: str = "new") -> None:
    """Put a record as `Records` does: again, where its slot turns out to be at another node."""
    async with asyncio.timeout(patient(20)):
        while True:
            try:
                await put_records(store, {request_id: b""})
                return
            except StoreUnavailableError:
                await asyncio.sleep(0.02)


async def until_appended(store: RedisStore, entry_id: EntryId) -> None:
    """Append an entry as the journal's writer does: again, where it is doubtful and has not arrived."""
    while True:
        try:
            return await store.append(entry_id, b"")
        except StoreUnavailableError:
            await asyncio.sleep(0.02)
        except StaleEntryError:
            return await until_confirmed(store, entry_id)


async def until_confirmed(store: RedisStore, last: EntryId) -> None:
    """Wait until the last entry is on the replicas, too."""
    while True:
        try:
            assert await store.last_entry_id() == last
            return
        except StoreUnavailableError:
            await asyncio.sleep(0.02)


async def test_shards_are_where_their_slots_are_and_one_address_is_enough(cluster: ValkeyCluster) -> None:
    for shard in range(3):
        node = cluster.primary_of(shard)
        store = await open_store(f"redis+cluster://{other_primary(cluster, shard).address}", deployment=NAMES[shard])
        await store.append(EntryId(1, 0), b"of it", create=True)
        await store.append(EntryId(1, 1), b"")
        assert store.durability == (
            "fsync always: it outlives every process and the loss of power; replicas that must have an entry: 1"
        )
        await store.close()
        assert cluster.keys_of(shard) == [Keys.of(NAMES[shard]).journal]
        assert node.num_calls("xadd") >= 2


async def test_while_a_slot_is_moved_every_key_is_found_where_it_is(cluster: ValkeyCluster) -> None:
    keys, source, target = Keys.of(NAMES[1]), cluster.primary_of(1), other_primary(cluster, 1)
    leases = open_leases(cluster.url, deployment=NAMES[1], lease_ms=LONG_MS)
    tail = open_tail(cluster.url, deployment=NAMES[1])
    async with store_of(cluster, 1) as store:
        await store.append(EntryId(1, 0), b"", create=True)
        await until_put(store)
        assert await leases.take_lease(Lease("us", "us:1"), LONG_MS) is None
        await asyncio.to_thread(cluster.begin_move, 1, target)
        with pytest.raises(StoreUnavailableError, match="slot 12560 is being moved to another node"):
            await put_records(store, {"new": b""})  # a script for several keys has to wait until the slot has moved
        cluster.move_keys(1, target, keys.journal)
        await store.append(EntryId(1, 1), b"redirected")
        assert await store.last_entry_id() == EntryId(1, 1)
        held = await leases.read()
        assert held is not None and held.lease.leader_id == "us"  # it has not been moved yet
        cluster.move_keys(1, target, keys.lease)
        assert await leases.hold(Lease("us", "us:1", 1), LONG_MS) is None
        assert [each.payload for each in await tail.read_after(JOURNAL_START, 10)] == [b"", b"redirected"]
        cluster.move_keys(1, target)
        await asyncio.to_thread(cluster.end_move, 1, target)
        with pytest.raises(StoreUnavailableError, match=rf"was moved to {target.address}"):
            await store.append(EntryId(1, 2), b"")  # whoever writes in order looks first what is there
        assert await store.last_entry_id() == EntryId(1, 1)
        await store.append(EntryId(1, 2), b"")
        await until_put(store, "later")
        assert await store.get_record("later") == b""
        assert len(await tail.read_after(EntryId(1, 1), 10)) == 1
        held = await leases.read()
        assert held is not None and held.lease.epoch == 1
    await leases.close()
    await tail.close()
    assert {keys.journal, keys.lease} <= {*cluster.keys_of(1)} and cluster.primary_of(1) is target
    await asyncio.to_thread(cluster.move, 1, source)


async def test_a_journal_goes_on_while_its_slot_is_moved_there_and_back(cluster: ValkeyCluster) -> None:
    async with store_of(cluster, 2) as store, running_journal(store) as journal:
        writer = Writer(journal)
        for target in (other_primary(cluster, 2), cluster.primary_of(2)):
            writer.append(20)
            await asyncio.to_thread(cluster.begin_move, 2, target)
            writer.append(20)
            await asyncio.to_thread(cluster.move_keys, 2, target)
            writer.append(20)
            await asyncio.to_thread(cluster.end_move, 2, target)
            writer.append(20)
            await writer.all_durable()
        assert writer.durable == await tokens_of(store) == list(range(160))
        assert journal.stats.num_recreated == 0


async def test_what_was_acknowledged_outlives_the_node_that_acknowledged_it(cluster: ValkeyCluster) -> None:
    """With one replica to wait for: the other node has every token that was durable, and goes on with them."""
    killed = cluster.primary_of(0)
    async with store_of(cluster) as store, running_journal(store, lease_s=0.4) as journal:
        writer = Writer(journal)
        await journal.admit(admission(1))
        for _ in range(30):
            writer.append()
            await asyncio.sleep(0.002)
        await until(lambda: len(writer.durable) >= 5 and not journal.stats.degraded)
        with capture_logs() as logs:
            killed.kill()
            num_before = len(writer.durable)
            writer.append(5)
            await writer.all_durable()
        assert num_before >= 5 and journal.stats.num_recreated == 0
        assert_nothing_lost_or_doubled(writer.durable, await tokens_of(store))
        reasons = [each["reason"] for each in logs if each["event"].startswith("journal degraded")]
        assert killed.address in reasons[0]
        assert any(each["event"].startswith("the journal waits for fewer replicas") for each in logs)
    assert cluster.primary_of(0) is not killed
    killed.start()


async def test_what_a_replica_lacks_is_written_again_by_the_leader_that_lives(cluster: ValkeyCluster) -> None:
    """Without waiting for replicas: one that lags takes over, and lacks what had been acknowledged."""
    killed, lagging = cluster.primary_of(1), cluster.replica_of(1)
    async with store_of(cluster, 1, replicas=0) as store, running_journal(store, lease_s=0.4) as journal:
        await journal.admit(admission(1))
        lagging.kill()
        epoch = journal.stats.epoch
        for sequence in (2, 3):
            await journal.admit(admission(sequence))
        killed.kill()
        await asyncio.to_thread(lagging.start)
        await journal.admit(admission(4))
        assert journal.stats.epoch > epoch and journal.stats.num_recreated >= 1
        async with store_of(cluster, 1, replicas=0) as other, running_journal(other) as next_one:
            found = set()
            async for _, entry in next_one.read():
                found |= {each.sequence for each in entry.admissions}
                found |= {each.admission.sequence for each in entry.restatements}
            assert found == {1, 2, 3, 4}
    killed.start()


async def test_an_entry_that_no_replica_has_does_not_count_until_one_has_it(cluster: ValkeyCluster) -> None:
    replica = cluster.replica_of(2)
    async with store_of(cluster, 2) as store:
        await store.append(EntryId(1, 0), b"", create=True)
        replica.freeze()
        try:
            with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
                await store.append(EntryId(1, 1), b"")
            with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
                await store.last_entry_id()
            with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
                await put_records(store, {"a": b""})
            await store._records.close()
            with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
                await put_records(store, {"a": b""})  # over a connection that has written nothing: it is there
            with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
                await store.known_records(["a"])  # whoever leads next would not write it again
            with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
                await store.dropped_until(["anonymous"])
        finally:
            replica.thaw()
        async with asyncio.timeout(patient(20)):
            await until_confirmed(store, EntryId(1, 1))
        await store.append(EntryId(1, 2), b"")


async def test_a_replica_that_is_gone_is_not_waited_for_until_it_is_back(cluster: ValkeyCluster) -> None:
    replica = cluster.replica_of(2)
    async with store_of(cluster, 2) as store:
        await store.append(EntryId(1, 0), b"", create=True)
        replica.kill()
        with capture_logs() as logs:
            await store.append(EntryId(1, 1), b"")
            await store.append(EntryId(1, 2), b"")
            await put_records(store, {"a": b""})
            assert [each["replicas"] for each in logs] == [0]
            replica.start()
            seq = 3
            async with asyncio.timeout(patient(30)):
                while len(logs) < 2:
                    with suppress(StoreUnavailableError):  # the replica may be there, and still load what it got
                        await store.append(EntryId(1, seq), b"")
                    seq += 1
                    await asyncio.sleep(0.05)
                assert logs[1]["event"] == "the journal waits for more replicas again"
                await until_confirmed(store, EntryId(1, seq - 1))
        waits = cluster.primary_of(2).num_calls("wait")
        await store.append(EntryId(1, seq), b"")
        assert cluster.primary_of(2).num_calls("wait") == waits + 1


async def test_a_frozen_node_counts_no_record_as_written_though_the_journal_goes_on_elsewhere_without_replicas(
    cluster: ValkeyCluster,
) -> None:
    """The journal has found that the node that took over has no replica; the one that was frozen takes a record."""
    frozen = cluster.primary_of(0)
    async with store_of(cluster) as store:
        await store.append(EntryId(1, 0), b"", create=True)
        await until_put(store)
        frozen.freeze()
        try:
            await asyncio.to_thread(cluster.until_taken_over, 0, without=frozen)
            async with asyncio.timeout(patient(20)):
                await until_appended(store, EntryId(1, 1))
            putting = asyncio.create_task(put_records(store, {"late": b"late"}))
            await asyncio.sleep(0.1)  # it is on its way to the frozen node
        finally:
            frozen.thaw()
        with pytest.raises(StoreUnavailableError):
            await putting
        await until_put(store)
        await put_records(store, {"late": b"again"})
        assert await store.get_record("late") == b"again"


async def test_shards_are_read_by_one_connection_to_each_node_and_a_frozen_node_hides_its_own_alone(
    cluster: ValkeyCluster,
) -> None:
    reader = RedisShardReader(cluster.url, deployments=NAMES)
    for shard, name in enumerate(NAMES):
        leases = open_leases(cluster.url, deployment=name, lease_ms=LONG_MS)
        await leases.take_lease(Lease("us", f"us:{shard}", 1), LONG_MS)
        await leases.close()
    plan, readings = await reader.read_shards(LONG_MS)
    assert plan is None and [
        each.held.lease.address for each in readings if isinstance(each, ShardReading) and each.held
    ] == [
        "us:0",
        "us:1",
        "us:2",
    ]
    assert await reader.read_cached([2, 0]) == [b"", b""]
    frozen = cluster.primary_of(1)
    frozen.freeze()
    try:
        plan, (one, none, other) = await reader.read_shards(LONG_MS)
        assert plan is None
        assert isinstance(one, ShardReading) and isinstance(other, ShardReading)
        assert isinstance(none, StoreUnavailableError) and frozen.address in none.message
        assert await reader.read_cached([0, 1]) == [b"", None]
    finally:
        frozen.thaw()
    await reader.close()


async def test_a_cluster_that_was_stopped_as_a_whole_comes_back_with_everything(cluster: ValkeyCluster) -> None:
    async with store_of(cluster) as store, running_journal(store) as journal:
        writer = Writer(journal)
        writer.append(10)
        await writer.all_durable()
        for node in cluster.nodes:
            node.kill()
        writer.append(10)
        for node in cluster.nodes:
            await asyncio.to_thread(node.start)
        await writer.all_durable()
        assert writer.durable == await tokens_of(store) == list(range(20))
        assert journal.stats.num_recreated == 0


async def test_the_kind_of_store_that_a_url_names_is_checked(cluster: ValkeyCluster) -> None:
    address = other_primary(cluster, 0).address
    with pytest.raises(StoreConfigurationError, match=r"write redis\+cluster:// instead of redis://"):
        await open_store(f"redis://{address}")


async def test_nodes_of_a_cluster_are_warned_of_by_their_names(cluster: ValkeyCluster) -> None:
    replica = cluster.replica_of(0)
    replica.ask("CONFIG", "SET", "appendfsync", "everysec")
    replica.ask("CONFIG", "SET", "maxmemory", "100mb")
    replica.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with capture_logs() as logs:
            async with store_of(cluster) as store:
                assert store.durability.startswith("fsync everysec")
        assert [(each["event"], each["store"]) for each in logs] == [
            (
                "the store may evict the journal: set maxmemory-policy noeviction",
                f"{cluster.url}, node {replica.address}",
            )
        ]
    finally:
        for name, value in (("appendfsync", "always"), ("maxmemory", "0"), ("maxmemory-policy", "noeviction")):
            replica.ask("CONFIG", "SET", name, value)


async def test_a_tail_that_waits_goes_on_at_the_node_to_which_its_slot_was_moved(cluster: ValkeyCluster) -> None:
    source, target = cluster.primary_of(0), other_primary(cluster, 0)
    tail = open_tail(cluster.url, deployment=NAMES[0])
    async with store_of(cluster) as store:
        await store.append(EntryId(1, 0), b"", create=True)
        assert len(await tail.read_after(JOURNAL_START, 10)) == 1
        waiting = asyncio.create_task(tail.read_after(EntryId(1, 0), 10))
        await asyncio.to_thread(cluster.move_at_once, 0, target)
        assert await waiting == []
        with pytest.raises(StoreUnavailableError, match="was moved to"):
            await store.append(EntryId(1, 1), b"")
        await store.append(EntryId(1, 1), b"")
        assert [each.entry_id for each in await tail.read_after(EntryId(1, 0), 10)] == [EntryId(1, 1)]
    await tail.close()
    await asyncio.to_thread(cluster.move_at_once, 0, source)


async def test_the_same_credentials_open_every_node_and_a_wrong_password_is_no_outage(cluster: ValkeyCluster) -> None:
    for node in cluster.nodes:
        node.ask("ACL", "SETUSER", "quire", "on", ">s3cret", "~{quire:*", "+@all")
    async with store_of(cluster) as store:
        await store.append(EntryId(1, 0), b"", create=True)
    opened = await open_store(cluster.url.replace("://", "://quire:s3cret@"))
    assert await opened.last_entry_id() == EntryId(1, 0)
    await opened.close()
    with pytest.raises(StoreConfigurationError, match="refuses us") as refused:
        await open_store(cluster.url.replace("://", "://quire:wr0ng@"), patience_s=60.0)
    assert "wr0ng" not in str(refused.value)


async def test_where_nobody_has_a_slot_the_store_is_waited_for(cluster: ValkeyCluster) -> None:
    """Ask as if the only primary of a slot were down for good: others answer that the cluster is down for it."""
    slot, node = str(cluster.slot_of(2)), cluster.primary_of(2)
    node.ask("CLUSTER", "DELSLOTS", slot)
    with pytest.raises(StoreUnavailableError, match="did not answer within") as unreachable:
        await open_store(cluster.url, deployment=NAMES[2], patience_s=0.5)
    assert re.search("cluster is down: Hash slot not served|no node of the cluster has slot", str(unreachable.value))
    node.ask("CLUSTER", "ADDSLOTS", slot)
    async with store_of(cluster, 2) as store:
        assert await store.last_entry_id() is None
