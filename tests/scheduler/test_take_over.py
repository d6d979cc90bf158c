"""The way from standing by to leading, on a real store: cut at every command, and contended by one who knows less."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal
from unittest.mock import AsyncMock, patch

import pytest
from structlog.testing import capture_logs

from quire.v1 import journal_pb2
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.leases import HeldLease, Lease, Leases
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.store import EntryId, FencedError, StoreUnavailableError
from scheduler_svc.leadership.take_over import Leading
from tests.chaos.proxy import Proxy
from tests.patience import patient
from tests.scheduler.journal_setup import redis_store, replay_of, running_journal, until
from tests.scheduler.renewed_leases import RenewedLeases
from tests.scheduler.standby_site import LEASE_MS, STORE_TIMEOUT_S, StandbySite, standby_site
from tests.scheduler.test_standby import admission
from tests.valkey import ValkeyProcess

Cut = Literal["command", "reply", "stall"]
STALL_S = 0.3
LEASE_KEY = "{quire:default}:lease"
LONG_LEASE_MS = 2000  # no part of a take-over takes half of it, on a slow machine either
MOST_COMMANDS = 40  # that are cut: a slow machine renews its lease again and again meanwhile


@asynccontextmanager
async def leading(site: StandbySite, ready: Callable[[], bool]) -> AsyncIterator["asyncio.Task[Leading]"]:
    """A task that leads in the end; `ready` holds before anything else happens."""
    task = asyncio.create_task(site.lead())
    try:
        await until(ready)
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled() and task.exception() is None:
            keeping = task.result().keeping_lease
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def taken_over(valkey: ValkeyProcess, cut: Cut, cut_at: int) -> int:
    """A leader is gone, and its standby's way to the store is cut at a command. Returns how many there were.

    Each is a deployment of its own, so that they do not meet.
    """
    deployment = f"{cut}-{cut_at}"
    num_commands = 0
    leader_store = RedisStore(valkey.url, deployment=deployment, timeout_s=STORE_TIMEOUT_S)
    async with (
        Proxy(str(valkey.socket_path)) as proxy,
        standby_site(f"redis://{proxy.address}", deployment=deployment, timeout_s=STORE_TIMEOUT_S) as site,
    ):

        def count(piece: bytes) -> bytes:
            nonlocal num_commands
            num_commands += 1
            if num_commands == cut_at:
                break_off(proxy, cut)
            return piece

        async with running_journal(leader_store) as leader:
            await leader.admit(admission(1))
            epoch = leader.stats.epoch
            await site.leases.hold(Lease("leader", "leader:1", epoch), 60_000)
            site.on_attempt = lambda: proxy.edit("up", count)
            async with leading(site, lambda: site.has_read(1)) as task:
                await site.leases.release(Lease("leader", "leader:1", epoch))
                led = await asyncio.wait_for(task, patient(30))
                assert led.epoch > epoch
                assert led.attempt.recovery.num_waiting == 1
    await leader_store.close()
    return num_commands


def break_off(proxy: Proxy, cut: Cut) -> None:
    match cut:
        case "command":
            proxy.cut()
        case "reply":
            proxy.drop_reply()
        case "stall":
            proxy.hold("down")
            loop = asyncio.get_running_loop()
            loop.call_later(STALL_S, proxy.cut)
            loop.call_later(STALL_S, proxy.heal)


@pytest.mark.parametrize("cut", ["command", "reply", "stall"])
async def test_a_standby_whose_way_to_the_store_breaks_at_any_command_of_its_take_over_leads_in_the_end(
    valkey: ValkeyProcess, cut: Cut
) -> None:
    num_commands = await taken_over(valkey, cut, 0)
    numbers = range(1, min(num_commands, MOST_COMMANDS) + 1)
    with capture_logs() as logs:
        done = await asyncio.gather(*(taken_over(valkey, cut, number) for number in numbers))
    # Renewals of the lease come as time passes, so that a quick one may be over before its command to be cut.
    assert sum(number <= each for number, each in zip(numbers, done, strict=True)) >= 5
    assert not [line for line in logs if "exc_info" in line or line["log_level"] in ("error", "critical")]


@asynccontextmanager
async def leader_to_come(leases: Leases) -> AsyncIterator[None]:
    """The leader of `led_until_read` has the lease already: nobody leads before it, however late it comes."""
    assert await leases.hold(Lease("leader", "leader:1"), 60_000) is None
    yield


async def led_until_read(
    valkey: ValkeyProcess, leases: Leases, ready: Callable[[], bool], *numbers: int, pin: str = ""
) -> int:
    """A leader pins a prefix, admits requests, and is gone with its lease still there. Returns its epoch."""
    store = RedisStore(valkey.url, timeout_s=STORE_TIMEOUT_S)
    async with running_journal(store) as leader:
        epoch = leader.stats.epoch
        await leases.hold(Lease("leader", "leader:1", epoch), 60_000)
        if pin:
            leader.append(pins=[journal_pb2.PinChange(name=pin)])
            await until(lambda: not leader.stats.pending)
        for number in numbers:
            await leader.admit(admission(number))
        await until(ready)
    await store.close()
    return epoch


@asynccontextmanager
async def behind_a_leader_to_come(
    valkey: ValkeyProcess, *, lease_ms: int = LEASE_MS
) -> AsyncIterator[tuple[StandbySite, "asyncio.Task[Leading]"]]:
    """A standby, and its task that leads in the end: behind the leader of `led_until_read`."""
    async with (
        standby_site(valkey.url, lease_ms=lease_ms) as site,
        leader_to_come(site.leases),
        leading(site, lambda: True) as task,
    ):
        yield site, task


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_standby_leads_instead_of_one_who_begins_without_what_it_has_read(
    valkey: ValkeyProcess, is_known: bool
) -> None:
    """The leader died as the store was emptied, and a scheduler that has just started was the first to find that."""
    async with (
        redis_store(valkey.url) as store,
        behind_a_leader_to_come(valkey, lease_ms=LONG_LEASE_MS) as (site, task),
    ):
        numbers = [1] if is_known else []
        epoch = await led_until_read(valkey, site.leases, lambda: site.hot.last.seq == 1 + is_known, *numbers)
        valkey.command("FLUSHALL")  # our loop stands still: the standby looks only when the newcomer has the lease
        valkey.command("SET", LEASE_KEY, "0 newcomer newcomer:1", "PX", "60000")
        newcomer = Journal(store, leader_id="newcomer")
        await newcomer.open(after_epoch=epoch)
        if is_known:
            led = await asyncio.wait_for(task, patient(15))
            assert led.attempt.recovery.num_waiting == 1
            with pytest.raises(FencedError):
                await newcomer.begin()
        else:
            await newcomer.begin()
            await until(lambda: site.hot.last.epoch == newcomer.stats.epoch)
            assert not task.done() and not site.attempts


async def test_a_standby_does_not_fence_another_that_says_again_what_both_have_read(valkey: ValkeyProcess) -> None:
    """Both set out to lead instead of a newcomer that knows nothing. They would fence each other for ever."""
    async with (
        redis_store(valkey.url) as newcomers_store,
        redis_store(valkey.url) as others_store,
        behind_a_leader_to_come(valkey, lease_ms=LONG_LEASE_MS) as (site, task),
    ):
        epoch = await led_until_read(valkey, site.leases, lambda: site.has_read(1), 1)
        other, outlives_journal = Journal(others_store, leader_id="other"), site.hot.outlives_journal

        async def outlive_after_the_other_has_begun() -> bool:
            if site.attempts and not other.stats.epoch:
                await other.open(after_epoch=epoch, says_all_again=True)
            return await outlives_journal()

        with capture_logs() as logs, patch.object(site.hot, "outlives_journal", outlive_after_the_other_has_begun):
            valkey.command("FLUSHALL")
            valkey.command("SET", LEASE_KEY, "0 newcomer newcomer:1", "PX", "60000")
            await Journal(newcomers_store, leader_id="newcomer").open(after_epoch=epoch)
            await until(lambda: any("the take-over failed" in line["event"] for line in logs))
        assert site.hot.forgotten_since_s is None
        await other.begin()
        assert not task.done()


async def test_a_take_over_that_fails_again_and_again_is_logged_once_for_each_reason(valkey: ValkeyProcess) -> None:
    valkey.command("LPUSH", "{quire:default}:journal", "of another program")
    async with standby_site(valkey.url) as site:
        with capture_logs() as logs:
            async with leading(site, lambda: len(site.attempts) >= 2) as task:
                valkey.command("DEL", "{quire:default}:journal")
                await asyncio.wait_for(task, patient(15))
        said = [line["reason"] for line in logs if "the take-over failed" in line["event"]]
        assert len(said) == 1
        assert "did not write" in said[0]


async def test_who_was_not_fast_enough_leaves_the_lease_at_once(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, standby_site(valkey.url, lease_ms=LONG_LEASE_MS) as site:
        site.stands_by = False
        async with leading(site, lambda: any(each.journal.stats.epoch for each in site.attempts)) as task:
            await until(lambda: valkey.command("EXISTS", LEASE_KEY) == b":1\r\n")
            newcomer = Journal(store, leader_id="newcomer")
            await newcomer.open(after_epoch=site.attempts[0].journal.stats.epoch)
            with pytest.raises(FencedError):
                await asyncio.wait_for(task, patient(15))
            assert valkey.command("EXISTS", LEASE_KEY) == b":0\r\n"


async def test_a_standby_that_says_it_says_all_again_does_so_though_another_one_was_faster(
    valkey: ValkeyProcess,
) -> None:
    """Readers forget what was before: the journal was emptied when the standby looked, and not when it began."""
    async with redis_store(valkey.url) as store, behind_a_leader_to_come(valkey) as (site, task):
        with patch.object(site.hot, "outlives_journal", AsyncMock(return_value=True)):
            epoch = await led_until_read(valkey, site.leases, lambda: site.has_read(1), 1)
            await site.leases.release(Lease("leader", "leader:1", epoch))
            led = await asyncio.wait_for(task, patient(15))
        assert led.attempt.recovery.num_waiting == 1
        replay = await replay_of(store)
        assert [number for number, request in replay.requests.items() if request.finish is None] == [1]


@pytest.mark.parametrize("is_seen", [True, False])
async def test_an_emptied_journal_waits_longer_for_a_leader_that_was_seen(valkey: ValkeyProcess, is_seen: bool) -> None:
    """The leader was cut off from the store as that was emptied, and no other process knows its requests."""
    leader_lease = Lease("leader", "leader:1", 1)
    async with redis_store(valkey.url) as store, standby_site(valkey.url) as site:
        if is_seen:
            await site.leases.hold(leader_lease, 60_000)
        with capture_logs() as logs:
            async with leading(site, lambda: True) as task:
                if is_seen:
                    await until(lambda: any(line["event"] == "leader seen" for line in logs))
                    valkey.command("FLUSHALL")
                await until(lambda: any("may know more" in line["event"] for line in logs))
                (waiting,) = [line for line in logs if "may know more" in line["event"]]
                assert waiting["seconds"] == LEASE_MS / 1000 * (8 if is_seen else 1)
                if is_seen:
                    back = Journal(store, leader_id="leader")
                    await back.open(after_epoch=waiting["epoch"])
                    await back.begin()
                    await site.leases.hold(replace(leader_lease, epoch=back.stats.epoch), 60_000)
                    await until(lambda: any("the take-over failed" in line["event"] for line in logs))
                    assert not task.done()
                else:
                    await asyncio.wait_for(task, patient(15))


async def test_nobody_is_ready_in_an_unsettled_journal_while_the_store_takes_no_writes(valkey: ValkeyProcess) -> None:
    """The store was emptied, and then was full: the leader that knows more could not begin in it again."""
    is_full = True

    async def hold(lease: Lease, life_ms: int) -> Lease | None:
        if is_full:
            raise StoreUnavailableError("OOM command not allowed")
        return await RenewedLeases.hold(site.leases, lease, life_ms)

    async with standby_site(valkey.url) as site:
        site.stands_by = False
        with capture_logs() as logs, patch.object(site.leases, "hold", hold):
            async with leading(site, lambda: any("may know more" in line["event"] for line in logs)) as task:
                await asyncio.sleep(4 * LEASE_MS / 1000)
                assert not task.done()
                is_full = False
                await asyncio.wait_for(task, patient(15))


async def test_who_leads_next_waits_longer_in_a_slow_store_for_a_leader_that_may_know_more(
    valkey: ValkeyProcess,
) -> None:
    """Commands of that one take long: some are needed to find that the store was emptied, and to begin in it again."""
    delay_s = 0.15

    async def look_slowly(first: EntryId, *, is_urgent: bool = False) -> EntryId | None:
        await asyncio.sleep(delay_s)
        return await RedisStore.first_entry_id(site.store, first, is_urgent=is_urgent)

    async with standby_site(valkey.url) as site:
        site.stands_by = False
        with capture_logs() as logs, patch.object(site.store, "first_entry_id", look_slowly):
            async with leading(site, lambda: True) as task:
                await asyncio.wait_for(task, patient(15))
        waits_s = [line["seconds"] for line in logs if "may know more" in line["event"]]
        assert waits_s[0] == LEASE_MS / 1000
        assert waits_s[-1] > LEASE_MS / 1000 + 8 * delay_s


async def test_one_that_is_about_to_lead_in_an_empty_journal_is_not_fenced_by_another_newcomer(
    valkey: ValkeyProcess,
) -> None:
    async with redis_store(valkey.url) as store, standby_site(valkey.url) as site:
        site.stands_by = False
        other = Journal(store, leader_id="other")
        await site.leases.hold(Lease("other", "other:1"), 60_000)
        await other.open()
        num_looks = 0

        async def count_looks() -> HeldLease | None:
            nonlocal num_looks
            num_looks += 1
            return await RenewedLeases.read(site.leases)

        with patch.object(site.leases, "read", count_looks):
            async with leading(site, lambda: num_looks >= 2) as task:
                assert not task.done()
                await other.begin()
                led = await asyncio.wait_for(task, patient(15))
                assert led.epoch > other.stats.epoch


async def test_two_that_have_read_the_same_do_not_contend_for_a_journal_that_is_lost(valkey: ValkeyProcess) -> None:
    async with (
        standby_site(valkey.url, name="one", lease_ms=LONG_LEASE_MS) as one,
        standby_site(valkey.url, name="two", lease_ms=LONG_LEASE_MS) as two,
        leader_to_come(one.leases),
        leading(one, lambda: True) as first,
        leading(two, lambda: True) as second,
    ):
        await led_until_read(valkey, one.leases, lambda: one.has_read(1) and two.has_read(1), 1)
        valkey.command("FLUSHALL")
        done, _ = await asyncio.wait({first, second}, return_when="FIRST_COMPLETED", timeout=patient(15))
        (task,) = done
        assert task.result().attempt.recovery.num_waiting == 1
        assert len(one.attempts) + len(two.attempts) == 1


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_new_leader_needs_pins_in_the_journal_before_the_requests_behind_them(
    valkey: ValkeyProcess, is_lost: bool
) -> None:
    """A leader that counts requests alone trims the pins, and does not say them again where the store has lost them."""
    async with redis_store(valkey.url) as store, behind_a_leader_to_come(valkey) as (site, task):
        epoch = await led_until_read(valkey, site.leases, lambda: site.has_read(1), 1, pin="system")
        if is_lost:
            valkey.command("DEL", "{quire:default}:journal")
        await site.leases.release(Lease("leader", "leader:1", epoch))
        journal = (await asyncio.wait_for(task, patient(15))).attempt.journal
        (pin,) = (await replay_of(store)).pins.values()
        assert pin.change.name == "system"
        assert (pin.entry_id.epoch > epoch) == is_lost
        assert (journal.stats.num_needed, journal.stats.oldest_needed) == (2, pin.entry_id)
