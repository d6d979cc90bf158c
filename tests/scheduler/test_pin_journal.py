"""Removed pins: who unpins is told once the journal has it, and who was not told may ask again for a while."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quire.errors import UnavailableError
from scheduler_svc.requests.prefixes import pin_journal
from scheduler_svc.requests.prefixes.pin_journal import PinJournal
from scheduler_svc.requests.prefixes.prefix_pin import PrefixPin
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import replay_of, running_journal, until


def pin_of(name: str = "system") -> PrefixPin:
    return PrefixPin(name=name, tenant="acme", cache_salt="", token_ids=[1, 2], fingerprint="m-1")


@asynccontextmanager
async def pins_on(store: GatedStore) -> AsyncIterator[PinJournal]:
    async with running_journal(store) as journal:
        yield PinJournal(journal)


async def pinned_in(store: GatedStore) -> set[tuple[str, str]]:
    """Pins that a new leader finds."""
    return set((await replay_of(store)).pins)


async def test_a_pin_is_needed_in_the_journal_until_its_removal_is_durable() -> None:
    store = GatedStore()
    async with running_journal(store) as journal:
        pins, prefix = PinJournal(journal), pin_of()
        pins.write(prefix)
        await pins.until(prefix.durable)
        assert await pinned_in(store) == {("acme", "system")}
        assert journal.stats.num_needed == 1
        store.may_append.clear()
        pins.remove_pin(prefix)
        asking = asyncio.create_task(pins.until_gone("acme", "system"))
        await until(lambda: store.num_waiting == 1)
        assert not asking.done() and journal.stats.num_needed == 1
        store.may_append.set()
        assert await asking
        assert (await pinned_in(store), journal.stats.num_needed) == (set(), 0)
        assert not await pins.until_gone("acme", "system")


async def test_a_removal_that_nobody_doubts_is_forgotten_when_it_is_durable() -> None:
    store = GatedStore()
    async with pins_on(store) as pins:
        prefix = pin_of()
        pins.write(prefix)
        pins.remove_pin(prefix)
        await prefix.gone.wait()
        assert not await pins.until_gone("acme", "system")
        assert not await pins.until_gone("other", "system")


async def test_a_removal_in_doubt_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_journal, "TIMEOUT_S", 0.01)
    store = GatedStore()
    async with pins_on(store) as pins:
        prefix = pin_of()
        pins.write(prefix)
        await prefix.durable.wait()
        store.may_append.clear()
        pins.remove_pin(prefix)
        num_tasks = len(asyncio.all_tasks())
        for _ in range(3):
            with pytest.raises(UnavailableError, match="see what became of it"):
                await pins.until_gone("acme", "system")
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)  # nobody waits on
        store.may_append.set()
        await prefix.gone.wait()
        await asyncio.sleep(0)
        assert await pins.until_gone("acme", "system")  # told now
        assert not await pins.until_gone("acme", "system")


async def test_a_removal_in_doubt_that_nobody_asks_about_is_forgotten_and_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pin_journal, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(pin_journal, "UNSURE_S", 0.01)
    store = GatedStore()
    async with pins_on(store) as pins:
        first, second = pin_of(), pin_of()
        pins.write(first)
        await first.durable.wait()
        store.may_append.clear()
        pins.remove_pin(first)
        with pytest.raises(UnavailableError):
            await pins.until_gone("acme", "system")
        store.may_append.set()
        await first.gone.wait()
        store.may_append.clear()
        pins.write(second)
        pins.remove_pin(second)
        await asyncio.sleep(0.05)  # the first is forgotten, if it can be
        asking = asyncio.create_task(pins.until_gone("acme", "system"))
        await asyncio.sleep(0)
        store.may_append.set()
        assert await asking  # the second's, which was being removed
        assert not await pins.until_gone("acme", "system")


async def test_a_removal_in_doubt_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_journal, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(pin_journal, "UNSURE_S", 0.01)
    store = GatedStore()
    async with pins_on(store) as pins:
        prefix = pin_of()
        pins.write(prefix)
        await prefix.durable.wait()
        store.may_append.clear()
        pins.remove_pin(prefix)
        with pytest.raises(UnavailableError):
            await pins.until_gone("acme", "system")
        store.may_append.set()
        await prefix.gone.wait()
        forgotten_s = asyncio.get_running_loop().time() + 0.02
        await until(lambda: asyncio.get_running_loop().time() > forgotten_s)
        assert not await pins.until_gone("acme", "system")
