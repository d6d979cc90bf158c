"""The store is frozen, killed, full or emptied under a scheduler: what runs waits, and what comes is refused."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.journal_health import JournalHealth
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import redis_store, until
from tests.scheduler.pinning import retry_delay_s
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in
from tests.valkey import ValkeyProcess


@asynccontextmanager
async def site_on(valkey: ValkeyProcess, **options: Any) -> AsyncIterator[Site]:
    async with redis_store(valkey.url) as store, running_site(store, late_s=0.4, **options) as site:
        await site.add_worker(num_blocks=64)
        yield site


async def refused(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_delay_s(caught.value) == 1.0
    return caught.value


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
        assert changes == [True, False]
        await site.idle()


async def test_decoding_goes_on_while_the_store_is_away_and_delivery_waits(valkey: ValkeyProcess) -> None:
    async with site_on(valkey) as site:
        messages = aiter(site.inference.Generate(counting(10, 300, "runs")))
        await anext(messages)
        await anext(messages)
        valkey.kill()
        await until(lambda: site.journal.stats.degraded)
        await until(lambda: site.engine.output_tokens == 300)  # to its end, of which nobody hears
        assert "runs" in site.engine.live
        valkey.start()
        rest = [message async for message in messages]
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


async def test_an_emptied_store_has_all_that_lives_and_its_epoch_again(valkey: ValkeyProcess) -> None:
    async with site_on(valkey, probe_every_s=0.05) as site:
        messages = aiter(site.inference.Generate(counting(10, 300, "runs")))
        await anext(messages)
        valkey.command("FLUSHALL")
        rest = [message async for message in messages]
        assert rest[-1].finished.state == pb.REQUEST_STATE_FINISHED
        assert site.journal.stats.num_recreated == 1
        assert await site.store.next_epoch() == 2


async def test_a_record_that_is_not_read_in_time_is_a_refusal_and_brings_the_trouble_to_light() -> None:
    store = GatedStore()
    async with running_site(store, late_s=0.4) as site:
        await site.add_worker()
        store.may_read.clear()
        error = await refused(site.run(counting(10, 3, "named")))
        assert "does not answer" in (error.details() or "")
        store.may_read.set()
        assert tokens_in(await site.run(counting(10, 3, "named"))) == [11, 12, 13]


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
    health.note_answer()
    assert not health.is_degraded and not health.trouble.done()
