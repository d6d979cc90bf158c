"""The lease in a real store: one has it, whoever lost it is told, and an epoch that was taken settles every doubt."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.open_store import open_leases, open_store
from scheduler_svc.journal.redis_leases import RedisLeases
from scheduler_svc.journal.store import FencedError, StoreUnavailableError
from scheduler_svc.leadership.lease_keeper import LeaseKeeper
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.valkey import ValkeyProcess

LONG_MS = 60_000
SHORT_MS = 40
OURS = Lease("us", "10.0.0.1:7847")
THEIRS = Lease("them", "[fd00::1]:7847")


@pytest.fixture
async def leases(valkey: ValkeyProcess) -> AsyncIterator[RedisLeases]:
    opened = RedisLeases(valkey.url)
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


async def test_a_lease_is_taken_by_one(leases: RedisLeases) -> None:
    assert await leases.read() is None
    assert await leases.take(OURS, LONG_MS) is None
    assert await leases.take(THEIRS, LONG_MS) == OURS
    held = await leases.read()
    assert held is not None
    assert held.lease == OURS
    assert 0 < held.left_ms <= LONG_MS


async def test_a_lease_ends_by_itself(leases: RedisLeases) -> None:
    await leases.take(OURS, SHORT_MS)
    await eventually(lambda: leases.take(THEIRS, LONG_MS), None)
    assert await leases.renew(OURS, LONG_MS) == f"it is held by {THEIRS}"


async def test_the_lease_of_a_leader_that_handed_over_can_be_taken_and_no_other(leases: RedisLeases) -> None:
    await leases.claim(at(OURS, 12), LONG_MS)
    assert await leases.take(THEIRS, LONG_MS, ended_epoch=1) == at(OURS, 12)
    assert await leases.take(THEIRS, LONG_MS, ended_epoch=12) is None
    await leases.release(at(OURS, 12))  # too late to take it away
    assert await leases.take(OURS, LONG_MS, ended_epoch=12) == THEIRS


async def test_the_later_epoch_has_the_lease_whoever_claims_last(leases: RedisLeases) -> None:
    assert await leases.claim(at(OURS, 2), LONG_MS) == 2
    assert await leases.claim(at(THEIRS, 3), LONG_MS) == 3
    assert await leases.claim(at(OURS, 2), LONG_MS) == 3
    assert await leases.renew(at(OURS, 2), LONG_MS) == f"it is held by {at(THEIRS, 3)}"


async def test_an_absent_lease_is_taken_again_unless_a_later_epoch_was_taken(
    leases: RedisLeases, valkey: ValkeyProcess
) -> None:
    lease = at(OURS, 4)
    await leases.claim(lease, LONG_MS)
    await leases.release(lease)
    assert await leases.renew(lease, LONG_MS) == ""
    valkey.command("FLUSHALL")
    assert await leases.renew(lease, LONG_MS) == ""
    await leases.release(lease)
    valkey.command("SET", "{quire:default}:epoch", "5")
    assert await leases.renew(lease, LONG_MS) == "epoch 5 was taken"
    assert await leases.read() is None


async def test_a_claim_lifts_the_count_of_epochs_that_the_store_had_lost(valkey: ValkeyProcess) -> None:
    """The journal's ids had said that epoch 6 is the next."""
    leases = open_leases(valkey.url, deployment="other", lease_ms=LONG_MS)
    store = await open_store(valkey.url, deployment="other")
    await leases.claim(at(OURS, 6), LONG_MS)
    assert await store.next_epoch() == 7
    await leases.close()
    await store.close()


async def test_standbys_are_known_while_they_say_so(leases: RedisLeases) -> None:
    assert await leases.standbys() == []
    await leases.announce("a:1", LONG_MS)
    await leases.announce("b:1", SHORT_MS)
    await leases.announce("c:1", LONG_MS)
    await leases.announce("c:1", 0)
    await eventually(leases.standbys, ["a:1"])


async def test_a_store_that_is_silent_is_not_waited_for(leases: RedisLeases, valkey: ValkeyProcess) -> None:
    await leases.take(OURS, LONG_MS)
    valkey.freeze()
    try:
        async with asyncio.timeout(patient(5)):
            with pytest.raises(StoreUnavailableError):
                await leases.read()
    finally:
        valkey.thaw()
    held = await leases.read()
    assert held is not None
    assert held.lease == OURS


async def test_a_keeper_renews_the_lease_through_an_outage_of_the_store(valkey: ValkeyProcess) -> None:
    leases = RedisLeases(valkey.url)
    keeping = asyncio.create_task(LeaseKeeper(leases, at(OURS, 1), lease_ms=200).keep())
    with capture_logs() as logs:
        await until(lambda: valkey.num_calls("EVAL") > 2)
        valkey.kill()
        await until(lambda: any(line["event"] == "lease not renewed" for line in logs))
        valkey.start()
        await until(lambda: valkey.num_calls("EVAL") > 2)
    held = await leases.read()
    assert held is not None
    assert held.lease == at(OURS, 1)
    assert not keeping.done()
    keeping.cancel()
    await leases.close()


async def test_a_keeper_ends_when_another_leads(leases: RedisLeases) -> None:
    keeper = LeaseKeeper(leases, at(OURS, 1), lease_ms=200)
    keeping = asyncio.create_task(keeper.keep())
    await is_held(leases)
    await leases.claim(at(THEIRS, 2), LONG_MS)
    with pytest.raises(FencedError, match=r"lost the lease of epoch 1.*them"):
        await keeping


async def test_a_keeper_that_was_followed_before_its_first_claim_ends(leases: RedisLeases) -> None:
    await leases.claim(at(THEIRS, 2), LONG_MS)
    with pytest.raises(FencedError, match="epoch 2 was taken"):
        await LeaseKeeper(leases, at(OURS, 1), lease_ms=200).keep()


async def test_a_released_lease_is_not_taken_again(leases: RedisLeases, valkey: ValkeyProcess) -> None:
    keeper = LeaseKeeper(leases, at(OURS, 1), lease_ms=20)
    keeping = asyncio.create_task(keeper.keep())
    await is_held(leases)
    await keeper.release()
    num_calls = valkey.num_calls("EVAL")
    await asyncio.sleep(0.05)  # several renewals would have been due
    assert valkey.num_calls("EVAL") == num_calls
    assert await leases.read() is None
    keeping.cancel()
