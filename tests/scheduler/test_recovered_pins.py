"""Pins are in the journal: they outlive the scheduler, trimming and loss of the journal, until they are taken back."""

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import pytest

from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.mortal_sites import Lives, SlowStore, lives_on
from tests.scheduler.pinning import (
    PREFIX,
    beginning,
    cached_tokens,
    num_pinned_blocks,
    pin,
    pin_request,
    pinned,
    refusal,
    unpin,
)
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import counting, running_site
from tests.scheduler.test_restatements import LossyStore


@pytest.fixture
async def lives() -> AsyncIterator[Lives]:
    async with lives_on(LossyStore(random.Random(1)), restate_entries=5, trim_every=2, probe_every_s=0.02) as made:
        yield made


async def test_pins_outlive_the_scheduler_until_they_are_taken_back(lives: Lives) -> None:
    site = await lives.begin()
    await lives.add_workers()
    await pin(site, cache_salt="pepper", tenant="acme")
    await pin(site, range(2000, 2020), "other", tenant="acme")
    await lives.die()

    site = await lives.begin()
    assert await pinned(site, "acme") == {"system": [], "other": []}
    await lives.add_workers()
    await until(lambda: num_pinned_blocks(site) == {"w1": 3})
    assert await pinned(site, "acme") == {"system": ["w1"], "other": ["w1"]}
    assert await cached_tokens(site, beginning(PREFIX, cache_salt="pepper", tenant="acme")) == 32
    assert not (await pin(site, cache_salt="pepper", tenant="acme")).created
    await unpin(site, "other", tenant="acme")
    await lives.die()

    site = await lives.begin()
    assert await pinned(site, "acme") == {"system": []}
    await unpin(site, tenant="acme")
    assert site.journal.stats.num_needed == 0
    await lives.die()
    site = await lives.begin()
    assert await pinned(site, "acme") == {}


async def test_pins_of_an_earlier_scheduler_are_needed_until_they_are_forgotten(lives: Lives) -> None:
    site = await lives.begin()
    await lives.add_workers()
    await pin(site)
    await lives.die()
    site = await lives.begin()
    assert site.journal.stats.num_needed == 1
    site.recovery.forget_pins()
    assert site.journal.stats.num_needed == 0


async def test_pins_are_restated_when_the_journal_is_trimmed_and_when_it_is_lost(lives: Lives) -> None:
    site = await lives.begin()
    await lives.add_workers()
    await pin(site)
    for i in range(10):
        await site.run(counting(10 * i, 3))
    stats = site.journal.stats
    assert stats.num_restated and stats.oldest_needed is not None and stats.oldest_needed.seq > 5
    store = lives.store
    assert isinstance(store, LossyStore)
    store.lose(0)
    await until(lambda: site.journal.stats.num_recreated == 1 and not site.journal.stats.degraded)
    await lives.die()
    site = await lives.begin()
    await lives.add_workers()
    await until(lambda: num_pinned_blocks(site) == {"w1": 2})


async def test_a_pin_waits_for_a_worker_of_its_model(lives: Lives) -> None:
    site = await lives.begin()
    await lives.add_workers()
    await pin(site)
    await lives.die()
    worker = lives.workers.pop()
    lives.workers.append(ScriptedWorker("other"))
    lives.workers[0].description.model.fingerprint = "other-1"
    site = await lives.begin()
    await lives.add_workers()
    assert await pinned(site) == {"system": []}
    assert (await pin(site, range(3000, 3040), "new")).created
    await lives.die()
    await lives.workers.pop().stop()
    lives.workers.append(worker)
    site = await lives.begin()
    await lives.add_workers()
    await until(lambda: num_pinned_blocks(site) == {"w1": 2})
    assert await pinned(site) == {"system": ["w1"], "new": []}


async def test_a_pin_is_told_of_when_it_is_durable_and_so_is_its_end() -> None:
    store = GatedStore()
    async with running_site(store, late_s=0.4) as site:
        await site.add_worker()
        store.may_append.clear()
        code, message = await refusal(site, pin_request())
        assert code is grpc.StatusCode.UNAVAILABLE and "see what became of it" in message
        store.may_append.set()
        await until(lambda: not site.journal.stats.degraded)
        assert not (await pin(site)).created
        store.may_append.clear()
        unpinning = asyncio.create_task(unpin(site))
        await until(lambda: store.num_waiting > 0)
        assert not unpinning.done()
        store.may_append.set()
        await unpinning
        await until(lambda: not site.journal.stats.num_needed)


async def test_one_that_is_unpinned_while_the_store_is_away_stays_so() -> None:
    store = SlowStore(random.Random(2))
    async with lives_on(store) as lives:
        site = await lives.begin()
        await lives.add_workers()
        await pin(site)
        await unpin(site)
        await pin(site)
        await unpin(site)
        assert not site.journal.stats.num_needed
        await lives.die()
        assert await pinned(await lives.begin()) == {}
