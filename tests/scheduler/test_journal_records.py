"""Request records: written behind everyone's back, readable from the first moment, patient with the store."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
from structlog.testing import capture_logs

from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.open_store import open_store
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.store import Record, RecordLimits, Store, StoreUnavailableError
from tests.scheduler.journal_setup import redis_store, until
from tests.valkey import ValkeyProcess


class AwayStore(MemoryStore):
    """Takes no records while it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = True
        self.batches: list[int] = []

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        if self.is_away:
            raise StoreUnavailableError("away")
        self.batches.append(len(records))
        return await super().put_records(records, limits)


@asynccontextmanager
async def running_records(
    store: Store,
    *,
    limits: RecordLimits | None = None,
    max_pending_bytes: int = 1 << 20,
    close_timeout_s: float = 10.0,
) -> AsyncIterator[Records]:
    records = Records(store, limits=limits, max_pending_bytes=max_pending_bytes, close_timeout_s=close_timeout_s)
    writing = asyncio.create_task(records.run())
    try:
        yield records
    finally:
        await records.close()
        await writing


def note(settled: list[tuple[str, bool]], name: str, is_kept: bool) -> None:
    settled.append((name, is_kept))


async def test_a_record_can_be_read_before_it_is_written() -> None:
    store = AwayStore()
    async with running_records(store, close_timeout_s=0.1) as records:
        records.put("a", b"one")
        assert await records.get("a") == b"one"
        assert await records.get("b") is None
        assert await store.get_record("a") is None


async def test_records_wait_for_a_store_that_is_away_and_go_in_one_batch() -> None:
    store = AwayStore()
    settled: list[tuple[str, bool]] = []
    async with running_records(store) as records:
        for i in range(300):
            records.put(f"r{i}", b"x", on_settled=partial(note, settled, f"r{i}"))
        await asyncio.sleep(0)
        assert (records.num_pending, settled) == (300, [])
        store.is_away = False
        await until(lambda: records.num_pending == 0)
    assert store.batches == [256, 44]
    assert settled == [(f"r{i}", True) for i in range(300)]
    assert records.num_given_up == 0


async def test_a_newer_record_replaces_one_that_still_waits() -> None:
    store = AwayStore()
    settled: list[tuple[str, bool]] = []
    async with running_records(store) as records:
        records.put("a", b"old", partial(note, settled, "old"))
        records.put("a", b"new", partial(note, settled, "new"))
        assert (records.num_pending, settled) == (1, [("old", False)])
        store.is_away = False
    assert settled[1:] == [("new", True)]
    assert await store.get_record("a") == b"new"
    assert store.batches == [1]


async def test_a_record_put_again_while_it_is_written_is_written_again() -> None:
    class PutsAgain(MemoryStore):
        async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
            num_dropped = await super().put_records(records, limits)
            if records[0].payload == b"old":
                kept.put("a", b"new", replaces=True)
            return num_dropped

    store = PutsAgain()
    async with running_records(store) as kept:
        kept.put("a", b"old")
        await until(lambda: kept.num_pending == 0)
    assert await store.get_record("a") == b"new"


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_write_that_comes_late_undoes_no_deletion(kind: str, valkey: ValkeyProcess) -> None:
    """Regression: a leader that had been frozen replaced the record of a deletion by the whole output."""
    store = await open_store("memory" if kind == "memory" else valkey.url)
    frozen = Records(store)
    frozen.put("r", b"the whole output")
    async with running_records(store) as records:
        records.put("r", b"the whole output")
        await until(lambda: records.num_pending == 0)
        records.put("r", b"deleted", replaces=True)
        await until(lambda: records.num_pending == 0)
    writing = asyncio.create_task(frozen.run())
    await frozen.close()
    await writing
    assert frozen.num_pending == 0
    assert await store.get_record("r") == b"deleted"
    await store.close()


async def test_what_waits_is_bounded_and_the_oldest_goes_first() -> None:
    store = AwayStore()
    settled: list[tuple[str, bool]] = []
    with capture_logs() as logs:
        async with running_records(store, max_pending_bytes=100) as records:
            for i in range(5):
                records.put(f"r{i}", bytes(40), on_settled=partial(note, settled, f"r{i}"))
            assert records.num_pending == 2
            assert settled == [("r0", False), ("r1", False), ("r2", False)]
            assert records.num_given_up == 3
            store.is_away = False
    assert settled[3:] == [("r3", True), ("r4", True)]
    given_up = [log["request_id"] for log in logs if log["event"].startswith("record given up")]
    assert given_up == ["r0", "r1", "r2"]
    assert await store.get_record("r4") == bytes(40)


async def test_what_waits_may_take_all_its_bytes_and_counts_a_replaced_record_no_more() -> None:
    store = AwayStore()
    async with running_records(store, max_pending_bytes=100) as records:
        for payload in (bytes(70), bytes(90), bytes(60)):
            records.put("a", payload)
        records.put("b", bytes(40))
        assert (records.num_pending, records.num_given_up) == (2, 0)
        records.put("c", b"x")
        assert (records.num_pending, records.num_given_up) == (2, 1)
        records.put("d", bytes(500))  # more than there is room for, and the latest
        assert (records.num_pending, records.num_given_up) == (1, 3)
        store.is_away = False


async def test_a_tenant_whose_records_take_less_now_gives_up_none_for_another() -> None:
    store = AwayStore()
    async with running_records(store, max_pending_bytes=100) as records:
        records.put("other", bytes(5), tenant="one")
        records.put("a", bytes(85), tenant="one")
        records.put("a", bytes(10), tenant="one")
        for request_id in ("b", "c"):
            records.put(request_id, bytes(45), tenant="two")
        assert (await records.get("a"), await records.get("b"), await records.get("c")) == (bytes(10), None, bytes(45))
        store.is_away = False
    assert not (records._pending_of or records._bytes_of)


async def test_each_line_says_how_many_records_were_dropped_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    class DroppingStore(MemoryStore):
        later_s = 0.0

        async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
            return 3

    store, clock = DroppingStore(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + store.later_s)
    with capture_logs() as logs:
        async with running_records(store) as records:
            for store.later_s in (0.0, 10.0, 80.0):
                records.put("a", b"x")
                await until(lambda: records.num_pending == 0)
    assert records.num_dropped == 9
    assert [line["num_dropped"] for line in logs] == [3, 6]


async def test_closing_writes_what_was_put_just_now() -> None:
    store = MemoryStore()
    records = Records(store)
    records.put("a", b"one")
    writing = asyncio.create_task(records.run())
    await records.close()
    assert await store.get_record("a") == b"one"
    await writing


async def test_closing_gives_up_on_a_store_that_stays_away() -> None:
    records = Records(AwayStore(), close_timeout_s=0.1)
    writing = asyncio.create_task(records.run())
    with capture_logs() as logs:
        records.put("a", b"one")
        await records.close()
    assert writing.done()
    assert logs[-1] == {"event": "records lost at the end", "log_level": "error", "pending": 1}


async def test_records_survive_a_killed_server_and_use_no_journal_command(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_records(store) as records:
        records.put("a", b"before")
        await until(lambda: records.num_pending == 0)
        valkey.kill()
        records.put("b", b"during")
        await asyncio.sleep(0)
        valkey.start()
        await until(lambda: records.num_pending == 0)
        assert await records.get("a") == b"before"
        assert await records.get("b") == b"during"
        assert valkey.num_calls("xadd") == 0
