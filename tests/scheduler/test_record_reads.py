"""Concurrent reads of records go together, and a failed read is each of its callers'."""

import asyncio
import gc
from collections.abc import Sequence

import pytest

from scheduler_svc.journal.record_reads import MAX_AT_ONCE, RecordReads
from scheduler_svc.journal.store import StoreUnavailableError


class SlowStore:
    """Answers a read when it is let."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()

    async def read(self, request_ids: Sequence[str]) -> Sequence[bytes | None]:
        self.asked.append(list(request_ids))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [None if each == "nobody" else each.encode() for each in request_ids]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_comes_while_a_read_is_under_way_goes_into_the_next_one() -> None:
    store = SlowStore()
    reads = RecordReads(store.read)
    first = asyncio.create_task(reads.get("a"))
    await settled()
    others = [asyncio.create_task(reads.get(each)) for each in ("b", "nobody", "c", "b")]
    await settled()
    assert store.asked == [["a"]]
    store.may_answer.set()
    assert await first == b"a"
    assert await asyncio.gather(*others) == [b"b", None, b"c", b"b"]
    assert store.asked == [["a"], ["b", "nobody", "c"]]
    assert await reads.get("a") == b"a", "nothing is kept: a record may have changed"
    assert len(store.asked) == 3


async def test_a_crowd_is_read_in_parts() -> None:
    store = SlowStore()
    store.may_answer.set()
    reads = RecordReads(store.read)
    crowd = [str(number) for number in range(2 * MAX_AT_ONCE + 1)]
    assert await asyncio.gather(*map(reads.get, crowd)) == [each.encode() for each in crowd]
    assert [len(each) for each in store.asked] == [MAX_AT_ONCE, MAX_AT_ONCE, 1]


async def test_a_failed_read_is_that_of_its_callers_alone() -> None:
    store = SlowStore()
    reads = RecordReads(store.read)
    failing = [asyncio.create_task(reads.get(each)) for each in "ab"]
    await settled()
    store.error = StoreUnavailableError("away")
    store.may_answer.set()
    for each in failing:
        with pytest.raises(StoreUnavailableError):
            await each
    store.error = None
    assert await reads.get("a") == b"a"


async def test_one_who_gives_up_takes_the_read_from_nobody_else() -> None:
    store = SlowStore()
    reads = RecordReads(store.read)
    impatient, patient = asyncio.create_task(reads.get("a")), asyncio.create_task(reads.get("a"))
    await settled()
    impatient.cancel()
    await settled()
    store.may_answer.set()
    assert await patient == b"a"


async def test_a_failed_read_for_which_nobody_waits_any_more_is_no_error_of_the_loop() -> None:
    store, errors = SlowStore(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    reads = RecordReads(store.read)
    gone = asyncio.create_task(reads.get("a"))
    await settled()
    gone.cancel()
    store.error = StoreUnavailableError("away")
    store.may_answer.set()
    await settled()
    store.error = None  # its traceback keeps the read alive, as that of the task does
    del gone
    gc.collect()
    assert not errors


async def test_a_closed_store_keeps_nobody_waiting() -> None:
    store = SlowStore()
    reads = RecordReads(store.read)
    under_way = asyncio.create_task(reads.get("a"))
    await settled()
    gathered = asyncio.create_task(reads.get("b"))
    await settled()
    reads.close()
    outcomes = await asyncio.gather(under_way, gathered, return_exceptions=True)
    assert [type(each) for each in outcomes] == [asyncio.CancelledError] * 2
    await settled()
    assert store.asked == [["a"]]  # nothing is read for nobody
