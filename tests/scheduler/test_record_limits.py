"""Limits on the store's records of ended requests: by tenant and in total, for any leader."""

import pickle
import time
from collections.abc import AsyncIterator, Collection

import pytest
from structlog.testing import capture_logs

from quire.scheduler_settings import SchedulerSettings
from quire.v1 import journal_pb2
from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.open_store import open_store
from scheduler_svc.journal.record_ledger import RecordLedger
from scheduler_svc.journal.record_script import MOST_DROPPED
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.store import RECORD_OVERHEAD, EntryId, Record, RecordLimits, Store
from scheduler_svc.requests.recovery.journal_reading import recorded_request_ids
from scheduler_svc.requests.recovery.journal_replay import JournalReplay
from tests.patience import patient
from tests.scheduler.journal_setup import redis_store, until
from tests.scheduler.serving_site import counting, running_site
from tests.scheduler.test_journal_records import AwayStore, running_records
from tests.scheduler.test_standby import admission
from tests.valkey import ValkeyProcess

WEIGHT = 1000  # of each record below: its payload, its request_id of two characters twice, and the overhead
PAYLOAD = bytes(WEIGHT - 2 * 2 - RECORD_OVERHEAD)
SECOND_NS = 1_000_000_000
NOW_NS = time.time_ns()


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, valkey: ValkeyProcess) -> AsyncIterator[Store]:
    opened = await open_store("memory" if request.param == "memory" else valkey.url)
    yield opened
    await opened.close()


def record(request_id: str, tenant: str = "one", *, ended_s: float = 0.0, payload: bytes = PAYLOAD) -> Record:
    """Make a record of a request that ended `ended_s` after this module was loaded."""
    return Record(request_id, tenant, NOW_NS + int(ended_s * SECOND_NS), payload)


def limits(*, all_records: int, of_one_tenant: int, ttl_s: int = 3600) -> RecordLimits:
    """Limits with room for this many of the records above."""
    return RecordLimits(ttl_s=ttl_s, max_bytes=all_records * WEIGHT, max_tenant_bytes=of_one_tenant * WEIGHT)


async def kept(store: Store, records: Collection[Record]) -> list[str]:
    ids = [each.request_id for each in records]
    known = await store.known_records(ids)
    assert known == {each for each in ids if await store.get_record(each) is not None}
    return [each for each in ids if each in known]


async def test_one_tenant_keeps_its_latest_records_and_takes_nothing_of_others(store: Store) -> None:
    others = [record(f"o{i}", "two", ended_s=i) for i in range(2)]
    mine = [record(f"m{i}", ended_s=10 + i) for i in range(9)]
    room = limits(all_records=100, of_one_tenant=4)
    assert await store.put_records(others, room) == 0
    assert await store.put_records(mine[:6], room) == 2
    assert await store.put_records(mine[6:], room) == 3
    assert await kept(store, [*others, *mine]) == ["o0", "o1", "m5", "m6", "m7", "m8"]


async def test_beyond_the_room_of_all_the_tenant_with_the_most_gives_way(store: Store) -> None:
    room = limits(all_records=6, of_one_tenant=5)
    small = [record("s0", "small", ended_s=0)]
    large = [record(f"l{i}", "large", ended_s=1 + i) for i in range(4)]
    third = [record(f"t{i}", "third", ended_s=6 + i) for i in range(2)]
    num_dropped = await store.put_records([*small, *large, *third], room)
    assert (num_dropped, await kept(store, [*small, *large, *third])) == (1, ["s0", "l1", "l2", "l3", "t0", "t1"])
    many = [record(f"{i:02}", f"tenant-{i}", ended_s=10 + i) for i in range(40)]  # each a tenant of its own
    assert await store.put_records(many, room) == 40
    assert len(await kept(store, [*small, *large, *third, *many])) == 6


async def test_a_record_that_comes_late_is_as_old_as_its_end(store: Store) -> None:
    room = limits(all_records=100, of_one_tenant=2)
    newer = [record("n0", ended_s=10), record("n1", ended_s=11)]
    await store.put_records(newer, room)
    assert await store.put_records([record("o0", ended_s=5)], room) == 1
    assert await kept(store, [*newer, record("o0")]) == ["n0", "n1"]


async def test_a_record_larger_than_the_room_of_its_tenant_is_kept_alone(store: Store) -> None:
    room = limits(all_records=30, of_one_tenant=2)
    before = [record("b0", ended_s=0), record("o0", "two", ended_s=1)]
    huge, after = record("h0", ended_s=5, payload=bytes(10 * WEIGHT)), record("a0", ended_s=6)
    await store.put_records([*before, huge], room)
    assert await kept(store, [*before, huge]) == ["o0", "h0"]
    await store.put_records([after], room)
    assert await kept(store, [*before, huge, after]) == ["o0", "a0"]


async def test_a_record_put_again_counts_once_whatever_its_size(store: Store) -> None:
    room = limits(all_records=3, of_one_tenant=3)
    for size in (0, len(PAYLOAD), len(PAYLOAD), len(PAYLOAD) // 2, len(PAYLOAD)):
        assert await store.put_records([record("a0", payload=bytes(size))._replace(replaces=True)], room) == 0
        assert await store.put_records([record("a0", payload=bytes(7 * WEIGHT))], room) == 0  # it stays as it is
    for tenant in ("one", "one", "two"):  # ids belong to no tenant
        assert await store.put_records([record("a1", tenant, ended_s=1)._replace(replaces=True)], room) <= 1
    records = [record("a0"), record("a1", "two", ended_s=1), record("a2", "three", ended_s=2)]
    await store.put_records(records, room)
    assert (await kept(store, records))[-2:] == ["a1", "a2"]


async def test_expired_records_take_no_room(store: Store) -> None:
    room = limits(all_records=4, of_one_tenant=3, ttl_s=3600)
    old = [record(f"o{i}", f"old-{i}", ended_s=-3601) for i in range(4)]
    assert await store.put_records(old, room) == 0
    new = [record(f"n{i}", ended_s=i) for i in range(3)]
    assert await store.put_records(new, room) == 0
    assert await kept(store, new) == ["n0", "n1", "n2"]


async def test_it_is_known_up_to_which_end_records_of_a_tenant_were_dropped(store: Store) -> None:
    room = limits(all_records=100, of_one_tenant=2)
    mine = [record(f"m{i}", ended_s=i) for i in range(5)]
    await store.put_records([*mine, record("o0", "two")], room)
    dropped_until = await store.dropped_until(["one", "two", "three"])
    assert list(dropped_until) == ["one"]
    assert mine[2].ended_unix_ns <= dropped_until["one"] < mine[3].ended_unix_ns
    assert await store.dropped_until([]) == {}


async def test_who_reads_the_journal_waits_for_no_record_that_was_dropped(store: Store) -> None:
    room = limits(all_records=100, of_one_tenant=2)
    await store.put_records([record(f"m{i}", ended_s=i) for i in range(4)], room)  # m0 and m1 are dropped
    replay = JournalReplay()
    for number, (request_id, tenant, ended_s) in enumerate(
        (("m1", "one", 1), ("m2", "one", 2), ("late", "one", 9), ("other", "two", 0)), start=1
    ):
        entry = journal_pb2.JournalEntry(admissions=[admission(number)])
        entry.admissions[0].request.request_id, entry.admissions[0].request.tenant = request_id, tenant
        entry.finishes.add(sequence=number, finished_unix_ns=NOW_NS + ended_s * SECOND_NS)
        replay.apply(EntryId(1, number), entry)
    assert await recorded_request_ids(list(replay.requests.values()), store) == {"m1", "m2"}


async def test_what_was_dropped_by_a_clock_that_was_ahead_says_nothing_of_what_ends_now(store: Store) -> None:
    ahead = [record(f"m{i}", ended_s=5 * 3600 + i) for i in range(3)]
    await store.put_records(ahead, limits(all_records=100, of_one_tenant=1))
    replay, entry = JournalReplay(), journal_pb2.JournalEntry(admissions=[admission(1)])
    entry.admissions[0].request.tenant = "one"
    entry.finishes.add(sequence=1, finished_unix_ns=NOW_NS)
    replay.apply(EntryId(1, 1), entry)
    assert await recorded_request_ids(list(replay.requests.values()), store) == set()


async def test_a_request_that_ended_by_a_clock_ahead_ended_now() -> None:
    store = MemoryStore()
    async with running_records(store, limits=limits(all_records=100, of_one_tenant=1)) as records:
        for request_id, ended_s in (("a0", 5 * 3600), ("a1", None)):
            ended_unix_ns = None if ended_s is None else time.time_ns() + ended_s * SECOND_NS
            records.put(request_id, PAYLOAD, tenant="one", ended_unix_ns=ended_unix_ns)
            await until(lambda: records.num_pending == 0)
    assert await store.known_records(["a0", "a1"]) == {"a1"}


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("of_one_tenant", [1000, 2])
async def test_a_lower_limit_is_reached_in_many_short_scripts(
    valkey: ValkeyProcess, of_one_tenant: int, replicas: int
) -> None:
    """Regression: one script dropped a hundred thousand records, and the store took no entry for seconds."""
    store = RedisStore(valkey.url, timeout_s=patient(20), replicas=replicas)
    many = [record(f"{i:04}", ended_s=i) for i in range(4 * MOST_DROPPED)]
    await store.put_records(many, limits(all_records=10_000, of_one_tenant=10_000))
    num_calls = valkey.num_calls("eval")
    late = [record(f"n{i}", ended_s=10_000 + i) for i in range(2)]
    num_dropped = await store.put_records(late, limits(all_records=2, of_one_tenant=of_one_tenant))
    assert num_dropped == len(many)
    assert valkey.num_calls("eval") - num_calls > len(many) // MOST_DROPPED
    assert await kept(store, [*many, *late]) == ["n0", "n1"]
    await store.close()


async def test_the_accounts_in_the_store_end_with_the_records(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store:
        tenants = [f"tenant-{i}" for i in range(100)]
        old = [record(f"{i:02}", tenant, ended_s=-3601) for i, tenant in enumerate(tenants)]
        room = limits(all_records=1000, of_one_tenant=1000)
        await store.put_records(old, room)
        for i in range(3):
            await store.put_records([record(f"n{i}", "new", ended_s=i)], room)
        keys = Keys.of("default")
        assert valkey.command("GET", keys.record_bytes) == b"$4\r\n3000\r\n"
        assert valkey.command("ZCARD", keys.record_bytes_of) == b":1\r\n"
        assert valkey.command("ZCARD", keys.record_ends) == b":1\r\n"
        assert valkey.command("EXISTS", *(keys.records_of_prefix + each for each in tenants)) == b":0\r\n"
        assert valkey.command("ZCARD", keys.records_of_prefix + "new") == b":3\r\n"


@pytest.mark.parametrize("deleted", range(5))
async def test_records_are_written_though_somebody_deleted_part_of_the_accounts(
    valkey: ValkeyProcess, deleted: int
) -> None:
    keys = Keys.of("default")
    account = (keys.record_bytes, keys.record_bytes_of, keys.record_ends, keys.records_of_prefix + "one", "")[deleted]
    room = limits(all_records=8, of_one_tenant=5)
    async with redis_store(valkey.url) as store:
        await store.put_records([record(f"a{i}", ended_s=i) for i in range(2)], room)
        valkey.command(*(("DEL", account) if account else ("FLUSHALL",)))
        late = [record(f"b{i}", f"{i % 3}", ended_s=5 + i) for i in range(20)]
        for each in late:
            await store.put_records([each], room)
        assert (await kept(store, late))[-1] == "b19"
        assert len(await kept(store, late)) >= 5


async def test_what_is_counted_is_what_the_store_takes(valkey: ValkeyProcess) -> None:
    def used_bytes() -> int:
        info = valkey.command("INFO", "memory").decode()
        return int(info.split("used_memory:")[1].split()[0])

    async with redis_store(valkey.url) as store:
        await store.put_records([record("warm-up")], RecordLimits())
        before = used_bytes()
        records = [record(f"request-{i:028}", f"tenant-{i % 7}", ended_s=i, payload=bytes(700)) for i in range(5000)]
        await store.put_records(records, RecordLimits())
        taken = used_bytes() - before
    assert 0.7 * taken < sum(each.weight for each in records) < 1.3 * taken


async def test_while_the_store_is_away_the_tenant_with_the_most_loses_its_oldest() -> None:
    store = AwayStore()
    async with running_records(store, max_pending_bytes=100) as records:
        records.put("other", bytes(40), tenant="two")
        for i in range(5):
            records.put(f"m{i}", bytes(20), tenant="one")
        assert [await records.get(each) is not None for each in ("other", "m0", "m1", "m2", "m3", "m4")] == [
            True, False, False, True, True, True,
        ]  # fmt: skip
        store.is_away = False


async def test_it_is_logged_now_and_then_that_records_are_dropped() -> None:
    with capture_logs() as logs:
        async with running_records(MemoryStore(), limits=limits(all_records=100, of_one_tenant=2)) as records:
            for number in range(10):
                records.put(f"r{number}", PAYLOAD)
                await until(lambda: records.num_pending == 0)
    assert records.num_dropped == 8
    assert [line["num_dropped"] for line in logs] == [1]


async def test_a_record_is_of_its_requests_tenant_and_end() -> None:
    async with running_site(record_limits=RecordLimits(max_tenant_bytes=1)) as site:
        await site.add_worker()
        for request_id, tenant in (("a", "one"), ("b", "two"), ("c", "one")):
            await site.run(counting(10, 2, request_id, tenant=tenant))
        await until(lambda: site.records.num_pending == 0)
        assert await site.store.known_records(["a", "b", "c"]) == {"b", "c"}


def test_the_accounts_in_memory_stay_small_whatever_comes() -> None:
    ledger = RecordLedger()
    for number in range(20_000):
        ledger.add(record(f"{number}", f"tenant-{number}", ended_s=number), 50 * WEIGHT, 10 * WEIGHT)
        ledger.expire(NOW_NS + (number - 100) * SECOND_NS)
    assert len(ledger.dropped_until) <= 101
    assert len(pickle.dumps(ledger)) < 100_000


def test_there_are_limits_by_default() -> None:
    settings = SchedulerSettings()
    assert (settings.max_record_mb, settings.max_record_share) == (1024, 0.75)


async def test_records_leave_room_for_the_journal_in_a_store_of_little_memory() -> None:
    payload = bytes(256 << 10)
    records = [record(f"r{i}", ended_s=i, payload=payload) for i in range(80)]
    with ValkeyProcess(max_memory_bytes=16 << 20) as valkey:
        async with redis_store(valkey.url) as store:
            await store.append(EntryId(1, 0), b"", create=True)
            num_dropped = 0
            for each in records:
                num_dropped += await store.put_records([each], RecordLimits())
            known = await kept(store, records)
            assert known == [f"r{i}" for i in range(num_dropped, len(records))]
            assert len(payload) * len(known) > 6 << 20
            await store.append(EntryId(1, 1), bytes(2 << 20))
            valkey.command("CONFIG", "SET", "maxmemory", "0")
            assert await store.put_records(records, RecordLimits()) == 0
            assert await kept(store, records) == [each.request_id for each in records]


async def test_a_store_that_others_fill_keeps_the_latest_record_as_long_as_it_takes_any() -> None:
    with ValkeyProcess(max_memory_bytes=16 << 20) as valkey:
        async with redis_store(valkey.url) as store:
            for i in range(12):
                assert valkey.command("SET", f"of another {i}", bytes(1 << 20)) == b"+OK\r\n"
            records = [record(f"r{i}", ended_s=i) for i in range(9)]
            assert await store.put_records(records, RecordLimits()) == 8
            assert await kept(store, records) == ["r8"]
