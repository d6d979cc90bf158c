"""Journal by a way that is slow: what is long has longer, and what need not be long is not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal import redis_store as redis_store_module
from scheduler_svc.journal import redis_tail
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.journal_entry import decode, read_journal
from scheduler_svc.journal.journal_writer import JournalWriter
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.redis_tail import RedisTail
from scheduler_svc.journal.store import JOURNAL_START, EntryId, StoreTimeoutError, StoreUnavailableError
from tests.chaos.proxy import Proxy
from tests.patience import patient
from tests.scheduler.journal_setup import redis_store
from tests.valkey import ValkeyProcess

BYTES_PER_S = 8 << 20
LIMIT_S = 0.5  # of what is short


def entry_of(num_bytes: int) -> bytes:
    return pb.JournalEntry(delta_tokens=bytes(num_bytes)).SerializeToString()


async def write_entries(valkey: ValkeyProcess, *sizes: int) -> None:
    """Write entries of epoch 1 by a way that is quick."""
    async with redis_store(valkey.url) as store:
        for seq, num_bytes in enumerate(sizes):
            await store.append(EntryId(1, seq), entry_of(num_bytes), create=True)


@asynccontextmanager
async def slow_way(valkey: ValkeyProcess) -> AsyncIterator[str]:
    async with Proxy(str(valkey.socket_path)) as proxy:
        proxy.throttle(BYTES_PER_S)
        yield f"redis://{proxy.address}"


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that less has to exceed than those of the product."""
    monkeypatch.setattr(redis_store_module, "_SIDE_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(redis_tail, "_TIMEOUT_S", LIMIT_S)


async def test_a_long_entry_is_confirmed_and_the_last_one_found_without_being_read(valkey: ValkeyProcess) -> None:
    async with Proxy(str(valkey.socket_path)) as proxy:
        store = RedisStore(f"redis://{proxy.address}", timeout_s=1.0)
        writer = JournalWriter(store, "us", late_s=0.4)
        epoch = await writer.take_epoch()
        last = await writer.write(entry_of(12 << 20))
        proxy.throttle(BYTES_PER_S)
        async with asyncio.timeout(patient(6)):
            await writer.confirm_entry(last)
            assert await store.last_entry_id() == last == EntryId(epoch, 1)
            journal = Journal(store, leader_id="us")
            journal._writer = writer
            await journal.confirm_leading()
        await store.close()


async def test_pages_that_take_too_long_are_read_in_parts(valkey: ValkeyProcess) -> None:
    await write_entries(valkey, *[128 << 10] * 70)
    async with slow_way(valkey) as url, redis_store(url, timeout_s=LIMIT_S) as store, asyncio.timeout(patient(30)):
        read = [entry_id async for entry_id, _ in read_journal(store)]
    assert read == [EntryId(1, seq) for seq in range(70)]


@pytest.mark.parametrize("is_urgent", [False, True])
async def test_an_entry_that_takes_too_long_has_longer(valkey: ValkeyProcess, is_urgent: bool) -> None:
    await write_entries(valkey, 1, 12 << 20, 1)
    async with slow_way(valkey) as url, redis_store(url, timeout_s=LIMIT_S) as store, asyncio.timeout(patient(30)):
        while True:  # what is urgent is asked for again by who needs it
            try:
                read = await store.read_entries(JOURNAL_START, 8, is_urgent=is_urgent)
                break
            except StoreTimeoutError:
                assert is_urgent
    assert [len(decode(each).delta_tokens) for each in read] == [1, 12 << 20, 1]


async def test_a_tail_has_longer_for_a_long_entry_too(valkey: ValkeyProcess) -> None:
    await write_entries(valkey, 12 << 20, 1)
    async with slow_way(valkey) as url:
        tail = RedisTail(url)
        async with asyncio.timeout(patient(30)):
            assert [each.entry_id.seq for each in await tail.read_after(JOURNAL_START, 64)] == [0, 1]
            first = await tail.first()
            assert first is not None and first.entry_id == EntryId(1, 0)
            assert await tail.has(EntryId(1, 0)) and not await tail.has(EntryId(0, 9))
        await tail.close()


async def test_a_store_that_answers_nothing_is_not_waited_for_any_longer(valkey: ValkeyProcess) -> None:
    await write_entries(valkey, 1)
    async with redis_store(valkey.url, timeout_s=LIMIT_S) as store:
        await store.read_entries(JOURNAL_START, 8)
        valkey.freeze()
        try:
            for _ in range(3):
                with pytest.raises(StoreUnavailableError, match=rf"no answer within {LIMIT_S} s"):
                    await store.read_entries(JOURNAL_START, 8)
        finally:
            valkey.thaw()
        num_reads = valkey.num_calls("xrange")
        assert len(await store.read_entries(JOURNAL_START, 8)) == 1
        assert valkey.num_calls("xrange") - num_reads in (1, 2, 3, 4)  # the frozen ones may be answered by now
