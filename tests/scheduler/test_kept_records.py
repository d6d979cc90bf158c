"""Records of requests: the annotation in them, through every change of leaders, and their deletion."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from quire.errors import NotFoundError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import Record, RecordLimits
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.mortal_sites import Client, Lives, lives_on
from tests.scheduler.refusals import code_of
from tests.scheduler.sample_outputs import record_of
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

NOTE = b"\x00 any bytes \xff"
LONG = 200


@asynccontextmanager
async def lives_of(store: MemoryStore | None = None) -> AsyncIterator[Lives]:
    async with lives_on(store or MemoryStore()) as lives:
        await lives.begin()
        await lives.add_workers()
        yield lives


async def delete(site: Site, request_id: str = "r") -> None:
    await site.inference.DeleteRecord(pb.DeleteRecordRequest(request_id=request_id))


async def deletion_under_way(store: GatedStore, site: Site) -> "asyncio.Task[None]":
    """Deletion of the record of a request that has run, whose journal entry is held by the store."""
    await site.run(counting(10, 4, "r"))
    await until(lambda: not site.records.num_pending)
    store.may_append.clear()
    deleting = asyncio.create_task(site.control.delete_record("r"))
    await until(lambda: store.num_waiting == 1)
    return deleting


async def look_up(site: Site, request_id: str = "r") -> pb.GetRequestResponse:
    return await site.inference.GetRequest(pb.GetRequestRequest(request_id=request_id))


async def attach(site: Site, request_id: str = "r") -> list[pb.GenerateResponse]:
    return [each async for each in site.inference.Attach(pb.AttachRequest(request_id=request_id))]


async def next_life(lives: Lives, *, with_workers: bool = True) -> Site:
    await lives.die()
    site = await lives.begin()
    if with_workers:
        await lives.add_workers()
    return site


async def test_an_annotation_is_told_while_its_request_runs_waits_and_has_ended_under_every_leader() -> None:
    async with lives_of() as lives:
        worker = lives.workers[0]
        worker.silence_after(4)
        client = Client(counting(10, LONG, "r", annotation=NOTE, on_disconnect=pb.ON_DISCONNECT_CONTINUE))
        await client.come(lives.site)
        await until(lambda: bool(client.seen.samples) and len(client.seen.token_ids[0]) == 4)
        running = await record_of(lives.site, "r")
        assert (running.annotation, running.state) == (NOTE, pb.REQUEST_STATE_RUNNING)
        await next_life(lives, with_workers=False)
        waiting = await record_of(lives.site, "r")
        assert (waiting.annotation, waiting.state) == (NOTE, pb.REQUEST_STATE_WAITING)
        worker.speak_again()
        await lives.add_workers()
        await client.come(lives.site)
        await until(lambda: client.is_done)
        await next_life(lives)
        ended = await record_of(lives.site, "r")
        assert (ended.annotation, ended.state) == (NOTE, pb.REQUEST_STATE_FINISHED)
        [accepted, *_] = await attach(lives.site)
        assert accepted.accepted.created_unix_ns == ended.created_unix_ns == running.created_unix_ns


async def test_another_annotation_is_another_request() -> None:
    async with lives_of() as lives:
        site = lives.site
        await site.run(counting(10, 4, "r", annotation=NOTE))
        assert (await site.run(counting(10, 4, "r", annotation=NOTE)))[0].accepted.attached
        assert await code_of(site.run(counting(10, 4, "r"))) is grpc.StatusCode.ALREADY_EXISTS


async def test_a_deleted_record_is_unknown_under_every_leader_and_its_id_stays_taken() -> None:
    async with lives_of() as lives:
        await lives.site.run(counting(10, 4, "r", annotation=NOTE))
        await lives.site.run(counting(10, 4, "other", tenant="acme"))
        await delete(lives.site)
        for _ in range(2):
            site = lives.site
            for call in (look_up(site), attach(site), delete(site)):
                assert await code_of(call) is grpc.StatusCode.NOT_FOUND
            with pytest.raises(grpc.aio.AioRpcError, match="whose record was deleted") as taken:
                await site.run(counting(10, 4, "r", annotation=NOTE))
            assert taken.value.code() is grpc.StatusCode.ALREADY_EXISTS
            assert (await look_up(site, "other")).state == pb.REQUEST_STATE_FINISHED
            await next_life(lives)


async def test_a_record_is_not_made_again_once_that_of_its_deletion_has_expired() -> None:
    """Regression: the journal still had the request and its end, so the next leader made the record again."""
    store = MemoryStore()
    async with lives_of(store) as lives:
        for request_id in ("r", "other"):
            await lives.site.run(counting(10, 4, request_id))
        await delete(lives.site)
        await until(lambda: not lives.site.records.num_pending)
        store._records.clear()
        site = await next_life(lives)
        assert await code_of(look_up(site)) is grpc.StatusCode.NOT_FOUND
        assert (await look_up(site, "other")).state == pb.REQUEST_STATE_FINISHED
        assert len(await site.run(counting(10, 4, "r"))) > 1  # its id is free again
        assert (await look_up(await next_life(lives))).state == pb.REQUEST_STATE_FINISHED


async def test_a_deletion_that_was_not_journaled_leaves_the_record_to_the_next_leader() -> None:
    """The call is repeated there, and its answer is as good as if there had been no other leader before."""
    store = GatedStore()
    async with lives_of(store) as lives:
        deleting = await deletion_under_way(store, lives.site)
        assert (await look_up(lives.site)).state == pb.REQUEST_STATE_FINISHED and not deleting.done()
        deleting.cancel()
        await lives.die()
        store.may_append.set()
        site = await lives.begin()
        assert (await look_up(site)).state == pb.REQUEST_STATE_FINISHED
        await delete(site)
        assert await code_of(look_up(site)) is grpc.StatusCode.NOT_FOUND


async def test_a_request_that_took_the_id_of_a_record_that_expired_while_it_was_deleted_goes_on() -> None:
    store = GatedStore()
    async with lives_of(store) as lives:
        site = lives.site
        deleting = await deletion_under_way(store, site)
        store._records.clear()
        running = asyncio.create_task(site.run(counting(20, 4, "r")))
        await until(lambda: "r" in site.control.submissions)
        store.may_append.set()
        await deleting
        assert tokens_in(await running) == [21, 22, 23, 24]
        assert (await look_up(site)).samples[0].token_ids == [21, 22, 23, 24]
        assert (await look_up(await next_life(lives))).samples[0].token_ids == [21, 22, 23, 24]


@pytest.mark.parametrize("first", [10, 20], ids=["same", "other"])
async def test_a_record_is_deleted_though_its_request_is_sent_again_meanwhile(first: int) -> None:
    """A retry takes the id for no other request: it is answered from the record, or refused."""
    store = GatedStore()
    async with lives_of(store) as lives:
        site = lives.site
        deleting = await deletion_under_way(store, site)
        store.may_read.clear()
        again = asyncio.create_task(site.run(counting(first, 4, "r")))
        await until(lambda: store.num_reading == 1)
        store.may_append.set()
        await until(lambda: not site.journal.stats.pending)
        store.may_read.set()
        await asyncio.gather(again, return_exceptions=True)
        await deleting
        assert await code_of(look_up(site)) is grpc.StatusCode.NOT_FOUND
        assert await code_of(look_up(await next_life(lives))) is grpc.StatusCode.NOT_FOUND


async def test_a_request_that_has_ended_is_sent_again_and_read_though_no_worker_has_come() -> None:
    async with lives_of() as lives:
        await lives.site.run(counting(10, 4, "r"))
        site = await next_life(lives, with_workers=False)
        again = await site.run(counting(10, 4, "r"))
        assert again[0].accepted.attached and tokens_in(again) == [11, 12, 13, 14]
        assert await code_of(site.run(counting(20, 4, "r"))) is grpc.StatusCode.ALREADY_EXISTS
        for unknown in ("other", ""):
            assert await code_of(site.run(counting(10, 4, unknown))) is grpc.StatusCode.UNAVAILABLE


class GatedRecords(MemoryStore):
    """Store that has records no sooner than it may, and keeps whose they are and when their requests ended."""

    def __init__(self) -> None:
        super().__init__()
        self.may_put = asyncio.Event()
        self.may_put.set()
        self.put: list[tuple[str, str, int]] = []

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        await self.may_put.wait()
        self.put += [(each.request_id, each.tenant, each.ended_unix_ns) for each in records]
        return await super().put_records(records, limits)


async def test_a_deletion_is_durable_when_it_is_answered_and_the_record_is_no_younger_for_it() -> None:
    store = GatedRecords()
    async with running_site(store) as site:
        await site.add_worker()
        await site.run(counting(10, 4, "r", tenant="acme"))
        await until(lambda: len(store.put) == 1)
        store.may_put.clear()
        deleting = asyncio.create_task(site.control.delete_record("r"))
        await asyncio.sleep(0.01)
        assert not deleting.done()
        store.may_put.set()
        await deleting
        ended, deleted = store.put
        assert ended == deleted and ended[:2] == ("r", "acme")


async def test_a_repeated_deletion_is_answered_when_the_first_is_durable() -> None:
    """Regression: it found the deletion that was on its way, and said that there is no such request."""
    store = GatedRecords()
    async with running_site(store) as site:
        await site.add_worker()
        await site.run(counting(10, 4, "r"))
        await until(lambda: len(store.put) == 1)
        store.may_put.clear()
        deletions = [asyncio.create_task(site.control.delete_record("r")) for _ in range(2)]
        await asyncio.sleep(0.01)
        deletions.append(asyncio.create_task(site.control.delete_record("r")))
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in deletions)
        store.may_put.set()
        await asyncio.gather(*deletions)
        assert len(store.put) == 2
        with pytest.raises(NotFoundError):
            await site.control.delete_record("r")


async def test_only_requests_that_have_ended_have_a_record_to_delete() -> None:
    async with lives_of() as lives:
        lives.workers[0].silence_after(4)
        client = Client(counting(10, LONG, "r", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
        await client.come(lives.site)
        assert await code_of(delete(lives.site)) is grpc.StatusCode.FAILED_PRECONDITION
        assert await code_of(delete(lives.site, "unknown")) is grpc.StatusCode.NOT_FOUND
        site = await next_life(lives, with_workers=False)
        assert await code_of(delete(site)) is grpc.StatusCode.FAILED_PRECONDITION
        await lives.add_workers()
        await site.inference.Cancel(pb.CancelRequest(request_id="r"))
        await delete(site)
        assert await code_of(look_up(site)) is grpc.StatusCode.NOT_FOUND
