"""A link to the store whose connection breaks: which commands are sent once more."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.redis_leases import RedisLeases
from scheduler_svc.journal.redis_link import RedisLink, pack
from scheduler_svc.journal.redis_tail import RedisTail
from scheduler_svc.journal.store import JOURNAL_START, EntryId, StoreUnavailableError
from tests.patience import patient
from tests.scheduler.journal_setup import put_records, redis_store
from tests.valkey import ValkeyProcess


class ClosingServer:
    """Closes every connection before it says a word."""

    def __init__(self, path: Path) -> None:
        self.url = f"unix://{path}"
        self.num_connections = 0

    async def close_connection(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        writer.close()


@pytest.fixture
async def closing(tmp_path: Path) -> AsyncIterator[ClosingServer]:
    server = ClosingServer(tmp_path / "s")
    async with await asyncio.start_unix_server(server.close_connection, tmp_path / "s"):
        yield server


@pytest.mark.parametrize(("repeatable", "num_attempts"), [(False, 1), (True, 2)])
async def test_a_command_is_sent_once_more_at_most(closing: ClosingServer, repeatable: bool, num_attempts: int) -> None:
    link = RedisLink(closing.url, timeout_s=patient(10.0), repeatable=repeatable)
    with pytest.raises(StoreUnavailableError):
        await link.call(pack("PING"))
    assert closing.num_connections == num_attempts
    await link.close()


async def test_an_entry_is_not_sent_again_by_the_link_and_a_record_is(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store:
        await store.append(EntryId(1, 0), b"", create=True)
        await put_records(store, {"a": b"one"})
        valkey.kill()
        valkey.start()
        assert await store.get_record("a") == b"one"
        with pytest.raises(StoreUnavailableError):
            await store.append(EntryId(1, 1), b"")
        await store.append(EntryId(1, 1), b"")


async def test_a_lease_and_a_tail_are_not_asked_for_again_by_the_link(valkey: ValkeyProcess) -> None:
    leases, tail = RedisLeases(valkey.url), RedisTail(valkey.url)
    await leases.hold(Lease("us", "us:1"), 60_000)
    assert not await tail.read_after(JOURNAL_START, 1)
    valkey.kill()
    valkey.start()
    with pytest.raises(StoreUnavailableError):
        await leases.read()
    with pytest.raises(StoreUnavailableError):
        await tail.first()
    assert await leases.read() is not None
    assert await tail.first() is None
    await leases.close()
    await tail.close()


async def test_a_record_is_waited_for_longer_than_an_entry(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url, timeout_s=0.05) as store:
        await put_records(store, {"a": b"one"})
        valkey.freeze()
        reading = asyncio.create_task(store.get_record("a"))
        await asyncio.wait([reading], timeout=0.3)
        with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.05 s"):
            await store.append(EntryId(1, 0), b"", create=True)
        valkey.thaw()
        assert await reading == b"one"
