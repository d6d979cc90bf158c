"""The store is frozen, killed, full or emptied under a scheduler: what runs waits, and what comes is refused."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from quire.errors import NotFoundError, UnavailableError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.journal_health import JournalHealth
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId, Record, RecordLimits, StoreUnavailableError
from tests.patience import patient
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import redis_store, until
from tests.scheduler.refusals import refusal_of, retry_delay_s
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in
from tests.services import Service
from tests.valkey import ValkeyProcess


@asynccontextmanager
async def site_on(valkey: ValkeyProcess, **options: Any) -> AsyncIterator[Site]:
    async with redis_store(valkey.url) as store, running_site(store, late_s=patient(1.0), **options) as site:
        await site.add_worker(num_blocks=64)
        yield site


async def refused(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    error = await refusal_of(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_delay_s(error) == 1.0
    return error


async def read_all(messages: AsyncIterator[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    return [message async for message in messages]


class RecordlessStore(MemoryStore):
    """Takes entries, and no records while `is_shut`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_shut = True

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        if self.is_shut:
            raise StoreUnavailableError("no records now")
        return await super().put_records(records, limits)


class SilentStore(MemoryStore):
    """Takes entries, and refuses to say which was the last while `is_silent`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_silent = False

    async def last_entry_id(self) -> EntryId | None:
        if self.is_silent:
            raise StoreUnavailableError("no answers now")
        return await super().last_entry_id()


async def test_a_store_that_refuses_a_question_is_in_trouble_until_it_answers_the_next() -> None:
    store = SilentStore()
    async with running_site(store, probe_every_s=0.01) as site:  # `late_s` is far off: it is the refusal that counts
        await site.add_worker()
        changes: list[bool] = []
        site.journal.health.on_change = changes.append
        store.is_silent = True
        await until(lambda: site.journal.stats.degraded)
        await refused(site.run(counting(10, 3)))
        store.is_silent = False
        await until(lambda: not site.journal.stats.degraded)
        assert tokens_in(await site.run(counting(10, 3))) == [11, 12, 13]
        assert changes == [True, False]


async def test_a_request_stays_in_the_journal_until_its_record_is_written() -> None:
    store = RecordlessStore()
    async with running_site(store, trim_every=1) as site:
        await site.add_worker()
        await site.run(counting(10, 4, "first"))
        for number in range(3):  # what may be trimmed is trimmed
            await site.run(counting(20, 4, f"later{number}"))
        assert site.records.num_pending == site.journal.stats.num_needed == 4
    store.is_shut = False
    async with running_site(store, epoch=2) as site:  # of all that the first scheduler said only the journal is left
        await site.add_worker()
        record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="first"))
        assert record.state == pb.REQUEST_STATE_FINISHED
        assert list(record.samples[0].token_ids) == [11, 12, 13, 14]
        await until(lambda: not site.journal.stats.num_needed)


async def test_a_submission_into_a_frozen_store_is_refused_soon_and_the_next_at_once(valkey: ValkeyProcess) -> None:
    async with site_on(valkey, admission_timeout_s=60.0) as site:
        changes: list[bool] = []
        site.journal.health.on_change = changes.append
        running = asyncio.create_task(site.run(counting(10, 200, "runs")))
        await until(lambda: "runs" in site.engine.live and site.engine.output_tokens > 3)
        valkey.freeze()
        await asyncio.gather(*(refused(site.run(counting(20 + i, 3, name))) for i, name in enumerate(("", "named"))))
        await until(lambda: site.journal.stats.degraded)
        commands = site.journal.stats.commands
        await refused(site.run(counting(30, 3, "later")))
        assert site.journal.stats.commands - commands <= 2  # nobody waited for another answer
        stats = await site.inference.GetStats(pb.GetStatsRequest())
        assert stats.journal.degraded
        valkey.thaw()
        assert tokens_in(await running) == list(range(11, 211))
        await until(lambda: not site.journal.stats.degraded)
        assert tokens_in(await site.run(counting(20, 3, "named"))) == [21, 22, 23]
        assert changes and changes == [True, False] * (len(changes) // 2)  # a slow store may be in trouble again
        await site.idle()


async def test_decoding_goes_on_while_the_store_is_away_and_delivery_waits(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_site(store, late_s=patient(1.0)) as site:
        worker = await site.add_worker(num_blocks=64)
        worker.silence_after(5)
        messages = aiter(site.inference.Generate(counting(10, 300, "runs")))
        await anext(messages)
        sample = site.engine.live["runs"].stream.samples[0]
        await until(lambda: sample.num_released == 5)  # nothing is on its way to the store
        num_acknowledged = sample.num_released
        valkey.kill()
        worker.speak_again()
        await until(lambda: site.journal.stats.degraded)
        reading = asyncio.create_task(read_all(messages))
        await until(lambda: site.engine.output_tokens == 300)  # to its end, of which nobody hears
        await until(lambda: len(sample.token_ids) == 300)  # its text is made, and all is handed to the journal
        assert sample.num_released == num_acknowledged < 300, "delivered before the journal had it"
        assert not reading.done() and site.engine.live["runs"].stream.finished is None
        valkey.start()
        rest = await reading
        assert rest[-1].finished.state == pb.REQUEST_STATE_FINISHED
        assert rest[-1].finished.usage.completion_tokens == 300
        await site.idle()


async def test_a_full_store_refuses_and_heals(valkey: ValkeyProcess) -> None:
    async with site_on(valkey) as site:
        valkey.command("CONFIG", "SET", "maxmemory", "1")
        await refused(site.run(counting(10, 3)))
        await until(lambda: site.journal.stats.degraded)
        valkey.command("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: not site.journal.stats.degraded)
        assert tokens_in(await site.run(counting(10, 3))) == [11, 12, 13]


def test_a_start_on_a_replica_names_the_store_and_what_to_do(valkey: ValkeyProcess) -> None:
    valkey.command("REPLICAOF", "127.0.0.1", "1")  # nobody: it answers and takes no writes
    arguments = ("--listen", "127.0.0.1:0", "--store", valkey.url, "--store-timeout-s", "0.1")
    with Service("scheduler_svc", *arguments, may_fork=True) as scheduler:
        assert scheduler.wait() == 2
        remedy = "it is a read-only replica; give the address of the primary"
        assert scheduler.raw[-1] == f"scheduler: the store at {valkey.url}: {remedy}\n"


async def test_an_emptied_store_has_all_that_lives_and_its_epoch_again(valkey: ValkeyProcess) -> None:
    async with site_on(valkey, probe_every_s=0.05) as site:
        messages = aiter(site.inference.Generate(counting(10, 300, "runs")))
        await anext(messages)
        valkey.command("FLUSHALL")
        rest = [message async for message in messages]
        assert rest[-1].finished.state == pb.REQUEST_STATE_FINISHED
        assert site.journal.stats.num_recreated == 1
        assert await site.store.next_epoch() > site.journal.stats.epoch


async def test_a_record_that_cannot_be_read_is_told_as_that_and_not_as_a_fault_of_ours(valkey: ValkeyProcess) -> None:
    valkey.command("SET", "{quire:default}:record:damaged", b"\xff not a record")
    valkey.command("LPUSH", "{quire:default}:record:foreign", "of another program")
    async with site_on(valkey) as site:
        for ask in (
            site.run(counting(10, 3, "damaged")),
            site.inference.GetRequest(pb.GetRequestRequest(request_id="damaged")),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="'damaged' is damaged in the store; send") as caught:
                await ask
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = await refused(site.inference.GetRequest(pb.GetRequestRequest(request_id="foreign")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "the journal is not available" in (error.details() or "")


async def test_a_record_that_is_not_read_in_time_is_a_refusal_and_brings_the_trouble_to_light() -> None:
    store = GatedStore()
    async with running_site(store, late_s=0.4) as site:
        await site.add_worker()
        store.may_read.clear()
        error = await refused(site.run(counting(10, 3, "named")))
        assert "does not answer" in (error.details() or "")
        store.may_read.set()
        assert tokens_in(await site.run(counting(10, 3, "named"))) == [11, 12, 13]


async def test_callers_are_told_that_the_journal_is_away_and_not_where_it_lies(valkey: ValkeyProcess) -> None:
    async with site_on(valkey) as site:
        await site.run(counting(10, 3, "ended"))
        await until(lambda: not site.records.num_pending)
        valkey.kill()
        attach = site.inference.Attach(pb.AttachRequest(request_id="ended"))
        for call in (
            site.inference.GetRequest(pb.GetRequestRequest(request_id="ended")),
            site.inference.Cancel(pb.CancelRequest(request_id="ended")),
            site.inference.DeleteRecord(pb.DeleteRecordRequest(request_id="ended")),
            anext(aiter(attach)),
        ):
            details = (await refused(call)).details() or ""
            assert "journal" in details and "repeat the call" in details
            assert str(valkey.socket_path.parent) not in details
        valkey.start()


async def test_a_deletion_that_was_given_up_is_no_success_for_anyone_who_waits_for_it() -> None:
    """Regression: it was answered as if it were durable, and the record could be read again."""
    store = RecordlessStore()
    store.is_shut = False
    async with running_site(store) as site:
        await site.add_worker()
        await site.run(counting(10, 3, "ended"))
        await until(lambda: not site.records.num_pending)
        store.is_shut = True
        deletions = [asyncio.create_task(site.control.delete_record("ended")) for _ in range(2)]
        await until(lambda: site.records.num_pending == 1)
        site.records.put("newer", bytes(65 << 20))  # more than may wait for the store
        for each in deletions:
            with pytest.raises(UnavailableError, match="the store took no record; repeat the call"):
                await each
        store.is_shut = False
        await site.control.delete_record("ended")
        with pytest.raises(NotFoundError):
            await site.control.response("ended")


async def test_an_answer_is_late_by_turns_of_our_own_loop() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    health = JournalHealth(0.4)
    assert not await health.is_in_time(never)
    with health.asking():
        time.sleep(0.6)  # noqa: ASYNC251 - our own loop stands still: one turn at most
        await asyncio.sleep(0)
        assert not health.is_degraded
        await health.trouble
        assert health.is_degraded
    health.record_answer()
    assert not health.is_degraded and not health.trouble.done()
