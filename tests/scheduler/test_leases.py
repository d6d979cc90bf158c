"""The lease in a real store: one has it, the later epoch before the earlier, and its holder over all its epochs."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.memory_leases import MemoryLeases
from scheduler_svc.journal.redis_leases import RedisLeases
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError
from scheduler_svc.leadership.lease_keeper import LeaseKeeper
from scheduler_svc.leadership.seen_leaders import SeenLeaders
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.valkey import ValkeyProcess

LONG_MS = 60_000
SHORT_MS = 40
OURS = Lease("us", "10.0.0.1:7847")
THEIRS = Lease("them", "[fd00::1]:7847")


@pytest.fixture
async def leases(valkey: ValkeyProcess) -> AsyncIterator[RedisLeases]:
    opened = RedisLeases(valkey.url, timeout_s=patient(20))
    yield opened
    await opened.close()


async def eventually(ask: Callable[[], Awaitable[object]], wanted: object) -> None:
    async with asyncio.timeout(patient(20)):
        while await ask() != wanted:  # noqa: ASYNC110 - the store has nobody to tell
            await asyncio.sleep(0.01)


async def is_held(leases: RedisLeases) -> None:
    async with asyncio.timeout(patient(20)):
        while await leases.read() is None:  # noqa: ASYNC110 - the store has nobody to tell
            await asyncio.sleep(0.01)


def at(lease: Lease, epoch: int) -> Lease:
    return Lease(lease.leader_id, lease.address, epoch)


def keeper_of(
    leases: RedisLeases,
    epoch: Callable[[], int],
    on_other: Callable[[int], None] = lambda other: None,
    lease_ms: int = 200,
) -> LeaseKeeper:
    return LeaseKeeper(leases, OURS, lease_ms=lease_ms, epoch=epoch, on_other=on_other, seen_leaders=SeenLeaders())


def leases_holder(leases: RedisLeases) -> Callable[[], Awaitable[Lease | None]]:
    async def holder() -> Lease | None:
        held = await leases.read()
        return None if held is None else held.lease

    return holder


async def test_a_lease_is_taken_by_one(leases: RedisLeases) -> None:
    assert await leases.read() is None
    assert await leases.take_lease(OURS, LONG_MS) is None
    assert await leases.take_lease(THEIRS, LONG_MS) == OURS
    held = await leases.read()
    assert held is not None
    assert held.lease == OURS
    assert 0 < held.left_ms <= LONG_MS


async def test_a_lease_ends_by_itself(leases: RedisLeases) -> None:
    await leases.take_lease(OURS, SHORT_MS)
    await eventually(lambda: leases.take_lease(THEIRS, LONG_MS), None)
    assert await leases.hold(OURS, LONG_MS) == THEIRS


async def test_the_lease_of_a_leader_that_handed_over_can_be_taken_and_no_other(leases: RedisLeases) -> None:
    await leases.hold(at(OURS, 12), LONG_MS)
    assert await leases.take_lease(THEIRS, LONG_MS, ended_epoch=1) == at(OURS, 12)
    assert await leases.take_lease(THEIRS, LONG_MS, ended_epoch=12) is None
    await leases.release(at(OURS, 12))  # too late to take it away
    assert await leases.take_lease(OURS, LONG_MS, ended_epoch=12) == THEIRS


async def test_the_later_epoch_has_the_lease_whoever_asks_last(leases: RedisLeases) -> None:
    """Holds even before the next leader has an epoch."""
    assert await leases.hold(at(OURS, 2), LONG_MS) is None
    assert await leases.hold(at(THEIRS, 0), LONG_MS) == at(OURS, 2)
    assert await leases.hold(at(THEIRS, 3), LONG_MS) is None
    assert await leases.hold(at(OURS, 2), LONG_MS) == at(THEIRS, 3)
    assert await leases.hold(at(OURS, 4), LONG_MS) is None
    await leases.release(at(OURS, 4))
    assert await leases.take_lease(at(THEIRS, 0), LONG_MS) is None
    assert await leases.hold(at(OURS, 4), LONG_MS) == at(THEIRS, 0)


async def test_epochs_of_sixteen_digits_are_told_apart(leases: RedisLeases) -> None:
    """The store compares them as floating-point numbers."""
    epoch = time.time_ns() // 1_000_000 << 11
    assert await leases.hold(at(OURS, epoch + 1), LONG_MS) is None
    assert await leases.hold(at(THEIRS, epoch), LONG_MS) == at(OURS, epoch + 1)
    assert await leases.hold(at(THEIRS, epoch + 2), LONG_MS) is None


async def test_a_holder_keeps_its_lease_over_its_epochs_and_a_loss_of_the_store(
    leases: RedisLeases, valkey: ValkeyProcess
) -> None:
    assert await leases.take_lease(OURS, LONG_MS) is None
    assert await leases.hold(at(OURS, 4), LONG_MS) is None
    assert await leases.take_lease(OURS, LONG_MS) is None
    valkey.command("FLUSHALL")
    assert await leases.hold(at(OURS, 4), LONG_MS) is None
    await leases.release(at(OURS, 5))
    assert await leases.read() is None


async def test_standbys_are_known_while_they_say_so(leases: RedisLeases) -> None:
    assert await leases.standbys(LONG_MS) == []
    await leases.announce("a:1", LONG_MS)
    await leases.announce("b:1", SHORT_MS)
    await leases.announce("c:1", LONG_MS)
    await leases.announce("c:1", 0)
    await eventually(lambda: leases.standbys(LONG_MS), ["a:1"])


async def test_a_standby_that_is_present_for_longer_than_any_is_not(leases: RedisLeases) -> None:
    """The standby announced itself before the server's clock was set back, and may be gone."""
    await leases.announce("a:1", LONG_MS)
    await leases.announce("b:1", 5 * LONG_MS)
    assert await leases.standbys(2 * LONG_MS) == ["a:1"]


async def test_a_lease_is_shortened_if_it_is_the_one_and_longer(leases: RedisLeases) -> None:
    await leases.hold(at(OURS, 4), 5 * LONG_MS)
    await leases.shorten(at(OURS, 3), LONG_MS)
    held = await leases.read()
    assert held is not None
    assert held.left_ms > LONG_MS
    await leases.shorten(at(OURS, 4), LONG_MS)
    held = await leases.read()
    assert held is not None
    assert 0 < held.left_ms <= LONG_MS
    await leases.shorten(at(OURS, 4), 2 * LONG_MS)
    held = await leases.read()
    assert held is not None
    assert held.left_ms <= LONG_MS


async def test_a_lease_that_has_lost_its_time_to_live_is_shortened(leases: RedisLeases, valkey: ValkeyProcess) -> None:
    """By a tool that copies keys without it. A standby would wait for its end for ever."""
    await leases.hold(at(THEIRS, 4), LONG_MS)
    valkey.command("PERSIST", Keys.of("default").lease)
    held = await leases.read()
    assert held is not None
    assert held.left_ms > 1000 * LONG_MS
    await leases.shorten(held.lease, LONG_MS)
    held = await leases.read()
    assert held is not None
    assert 0 < held.left_ms <= LONG_MS


async def test_what_is_no_lease_is_named_by_its_key_whoever_meets_it(
    leases: RedisLeases, valkey: ValkeyProcess
) -> None:
    key = Keys.of("default").lease
    asked: list[Callable[[], Awaitable[object]]] = [
        leases.read,
        lambda: leases.take_lease(OURS, LONG_MS),
        lambda: leases.hold(at(OURS, 4), LONG_MS),
    ]
    for text in ("nonsense", "x y z"):
        valkey.command("SET", key, text)
        for ask in asked:
            with pytest.raises(StoreConfigurationError, match=f"{re.escape(key)}, holds something else; delete it"):
                await ask()
    valkey.command("DEL", key)
    assert await leases.hold(at(OURS, 4), LONG_MS) is None


async def test_a_store_that_is_silent_is_not_waited_for(leases: RedisLeases, valkey: ValkeyProcess) -> None:
    await leases.take_lease(OURS, LONG_MS)
    impatient = RedisLeases(valkey.url)
    valkey.freeze()
    try:
        async with asyncio.timeout(patient(5)):
            with pytest.raises(StoreUnavailableError):
                await impatient.read()
    finally:
        valkey.thaw()
        await impatient.close()
    held = await leases.read()
    assert held is not None
    assert held.lease == OURS


async def test_a_keeper_renews_the_lease_through_an_outage_of_the_store(valkey: ValkeyProcess) -> None:
    leases = RedisLeases(valkey.url)
    keeping = asyncio.create_task(keeper_of(leases, lambda: 1).keep_lease())
    with capture_logs() as logs:
        await until(lambda: valkey.num_calls("EVAL") > 2)
        valkey.kill()
        await until(lambda: any(line["event"] == "lease not renewed" for line in logs))
        valkey.start()
        await until(lambda: valkey.num_calls("EVAL") > 2)
    await eventually(leases_holder(leases), at(OURS, 1))  # it may have ended between two renewals of a slow machine
    assert not keeping.done()
    keeping.cancel()
    await leases.close()


async def test_a_keeper_that_finds_another_says_so_and_goes_on(leases: RedisLeases) -> None:
    """The journal decides who leads."""
    others: list[int] = []
    epoch = 1
    keeping = asyncio.create_task(keeper_of(leases, lambda: epoch, others.append).keep_lease())
    await is_held(leases)
    await leases.hold(at(THEIRS, 2), LONG_MS)
    await until(lambda: others[:2] == [2, 2])
    assert not keeping.done()
    epoch = 3
    await eventually(leases_holder(leases), at(OURS, 3))
    keeping.cancel()


async def test_a_keeper_tells_a_new_epoch_at_once(leases: RedisLeases) -> None:
    epoch = 0
    keeper = keeper_of(leases, lambda: epoch, lease_ms=600_000)
    keeping = asyncio.create_task(keeper.keep_lease())
    await is_held(leases)
    epoch = 5
    keeper.renew_now()
    await eventually(leases_holder(leases), at(OURS, 5))
    keeping.cancel()


async def test_a_keeper_without_its_store_does_not_say_that_there_is_no_standby(
    leases: RedisLeases, valkey: ValkeyProcess
) -> None:
    keeper = keeper_of(leases, lambda: 1, lease_ms=LONG_MS)
    assert await keeper.standbys() == []
    await leases.announce("a:1", LONG_MS)
    assert await keeper.standbys() == ["a:1"]
    valkey.kill()
    with capture_logs() as logs:
        assert await keeper.standbys() is None
        assert await keeper.standbys() is None
    assert [line["event"] for line in logs] == ["standbys not known"]


async def test_a_released_lease_is_not_taken_again(leases: RedisLeases, valkey: ValkeyProcess) -> None:
    keeper = keeper_of(leases, lambda: 1, lease_ms=20)
    keeping = asyncio.create_task(keeper.keep_lease())
    await is_held(leases)
    await keeper.release()
    num_calls = valkey.num_calls("EVAL")
    await asyncio.sleep(0.05)  # several renewals would have been due
    assert valkey.num_calls("EVAL") == num_calls
    assert await leases.read() is None
    keeping.cancel()


async def test_a_lease_is_held_for_longer_through_what_keeps_the_process(
    leases: RedisLeases, valkey: ValkeyProcess
) -> None:
    keeper = keeper_of(leases, lambda: 1, lease_ms=200)
    keeping = asyncio.create_task(keeper.keep_lease())
    async with keeper.longer(5.0):
        num_calls = valkey.num_calls("EVAL")
        await until(lambda: valkey.num_calls("EVAL") > num_calls + 2)  # renewals, too
        held = await leases.read()
        assert held is not None
        assert held.left_ms > 2_000
    await eventually(lambda: is_short(leases), True)
    await keeper.release()
    async with keeper.longer(1.0):
        assert await leases.read() is None
    keeping.cancel()


async def is_short(leases: RedisLeases) -> bool:
    held = await leases.read()
    return held is not None and held.left_ms <= 200


def test_a_lease_is_read_as_it_was_written() -> None:
    lease = Lease("scheduler-1", "unix:/run/of quire/s", 12)
    assert Lease.parse(str(lease)) == lease


async def test_a_lease_inside_the_process_ends_with_its_time_or_its_release() -> None:
    leases = MemoryLeases()
    assert await leases.read() is None
    lease = Lease("us", "us:1")
    assert await leases.take_lease(lease, 60_000) is None
    held = await leases.read()
    assert held is not None
    assert held.lease == lease
    assert 50_000 < held.left_ms <= 60_000
    assert list(await leases.standbys(60_000)) == []
    assert await leases.hold(lease, 0) is None
    assert await leases.read() is None
    await leases.hold(lease, 60_000)
    await leases.release(lease)
    assert await leases.read() is None
