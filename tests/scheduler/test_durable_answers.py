"""Ends are in the journal before a client is told of them."""

import asyncio
from collections.abc import Awaitable

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.prefixes.pin_journal import PinJournal
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import entries_of, until
from tests.scheduler.mortal_sites import Client, Lives, speaking_worker
from tests.scheduler.pinning import pin, unpin
from tests.scheduler.refusals import code_of
from tests.scheduler.serving_site import Site, counting, running_site

LONG = 200  # tokens: more than are made until the test has what it waits for


async def cancelled(site: Site) -> pb.RequestState.ValueType:
    return (await site.inference.Cancel(pb.CancelRequest(request_id="r"))).state


async def assert_unavailable(call: Awaitable[object]) -> None:
    assert await code_of(call) is grpc.StatusCode.UNAVAILABLE


async def ended_in_journal(store: GatedStore) -> list[pb.RequestState.ValueType]:
    return [finish.state for _, entry in await entries_of(store) for finish in entry.finishes]


async def test_a_cancellation_is_answered_once_it_is_durable() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        running = asyncio.create_task(site.run(counting(10, LONG, "r")))
        await until(lambda: "r" in site.engine.live)
        store.may_append.clear()
        cancelling = asyncio.create_task(cancelled(site))
        await until(lambda: store.num_waiting == 1)
        again = asyncio.create_task(cancelled(site))
        await site.inference.GetStats(pb.GetStatsRequest())  # there and back
        assert not cancelling.done() and not again.done()
        store.may_append.set()
        assert await cancelling == await again == pb.REQUEST_STATE_CANCELLED
        assert await ended_in_journal(store) == [pb.REQUEST_STATE_CANCELLED]
        with pytest.raises(grpc.aio.AioRpcError):
            await running
        worker.may_answer.set()
        await site.idle()


async def test_a_cancellation_that_the_store_does_not_take_in_time_is_said_to_be_unsure() -> None:
    store = GatedStore()
    async with running_site(store, admission_timeout_s=0.3) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        running = asyncio.create_task(site.run(counting(10, LONG, "r")))
        await until(lambda: "r" in site.engine.live)
        store.may_append.clear()
        await assert_unavailable(cancelled(site))
        store.may_append.set()
        await until(lambda: not site.engine.live)
        assert await cancelled(site) == pb.REQUEST_STATE_CANCELLED
        with pytest.raises(grpc.aio.AioRpcError):
            await running
        worker.may_answer.set()
        await site.idle()


async def test_a_cancellation_of_a_request_that_waits_for_its_model_is_answered_once_it_is_durable() -> None:
    store = GatedStore()
    lives = Lives(store)
    lives.workers.append(speaking_worker())
    try:
        site = await lives.begin()
        await lives.add_workers()
        lives.workers[0].silence_after(4)
        client = Client(counting(10, LONG, "r", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
        await client.come(site)
        await until(lambda: bool(client.seen.samples) and len(client.seen.token_ids[0]) == 4)
        await lives.die()
        site = await lives.begin()
        assert site.recovery.num_waiting == 1
        store.may_append.clear()
        cancelling = asyncio.create_task(cancelled(site))
        await until(lambda: store.num_waiting == 1)
        again = asyncio.create_task(cancelled(site))
        await site.inference.GetStats(pb.GetStatsRequest())
        assert not cancelling.done() and not again.done()
        store.may_append.set()
        assert await cancelling == await again == await cancelled(site) == pb.REQUEST_STATE_CANCELLED
        assert pb.REQUEST_STATE_CANCELLED in await ended_in_journal(store)
    finally:
        store.may_append.set()
        await lives.close()


async def test_who_was_not_told_whether_a_pin_is_gone_is_told_so_when_asking_again() -> None:
    store = GatedStore()
    async with running_site(store, late_s=0.4) as site:
        await site.add_worker()
        await pin(site)
        store.may_append.clear()
        await assert_unavailable(unpin(site))
        await assert_unavailable(unpin(site))  # it is not durable yet
        store.may_append.set()
        await until(lambda: not site.journal.stats.degraded and not site.journal.stats.pending)
        await unpin(site)
        assert await code_of(unpin(site)) is grpc.StatusCode.NOT_FOUND


async def test_two_who_unpin_at_once_are_both_told_when_it_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    until_gone, asked = PinJournal.until_gone, []

    async def noted(pins: PinJournal, tenant: str, name: str) -> bool:
        asked.append(name)
        return await until_gone(pins, tenant, name)

    monkeypatch.setattr(PinJournal, "until_gone", noted)
    store = GatedStore()
    async with running_site(store) as site:
        await site.add_worker()
        await pin(site)
        store.may_append.clear()
        both = [asyncio.create_task(unpin(site)) for _ in range(2)]
        await until(lambda: len(asked) == 2 and store.num_waiting == 1)
        await site.inference.GetStats(pb.GetStatsRequest())
        assert not any(each.done() for each in both)
        store.may_append.set()
        await asyncio.gather(*both)
        assert await code_of(unpin(site)) is grpc.StatusCode.NOT_FOUND
