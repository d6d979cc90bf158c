"""Both stores refuse and keep the same; opening one says clearly what is wrong."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.open_store import MEMORY_URL, open_leases, open_shard_leases, open_store, open_tail
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.store import (
    JOURNAL_START,
    EntryId,
    Record,
    RecordLimits,
    StaleEntryError,
    Store,
    StoreConfigurationError,
    StoreFlushedError,
    StoreUnavailableError,
)
from tests.patience import patient
from tests.scheduler.journal_setup import put_records, redis_store
from tests.services import free_address
from tests.valkey import ValkeyProcess
from tests.valkey_cluster import ValkeyCluster

MINUTE_NS = 60_000_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster(replicas=0, num_shards=1) as nodes:
        yield nodes


def cluster_url(request: pytest.FixtureRequest) -> str:
    """URL of the emptied cluster."""
    nodes: ValkeyCluster = request.getfixturevalue("cluster")
    nodes.primary_of(0).ask("FLUSHALL")
    return nodes.url


@pytest.fixture(params=["memory", "redis", "cluster"])
async def store(request: pytest.FixtureRequest, valkey: ValkeyProcess) -> AsyncIterator[Store]:
    url = cluster_url(request) if request.param == "cluster" else valkey.url
    opened = await open_store("memory" if request.param == "memory" else url)
    yield opened
    await opened.close()


async def test_epochs_rise(store: Store) -> None:
    assert [await store.next_epoch() for _ in range(3)] == [1, 2, 3]


async def test_an_epoch_is_raised_to_the_given_one_and_never_lowered(store: Store) -> None:
    await store.raise_epoch(5)
    assert await store.next_epoch() == 6
    await store.raise_epoch(6)
    await store.raise_epoch(2)
    assert await store.next_epoch() == 7
    await store.raise_epoch(20)
    assert await store.next_epoch() == 21


async def test_entries_come_back_in_order(store: Store) -> None:
    assert await store.last_entry_id() is None
    await store.append(EntryId(2, 0), b"first", create=True)
    await store.append(EntryId(2, 1), b"")
    await store.append(EntryId(3, 0), bytes(range(256)))
    assert await store.last_entry_id() == EntryId(3, 0)
    entries = await store.read_entries(JOURNAL_START, 10)
    assert [(each.entry_id, each.payload) for each in entries] == [
        (EntryId(2, 0), b"first"),
        (EntryId(2, 1), b""),
        (EntryId(3, 0), bytes(range(256))),
    ]
    assert [each.entry_id for each in await store.read_entries(EntryId(2, 1), 1)] == [EntryId(2, 1)]


async def test_checksums_are_the_same_in_both_stores(store: Store) -> None:
    await store.append(EntryId(1, 0), b"123456789", create=True)
    (entry,) = await store.read_entries(JOURNAL_START, 1)
    assert entry.checksum == b"cbf43926"  # the check value of CRC-32


@pytest.mark.parametrize("stale", [EntryId(5, 3), EntryId(5, 2), EntryId(4, 9)])
async def test_an_id_that_is_not_new_is_refused(store: Store, stale: EntryId) -> None:
    await store.append(EntryId(5, 3), b"x", create=True)
    with pytest.raises(StaleEntryError):
        await store.append(stale, b"y")
    assert len(await store.read_entries(JOURNAL_START, 10)) == 1


async def test_a_journal_that_is_not_there_is_not_made_by_accident(store: Store) -> None:
    with pytest.raises(StoreFlushedError):
        await store.append(EntryId(1, 1), b"x")
    assert await store.last_entry_id() is None


async def test_trimming_keeps_the_last_id(store: Store) -> None:
    for seq in range(300):
        await store.append(EntryId(1, seq), bytes(512), create=True)
    await store.trim(EntryId(1, 290))
    entries = await store.read_entries(JOURNAL_START, 1000)
    assert 10 <= len(entries) <= 20  # a node of the stream, 4096 bytes, goes as a whole
    assert await store.last_entry_id() == EntryId(1, 299)
    await store.trim(EntryId(2, 0))
    with pytest.raises(StaleEntryError):
        await store.append(EntryId(1, 299), b"again")


async def test_records_are_kept_by_request_id(store: Store) -> None:
    await put_records(store, {"a": b"one", "b": b"\x00\r\n"})
    assert await store.get_record("a") == b"one"
    assert await store.get_record("b") == b"\x00\r\n"
    assert await store.get_record("c") is None


async def test_a_record_that_is_there_stays_unless_one_comes_that_replaces_it(store: Store) -> None:
    for payload, replaces, kept in ((b"1", False, b"1"), (b"2", False, b"1"), (b"3", True, b"3"), (b"1", False, b"3")):
        await store.put_records([Record("a", "", time.time_ns(), payload, replaces)], RecordLimits())
        assert await store.get_record("a") == kept


async def test_it_is_known_which_of_many_have_a_record(store: Store) -> None:
    await put_records(store, {f"r{i}": b"" for i in range(0, 1200, 2)})
    known = await store.known_records([f"r{i}" for i in range(1200)])
    assert known == {f"r{i}" for i in range(0, 1200, 2)}
    assert await store.known_records([]) == set()


async def test_records_expire_in_redis(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store:
        await put_records(store, {"a": b"one"})
        key = Keys.of("default").record("a")
        left_ms = int(valkey.command("PTTL", key)[1:])
        assert 3_590_000 < left_ms <= 3_600_000
        valkey.command("PEXPIREAT", key, "1")
        assert await store.get_record("a") is None


async def test_records_expire_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now_ns = MemoryStore(), time.monotonic_ns()
    for minute in (0, 1, 60):
        monkeypatch.setattr(time, "monotonic_ns", lambda minute=minute: now_ns + minute * MINUTE_NS)
        await store.put_records([Record(f"r{minute}", "", time.time_ns(), b"x")], RecordLimits(ttl_s=3600))
    assert [await store.get_record(f"r{minute}") for minute in (0, 1, 60)] == [None, b"x", b"x"]
    assert await store.known_records(["r0", "r1", "r60"]) == {"r1", "r60"}
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + 61 * MINUTE_NS)
    assert [await store.get_record(f"r{minute}") for minute in (1, 60)] == [None, b"x"]
    assert await store.known_records(["r1", "r60"]) == {"r60"}


async def test_expired_records_leave_memory_whatever_was_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now_ns = MemoryStore(), time.monotonic_ns()
    for minute, request_id in ((0, "again"), (1, "once"), (30, "again"), (62, "late")):
        monkeypatch.setattr(time, "monotonic_ns", lambda minute=minute: now_ns + minute * MINUTE_NS)
        await store.put_records([Record(request_id, "", time.time_ns(), b"x", replaces=True)], RecordLimits())
    assert set(store._records) == {"again", "late"}


async def put_by_clocks_apart(store: Store, monkeypatch: pytest.MonkeyPatch, hours: int) -> list[str]:
    """Records of two requests that ended by clocks hours apart, and one written by a clock that was set meanwhile."""
    now_ns, apart_ns = time.time_ns(), hours * 60 * MINUTE_NS
    await store.put_records([Record("other", "", now_ns + apart_ns, b"x")], RecordLimits(ttl_s=3600))
    await store.put_records([Record("ours", "", now_ns, b"x")], RecordLimits(ttl_s=3600))
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + apart_ns)
    await store.put_records([Record("later", "", now_ns, b"x")], RecordLimits(ttl_s=3600))
    return ["other", "ours", "later"]


@pytest.mark.parametrize("hours", [-5, 5])
async def test_records_live_their_time_in_redis_whatever_the_clocks_of_schedulers_say(
    valkey: ValkeyProcess, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    async with redis_store(valkey.url) as store:
        for each in await put_by_clocks_apart(store, monkeypatch, hours):
            left_ms = int(valkey.command("PTTL", Keys.of("default").record(each))[1:])
            assert 3_500_000 < left_ms <= 3_600_000


@pytest.mark.parametrize("hours", [-5, 5])
async def test_records_live_their_time_in_memory_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    store = MemoryStore()
    ids = await put_by_clocks_apart(store, monkeypatch, hours)
    assert await store.known_records(ids) == set(ids)


async def test_deployments_share_a_server_and_nothing_else(valkey: ValkeyProcess) -> None:
    one = await open_store(valkey.url, deployment="one")
    two = await open_store(valkey.url, deployment="two")
    try:
        await one.append(EntryId(1, 0), b"x", create=True)
        await put_records(one, {"a": b"of one"})
        assert await two.last_entry_id() is None
        assert await two.get_record("a") is None
    finally:
        await one.close()
        await two.close()


def test_a_deployment_cannot_break_out_of_its_keys() -> None:
    assert Keys.of("blue-1").journal == "{quire:blue-1}:journal"
    for bad in ("", "a}b", "a b", "x" * 65):
        with pytest.raises(ValueError, match="letters"):
            Keys.of(bad)


async def test_reading_records_survives_a_restart_of_the_server(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store:
        await put_records(store, {"a": b"one"})
        valkey.kill()
        with pytest.raises(StoreUnavailableError):
            await store.get_record("a")
        valkey.start()
        assert await store.get_record("a") == b"one"


async def test_concurrent_callers_get_their_own_replies(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store:
        await put_records(store, {str(i): str(i).encode() for i in range(50)})
        values = [store.get_record(str(i)) for i in range(50)]
        assert [await value for value in values] == [str(i).encode() for i in range(50)]


async def test_a_tail_and_leases_are_those_of_the_deployment_that_its_store_has(valkey: ValkeyProcess) -> None:
    store = await open_store(valkey.url, deployment="one")
    await store.append(EntryId(1, 0), b"read", create=True)
    await store.close()
    leases = open_leases(valkey.url, deployment="one", lease_ms=60_000)
    assert await leases.take_lease(Lease("us", "us:1"), 60_000) is None
    await leases.close()
    for deployment, is_ours in (("one", True), ("two", False)):
        tail = open_tail(valkey.url, deployment=deployment)
        assert [each.payload for each in await tail.read_after(JOURNAL_START, 10)] == [b"read"] * is_ours
        await tail.close()
        leases = open_leases(valkey.url, deployment=deployment, lease_ms=60_000)
        assert (await leases.read() is not None) == is_ours
        await leases.close()


async def test_a_store_inside_the_process_has_leases_and_no_tail() -> None:
    leases = open_leases(MEMORY_URL, deployment="one", lease_ms=60_000)
    assert await leases.take_lease(Lease("us", "us:1"), 60_000) is None
    assert await leases.read() is not None
    with pytest.raises(StoreConfigurationError, match=r"standby .* several shards; give --store redis://host:port"):
        open_tail(MEMORY_URL, deployment="one")
    with pytest.raises(StoreConfigurationError, match=r"several shards .* --store redis://host:port"):
        open_shard_leases(MEMORY_URL, deployment="one", lease_ms=60_000)


async def test_the_password_is_used_and_never_shown(valkey: ValkeyProcess) -> None:
    valkey.command("ACL", "SETUSER", "quire", "on", ">s3cret", "~{quire:*", "+@all")
    address = str(valkey.socket_path)
    store = await open_store(f"unix://quire:s3cret@{address}")
    assert await store.next_epoch() == 1
    assert isinstance(store, RedisStore)
    assert store.address == f"unix://quire:***@{address}"
    await store.close()
    with pytest.raises(StoreConfigurationError, match="refuses us") as refused:
        await open_store(f"unix://quire:wr0ng@{address}", patience_s=60.0)
    assert "wr0ng" not in str(refused.value)


async def test_a_password_that_is_missing_and_a_database_that_is_none_are_told_at_once(valkey: ValkeyProcess) -> None:
    with pytest.raises(StoreConfigurationError, match="refuses us: DB index is out of range"):
        await open_store(f"{valkey.url}?db=99", patience_s=60.0)
    valkey.command("ACL", "SETUSER", "default", "resetpass", ">s3cret")
    with pytest.raises(StoreConfigurationError, match="refuses us: it asks for a password"):
        await open_store(valkey.url, patience_s=60.0)


@pytest.mark.parametrize("url", ["", "redis", "http://localhost:6379", "localhost:6379", "rediss:/x", "cluster://h"])
async def test_an_address_that_is_none_is_refused_with_what_to_write(url: str) -> None:
    with pytest.raises(StoreConfigurationError, match="redis://host:port"):
        await open_store(url)


async def test_a_malformed_url_of_a_cluster_is_refused_without_its_password() -> None:
    with pytest.raises(StoreConfigurationError, match=r"redis\+cluster://u:\*\*\*@h:1,g:1/2") as refused:
        await open_store("redis+cluster://u:s3cret@h:1,g:1/2")
    assert "no database numbers" in str(refused.value) and "s3cret" not in str(refused.value)


async def test_a_malformed_url_of_one_server_is_refused_without_its_password() -> None:
    for url in ("redis://u:xyz#uvw@h", "redis://:xyz/uvw@h:1", "redis://u:xyz@h:port"):
        with pytest.raises(StoreConfigurationError, match="cannot be used: it has no valid port") as refused:
            await open_store(url)
        with pytest.raises(StoreConfigurationError) as refused_again:  # a standby opens its tail first
            open_tail(url, deployment="one")
        for each in (refused, refused_again):
            assert "xyz" not in str(each.value) and "uvw" not in str(each.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster"])
async def test_an_option_that_a_url_cannot_have_is_named_without_the_password(scheme: str) -> None:
    for options, why in (("ssl_ca_cert=/ca.pem", "has no option 'ssl_ca_cert'"), ("max_conns=9", "has no option 'max")):
        with pytest.raises(StoreConfigurationError, match=why) as refused:
            await open_store(f"{scheme}://u:s3cret@127.0.0.1:1?{options}")
        assert "s3cret" not in str(refused.value)


async def test_a_value_that_an_option_cannot_have_is_named() -> None:
    with pytest.raises(StoreConfigurationError, match=r"cannot be used: .*: bogus"):
        await open_store("rediss://u:s3cret@h?ssl_cert_reqs=bogus")


@pytest.mark.parametrize(
    ("path", "why"), [("abc", "no number"), ("1/2", "no number"), ("-1", "no number"), ("x", "no ")]
)
async def test_a_database_that_is_no_number_is_refused(path: str, why: str) -> None:
    user = "u:s3cret@" if path == "x" else ""
    with pytest.raises(StoreConfigurationError, match=why) as refused:
        await open_store(f"redis://{user}127.0.0.1:1/{path}")
    assert "s3cret" not in str(refused.value)


async def test_an_option_that_may_be_the_end_of_a_password_is_not_shown() -> None:
    with pytest.raises(StoreConfigurationError, match="it has no valid port or database number") as refused:
        await open_store("redis://u:12?xyz=uvw@h:1")
    assert "xyz" not in str(refused.value)


async def test_one_server_is_no_cluster_and_says_what_to_write() -> None:
    with ValkeyProcess(port=int(free_address().rpartition(":")[2])) as server:
        port = server.command("CONFIG", "GET", "port").split(b"\r\n")[-2].decode()
        with pytest.raises(StoreConfigurationError, match=rf"127.0.0.1:{port} is no cluster: write redis://"):
            await open_store(f"redis+cluster://127.0.0.1:{port}")


async def test_a_malformed_deployment_is_refused_at_the_opening() -> None:
    with pytest.raises(StoreConfigurationError, match="deployment"):
        await open_store("redis://localhost", deployment="a}b")


async def test_an_unreachable_store_is_named_with_what_to_do(tmp_path: Path) -> None:
    with capture_logs() as logs, pytest.raises(StoreUnavailableError) as unreachable:
        await open_store(f"unix://{tmp_path}/nobody", patience_s=(patience_s := patient(1.0)))
    message = str(unreachable.value)
    assert f"the store at unix://{tmp_path}/nobody did not answer within {patience_s:g} s" in message
    assert "start Redis or Valkey" in message
    assert [line["event"] for line in logs] == ["waiting for the store"]


async def test_a_store_is_not_waited_for_beyond_the_patience(tmp_path: Path) -> None:
    with capture_logs() as logs, pytest.raises(StoreUnavailableError):
        await open_store(f"unix://{tmp_path}/nobody", patience_s=0.1)
    assert not logs


async def test_opening_waits_for_a_server_that_is_late() -> None:
    server = ValkeyProcess()
    try:
        opening = asyncio.create_task(open_store(server.url, patience_s=60.0))
        await asyncio.sleep(0.01)  # the first attempt meets no socket
        await asyncio.to_thread(server.start)
        await (await opening).close()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("settings", "durability"),
    [
        (["appendfsync", "always"], "fsync always: it outlives every process and the loss of power"),
        (["appendfsync", "everysec"], "fsync everysec: the last two seconds may be lost"),
        (["appendfsync", "no"], "fsync by the system's choice"),
        (["appendonly", "no"], "none: accepted requests end with the store's process"),
    ],
)
async def test_a_store_says_how_durable_an_acknowledgement_is(
    valkey: ValkeyProcess, settings: list[str], durability: str
) -> None:
    valkey.command("CONFIG", "SET", *settings)
    async with redis_store(valkey.url) as store:
        assert store.durability.startswith(durability)


async def test_a_store_that_hides_its_configuration_may_be_as_durable_as_any(valkey: ValkeyProcess) -> None:
    valkey.command("ACL", "SETUSER", "quire", "on", ">s3cret", "~{quire:*", "+@all", "-config")
    async with redis_store(f"unix://quire:s3cret@{valkey.socket_path}") as store:
        assert store.durability.startswith("unknown")


async def test_unsafe_server_settings_are_warned_of(valkey: ValkeyProcess) -> None:
    valkey.command("CONFIG", "SET", "appendonly", "no")
    valkey.command("CONFIG", "SET", "maxmemory", "100mb")
    valkey.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with capture_logs() as logs:
        store = await open_store(valkey.url)
        await store.close()
    assert [log["event"] for log in logs] == [
        "NOT DURABLE: the store keeps no append-only file, what was accepted dies with it; set appendonly yes",
        "the store may evict the journal: set maxmemory-policy noeviction",
    ]


@pytest.mark.parametrize(("max_memory", "policy"), [("0", "allkeys-lru"), ("100mb", "noeviction")])
async def test_a_store_that_evicts_nothing_is_not_warned_of(
    valkey: ValkeyProcess, max_memory: str, policy: str
) -> None:
    valkey.command("CONFIG", "SET", "maxmemory", max_memory)
    valkey.command("CONFIG", "SET", "maxmemory-policy", policy)
    with capture_logs() as logs:
        await (await open_store(valkey.url)).close()
    assert not logs
