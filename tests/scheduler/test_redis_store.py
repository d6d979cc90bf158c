"""Store on a scripted server: what is sent for an entry, a look and a record, and what must be on replicas."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from zlib import crc32

import pytest
from redis.crc import key_slot
from structlog.testing import capture_logs

from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.redis_store import _LAST_ID, RedisStore
from scheduler_svc.journal.store import EntryId, StoreConfigurationError, StoreFlushedError, StoreUnavailableError
from tests.patience import patient
from tests.scheduler.journal_setup import put_records
from tests.scheduler.scripted_cluster import ScriptedNode, owned, scripted_nodes

KEYS = Keys.of("default")
LIMIT_S = patient(20.0)
WAIT = f"WAIT 1 {round(LIMIT_S * 500)}"  # for half of the time that an entry has, in milliseconds
LOOK, SHOW, WRITE = "INFO replication", f"EVAL {_LAST_ID.decode()} 1 {KEYS.journal}", f"INCRBY {KEYS.epoch} 0"
ONE_REPLICA = b"slave0:ip=10.0.0.1,port=7000,state=online,offset=42,lag=0\r\n"


@asynccontextmanager
async def store_and_server(*, replicas: int = 1) -> AsyncIterator[tuple[RedisStore, ScriptedNode]]:
    """A store and its server, whose replica has what is written."""
    async with scripted_nodes(1) as (server,):
        server.answers = {"XADD": b"7-1", SHOW: b"7-1", "WAIT": 1, "INFO": ONE_REPLICA}
        server.answers |= {"EVAL": 2, "EXISTS": 1, "INCRBY": 3}
        store = RedisStore(f"redis://{server.address}", timeout_s=LIMIT_S, replicas=replicas)
        try:
            yield store, server
        finally:
            await store.close()


def sent(server: ScriptedNode) -> list[str]:
    """Commands since the last look; of a script, its name."""
    commands = ["EVAL" if each.startswith("EVAL") and each != SHOW else each for each in server.commands]
    server.commands.clear()
    return commands


def adding(words: str, payload: str) -> str:
    return f"XADD {KEYS.journal} {words} e {payload} c {crc32(payload.encode()):08x}"


@pytest.mark.parametrize("replicas", [0, 1])
async def test_an_entry_is_one_command_and_what_asks_for_its_replicas(replicas: int) -> None:
    async with store_and_server(replicas=replicas) as (store, server):
        await store.append(EntryId(7, 0), b"first", create=True)
        await store.append(EntryId(7, 1), b"")
        waits = [WAIT] * replicas
        assert sent(server) == [adding("7-0", "first"), *waits, adding("NOMKSTREAM 7-1", ""), *waits]
        assert await store.last_entry_id() == EntryId(7, 1)
        assert sent(server) == [SHOW]
        server.answers["XADD"] = None
        with pytest.raises(StoreFlushedError):
            await store.append(EntryId(7, 2), b"")
        server.refusals[KEYS.journal] = ["ERR no such key", "ERR busy"]
        assert await store.last_entry_id() is None
        with pytest.raises(StoreUnavailableError, match="busy"):
            await store.last_entry_id()


async def test_an_entry_that_no_replica_has_is_looked_for_together_with_a_write_that_they_answer_for() -> None:
    async with store_and_server() as (store, server):
        server.answers["WAIT"] = 0
        with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
            await store.append(EntryId(7, 1), b"")
        assert sent(server) == [adding("NOMKSTREAM 7-1", ""), WAIT, LOOK]
        with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
            await store.last_entry_id()
        assert sent(server) == [WRITE, SHOW, WAIT, LOOK]
        server.answers["WAIT"] = 1
        assert await store.last_entry_id() == EntryId(7, 1)
        assert sent(server) == [WRITE, SHOW, WAIT]
        assert await store.last_entry_id() == EntryId(7, 1)
        assert sent(server) == [SHOW]


async def test_records_are_written_with_their_replicas_on_a_connection_of_their_own() -> None:
    async with store_and_server() as (store, server):
        await store.append(EntryId(7, 1), b"")
        assert server.num_open == 1
        assert await put_records(store, {f"r{number}": b"x" for number in range(33)}) == 6
        assert sent(server)[2:] == ["EVAL"] * 3 + [WRITE, WAIT]
        assert server.num_open == 2
        server.answers["WAIT"] = 0
        with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
            await put_records(store, {"r": b"x"})


@pytest.mark.parametrize("replicas", [0, 1])
async def test_what_is_read_of_records_must_be_on_replicas_if_any_are_wanted(replicas: int) -> None:
    async with store_and_server(replicas=replicas) as (store, server):
        confirmed = [WRITE, WAIT] * replicas
        exists = [f"EXISTS {KEYS.record(each)}" for each in ("a", "b")]
        assert await store.known_records(["a", "b"]) == {"a", "b"}
        assert sent(server) == exists + confirmed
        server.answers["ZMSCORE"] = [5.0, None]
        assert await store.dropped_until(["one", "two"]) == {"one": 5999}
        assert sent(server) == [f"ZMSCORE {KEYS.records_dropped} one two", *confirmed]


async def test_what_is_read_of_records_is_confirmed_in_three_attempts() -> None:
    async with store_and_server() as (store, server):
        server.answers["WAIT"] = 0
        with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
            await store.known_records(["a"])
        assert sent(server) == [f"EXISTS {KEYS.record('a')}", WRITE, WAIT, LOOK] * 3
        server.refusals[KEYS.record("a")] = ["NOPERM no"] * 3
        with pytest.raises(StoreConfigurationError):
            await store.known_records(["a"])
        assert sent(server) == [f"EXISTS {KEYS.record('a')}"]


async def test_an_epoch_is_raised_by_what_it_lacks() -> None:
    async with store_and_server() as (store, server):
        await store.raise_epoch(3)
        assert sent(server) == [WRITE]
        await store.raise_epoch(8)
        assert sent(server) == [WRITE, f"INCRBY {KEYS.epoch} 5"]


async def test_a_store_says_how_many_replicas_it_waits_for() -> None:
    async with store_and_server() as (store, server):
        server.answers["CONFIG"] = {"appendfsync": b"always"}
        server.answers["INFO"] = ONE_REPLICA + b"aof_enabled:1\r\nmaxmemory:0\r\n"
        assert store.durability.startswith("unknown")
        await store.connect(LIMIT_S)
        assert store.durability == (
            "fsync always: it outlives every process and the loss of power; replicas that must have an entry: 1"
        )
        assert sent(server) == [
            f"EXISTS {KEYS.epoch}",
            "INFO server",
            "INFO persistence",
            "INFO memory",
            "CONFIG GET appendfsync",
            LOOK,
        ]


@pytest.mark.parametrize("version", ["6.2.14", "5.0.3"])
async def test_a_server_that_is_too_old_is_refused_at_once(version: str) -> None:
    async with store_and_server() as (store, server):
        server.answers["INFO server"] = f"# Server\r\nredis_version:{version}\r\n".encode()
        with pytest.raises(StoreConfigurationError, match=rf"version {version}; Quire needs Redis 7\.0 or Valkey 8"):
            await store.connect(LIMIT_S)


@pytest.mark.parametrize("told", ["redis_version:7.0.0", "redis_version:10.1", "redis_version:", "valkey_version:8"])
async def test_a_server_of_a_later_version_or_of_one_that_is_not_told_is_taken(told: str) -> None:
    async with store_and_server() as (store, server):
        server.answers |= {"CONFIG": {"appendfsync": b"always"}, "INFO server": f"{told}\r\n".encode()}
        await store.connect(LIMIT_S)


async def test_a_sentinel_is_told_from_a_server() -> None:
    async with store_and_server() as (store, server):
        server.refusals[KEYS.epoch] = [f"ERR unknown command 'EXISTS', with args beginning with: '{KEYS.epoch}' "]
        with pytest.raises(StoreConfigurationError, match=r"or it is a Sentinel: give the address of the primary"):
            await store.connect(LIMIT_S)


async def test_that_there_are_fewer_replicas_is_logged_of_the_journal_alone() -> None:
    async with store_and_server() as (store, server):
        server.answers |= {"CONFIG": {"appendfsync": b"always"}, "INFO": b"aof_enabled:1\r\n"}
        with capture_logs() as logs:
            await store.connect(LIMIT_S)
            await store.append(EntryId(7, 1), b"")
            await put_records(store, {"r": b"x"})
        assert [line["replicas"] for line in logs] == [0]
        assert not any(each.startswith("WAIT") for each in server.commands)


async def test_who_writes_in_order_is_told_that_a_slot_was_moved_and_who_reads_follows_it() -> None:
    async with scripted_nodes(2) as (a, b):
        slot = key_slot(KEYS.journal.encode())
        owned([a, b], {slot: [a]})
        store = RedisStore(f"redis+cluster://{a.address}", timeout_s=LIMIT_S, replicas=1)
        key = KEYS.record("r")
        for word, num_commands in (("00000000", 1), ("0", 2), (key, 1)):  # the last of each command
            a.refusals[word] = [f"MOVED {slot} {b.address}"] * num_commands
        with pytest.raises(StoreUnavailableError, match="was moved to"):
            await store.append(EntryId(7, 1), b"")
        with pytest.raises(StoreUnavailableError, match="was moved to"):
            await put_records(store, {"r": b"x"})
        assert not any(each.startswith(("XADD", "EVAL")) for each in b.commands)
        assert await store.get_record("r") == f"b:{key}".encode()
        await store.close()
