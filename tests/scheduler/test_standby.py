"""A standby reads the journal while another leads, keeps no more of it than it needs, and leads when it may."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import pytest
from structlog.testing import capture_logs

from common.arrays import pack_int32
from quire.v1 import inference_pb2
from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.leases import MOST_LONGER_MS, Lease
from scheduler_svc.journal.redis_leases import RedisLeases
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.redis_tail import RedisTail
from scheduler_svc.journal.store import JOURNAL_START, EntryId, StoredEntry
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.leadership.take_over import open_journal
from scheduler_svc.requests.recovery.recovery import JournalContents, Recovery
from tests.patience import patient
from tests.scheduler.journal_setup import put_records, redis_store, running_journal, until
from tests.scheduler.renewed_leases import RenewedLeases, ReturningLeases
from tests.valkey import ValkeyProcess

LEASE_MS = 400
LONG_MS = 60_000
TTL_S = 60
US = Lease("us", "us:1")
LEADER = Lease("leader", "leader:1", 1)


def admission(number: int, request_id: str = "") -> pb.Admission:
    request = inference_pb2.GenerateRequest(request_id=request_id or f"r{number}")
    return pb.Admission(
        sequence=number, request=request, prompt_token_ids=pack_int32([1]), model_fingerprint="f", arrived_unix_ns=1
    )


def finish(number: int, finished_unix_ns: int | None = None) -> pb.Finish:
    return pb.Finish(
        sequence=number,
        state=inference_pb2.REQUEST_STATE_FINISHED,
        finished_unix_ns=time.time_ns() if finished_unix_ns is None else finished_unix_ns,
    )


def end(journal: Journal, *finishes: pb.Finish) -> None:
    journal.append(sequences=(), tokens=(), finishes=finishes, on_durable=lambda: None)


def new_hot(
    valkey: ValkeyProcess, store: RedisStore, forget_every_s: float = 0.0, record_ttl_s: int = TTL_S
) -> HotJournal:
    return HotJournal(RedisTail(valkey.url), store, record_ttl_s=record_ttl_s, forget_every_s=forget_every_s)


@asynccontextmanager
async def following(hot: HotJournal) -> AsyncIterator[None]:
    task = asyncio.create_task(hot.follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def hot_on(valkey: ValkeyProcess) -> AsyncIterator[tuple[HotJournal, RedisStore, Journal]]:
    """A journal with its leader, and one that follows it when it is told to."""
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        hot = new_hot(valkey, store)
        yield hot, store, journal
        await hot.close()


async def test_what_the_leader_writes_is_known_and_a_new_leader_reads_only_the_rest(valkey: ValkeyProcess) -> None:
    async with hot_on(valkey) as (hot, store, journal):
        async with following(hot):
            await journal.admit(admission(1))
            journal.append(sequences=[1, 1], tokens=[7, 8], on_durable=lambda: None)
            await until(lambda: bool(hot.replay.requests) and len(hot.replay.requests[1].samples[0].token_ids) == 2)
        journal.append(sequences=[1], tokens=[9], on_durable=lambda: None)
        next_journal = Journal(store, leader_id="next")
        await until(lambda: journal.stats.pending == 0)
        replay, from_id, is_whole, _ = await hot.begun(await next_journal.open())
        assert is_whole
        rest = [each async for each in next_journal.read(from_id)]
        assert len(rest) == 1
        replay.apply(*rest[0])
        assert replay.requests[1].samples[0].token_ids == [7, 8, 9]
        await hot.close()
        assert not hot.replay.requests  # it has let go of them


async def test_what_has_ended_is_forgotten_once_its_record_is_there(valkey: ValkeyProcess) -> None:
    async with hot_on(valkey) as (hot, store, journal), following(hot):
        for number in (1, 2, 3, 4):
            await journal.admit(admission(number))
        await put_records(store, {"r1": b"x"})
        end(journal, finish(1), finish(2), finish(3))
        await until(lambda: set(hot.replay.requests) == {2, 3, 4})  # 2 and 3 have no record yet, 4 no end
        await put_records(store, {"r2": b"x", "r3": b"x"})
        journal.append(sequences=[4], tokens=[1], on_durable=lambda: None)
        await until(lambda: set(hot.replay.requests) == {4})


async def test_what_was_deleted_is_forgotten_though_it_has_no_record(valkey: ValkeyProcess) -> None:
    async with hot_on(valkey) as (hot, _, journal), following(hot):
        for number in (1, 2, 3):
            await journal.admit(admission(number))
        end(journal, finish(1), finish(2))
        await until(lambda: set(hot.replay.requests) == {1, 2, 3})
        journal.append(deletions=["r1"])
        await until(lambda: set(hot.replay.requests) == {2, 3})


async def test_an_end_without_a_record_is_kept_however_long_ago_it_was_by_the_leaders_clock(
    valkey: ValkeyProcess,
) -> None:
    """A leader's time of day may be hours behind ours, and it may die before it has written the record."""
    async with hot_on(valkey) as (hot, store, journal), following(hot):
        for number in (1, 2, 3):
            await journal.admit(admission(number))
        await put_records(store, {"r2": b"x"})
        end(journal, finish(1, finished_unix_ns=5), finish(2))
        await until(lambda: set(hot.replay.requests) == {1, 3})


async def test_an_end_without_a_record_is_forgotten_once_the_record_would_have_expired(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        hot = new_hot(valkey, store, record_ttl_s=0)
        async with following(hot):
            await journal.admit(admission(1))
            await journal.admit(admission(2))
            end(journal, finish(1))
            await until(lambda: set(hot.replay.requests) == {2})
        await hot.close()


async def test_an_end_that_tells_whose_the_request_id_is_is_not_forgotten(valkey: ValkeyProcess) -> None:
    """The client of the first was told to come back, and did: the first must never become the owner again."""
    async with hot_on(valkey) as (hot, store, journal), following(hot):
        await journal.admit(admission(1, "same"))
        await journal.admit(admission(2, "same"))
        await journal.admit(admission(3))
        await put_records(store, {"same": b"x", "r3": b"x"})
        end(journal, finish(2), finish(3))
        await until(lambda: set(hot.replay.requests) == {1, 2})
        assert [each.number for each in hot.replay.owners()] == [2]


async def test_a_journal_that_was_trimmed_before_it_was_read_is_read_anew(valkey: ValkeyProcess) -> None:
    async with hot_on(valkey) as (hot, store, journal):
        async with following(hot):
            await journal.admit(admission(1))
            await until(lambda: 1 in hot.replay.requests)
        await journal.admit(admission(2))  # while the standby is frozen
        end(journal, finish(1))
        await until(lambda: journal.stats.pending == 0)
        await journal.admit(admission(3))
        last = await store.last_entry_id()
        assert last is not None
        valkey.command("XTRIM", "{quire:default}:journal", "MINID", str(last))
        with capture_logs() as logs:
            async with following(hot):
                await until(lambda: 3 in hot.replay.requests)
        assert 1 not in hot.replay.requests  # its end was in what is gone
        assert [line["event"] for line in logs] == ["journal trimmed before it was read; reading it from its start"]


async def test_a_damaged_entry_is_left_to_the_recovery_of_who_leads(valkey: ValkeyProcess) -> None:
    async with hot_on(valkey) as (hot, _, journal):
        await journal.admit(admission(1))
        bad = f"{journal.stats.epoch + 1}-0"
        valkey.command("XADD", "{quire:default}:journal", bad, "e", "x", "c", "00000000")
        with capture_logs() as logs:
            await hot.follow()
        assert f"{bad} is damaged" in logs[-1]["reason"]
        assert hot.last == JOURNAL_START


@pytest.fixture
async def leases(valkey: ValkeyProcess) -> AsyncIterator[RedisLeases]:
    opened = RenewedLeases(valkey.url)
    yield opened
    await opened.close()


@asynccontextmanager
async def waiting_for_its_turn(standby: Standby, hot: HotJournal) -> AsyncIterator["asyncio.Task[bool]"]:
    """The wait of a standby, which ends with its journal."""
    task = asyncio.create_task(standby.wait())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await hot.close()


@asynccontextmanager
async def standing_by(
    valkey: ValkeyProcess, leases: RedisLeases, store: RedisStore, lease_ms: int = LEASE_MS
) -> AsyncIterator[tuple["asyncio.Task[bool]", list[str | None]]]:
    """A standby that waits, and the leaders that it has told of."""
    leaders: list[str | None] = []
    hot = new_hot(valkey, store)
    standby = Standby(leases, US, hot, lease_ms=lease_ms, on_leader=leaders.append)
    async with waiting_for_its_turn(standby, hot) as task:
        yield task, leaders


async def until_announced(leases: RedisLeases) -> None:
    async with asyncio.timeout(patient(20)):
        while await leases.standbys(10 * LONG_MS) != [US.address]:  # noqa: ASYNC110 - the store is what is looked at
            await asyncio.sleep(0.01)


async def test_the_first_leads_after_a_lease_in_which_nobody_came(valkey: ValkeyProcess, leases: RedisLeases) -> None:
    async with redis_store(valkey.url) as store, standing_by(valkey, leases, store) as (waiting, leaders):
        begun_s = time.monotonic()
        await asyncio.wait_for(waiting, patient(20))
        assert time.monotonic() - begun_s >= LEASE_MS / 1000
        held = await leases.read()
        assert held is not None
        assert held.lease == US
        assert leaders == []
        assert await leases.standbys(60_000) == []


async def test_a_standby_waits_while_the_lease_is_renewed_and_leads_when_it_ends(
    valkey: ValkeyProcess, leases: RedisLeases
) -> None:
    async with redis_store(valkey.url) as store:
        await leases.hold(LEADER, 60_000)
        async with standing_by(valkey, leases, store) as (waiting, leaders):
            await until(lambda: leaders == [LEADER.address])
            num_looks = valkey.num_calls("PTTL")
            await until(lambda: valkey.num_calls("PTTL") > num_looks + 2)
            assert not waiting.done()
            await until_announced(leases)
            assert await leases.hold(LEADER, 1) is None
            await asyncio.wait_for(waiting, patient(20))
            assert leaders == [LEADER.address, None]


class HeldTail(RedisTail):
    """Tail of a journal that takes long to read: it gets no further than `may_read` allows."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.may_read = asyncio.Event()

    async def read_after(self, last: EntryId, limit: int) -> Sequence[StoredEntry]:
        await self.may_read.wait()
        return await super().read_after(last, limit)


@asynccontextmanager
async def standing_by_held(
    valkey: ValkeyProcess, leases: RedisLeases, store: RedisStore
) -> AsyncIterator[tuple[HeldTail, Standby]]:
    """A standby that cannot read the journal yet."""
    tail = HeldTail(valkey.url)
    hot = HotJournal(tail, store, record_ttl_s=TTL_S)
    standby = Standby(leases, US, hot, lease_ms=LONG_MS, on_leader=lambda leader: None)
    async with waiting_for_its_turn(standby, hot):
        yield tail, standby


async def test_a_leader_hears_of_a_standby_once_that_has_read_the_journal(
    valkey: ValkeyProcess, leases: RedisLeases
) -> None:
    """Regression: it handed over at once, and every stream stood still until the journal was read."""
    await leases.hold(LEADER, LONG_MS)
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        await journal.admit(admission(1))
        async with standing_by_held(valkey, leases, store) as (tail, standby):
            await until(lambda: standby.seen_leaders.has_any)
            await asyncio.sleep(0.05)  # it would have been announced by then
            assert await leases.standbys(10 * LONG_MS) == []
            tail.may_read.set()
            await until_announced(leases)


async def test_a_standby_that_has_not_read_the_journal_announces_itself_where_nobody_leads(
    valkey: ValkeyProcess, leases: RedisLeases
) -> None:
    """Others that do not see it would come for the same shard, too."""
    async with redis_store(valkey.url) as store, standing_by_held(valkey, leases, store):
        await until_announced(leases)


async def test_the_journal_is_asked_anew_when_another_leads_though_an_answer_was_lost(
    valkey: ValkeyProcess, leases: RedisLeases
) -> None:
    """Entries of that leader may show that it does not know what the standby has read."""
    num_reads, is_lost = 0, True

    class LosesAnswers(RedisTail):
        async def read_after(self, last: EntryId, limit: int) -> Sequence[StoredEntry]:
            nonlocal num_reads
            num_reads += 1
            if is_lost:
                await asyncio.Event().wait()
            return await super().read_after(last, limit)

    async def until_looked_again() -> None:
        num_looks = valkey.num_calls("PTTL")
        await until(lambda: valkey.num_calls("PTTL") > num_looks + 2)

    await leases.hold(LEADER, 60_000)
    async with redis_store(valkey.url) as store, running_journal(store) as leader:
        await leader.admit(admission(1))
        hot = HotJournal(LosesAnswers(valkey.url), store, record_ttl_s=TTL_S)
        standby = Standby(leases, US, hot, lease_ms=LEASE_MS, on_leader=lambda leader: None)
        async with waiting_for_its_turn(standby, hot):
            await until(lambda: standby.seen_leaders.has_any and num_reads > 0)
            await until_looked_again()
            num_reads_before, is_lost = num_reads, False
            await until_looked_again()
            assert num_reads == num_reads_before  # asked anew once for a leader, not at each look
            await leases.hold(replace(LEADER, epoch=LEADER.epoch + 1), 60_000)
            await until(lambda: 1 in hot.replay.requests)


async def test_a_lease_that_a_clock_set_back_has_made_long_ends_in_time(valkey: ValkeyProcess) -> None:
    """A leader that died right after its renewal, when the store's time of day went hours back."""
    leases = RedisLeases(valkey.url, timeout_s=patient(20))
    async with redis_store(valkey.url) as store:
        await leases.hold(LEADER, 5 * 3_600_000)
        async with standing_by(valkey, leases, store) as (waiting, leaders):
            await asyncio.wait_for(waiting, patient(20))
            assert leaders == [LEADER.address, None]
    await leases.close()


async def test_a_standby_leads_as_soon_as_the_leader_has_written_its_end(
    valkey: ValkeyProcess, leases: RedisLeases
) -> None:
    """The leader's lease is still there, and would be for a minute."""
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        await leases.hold(replace(LEADER, epoch=journal.stats.epoch), 60_000)
        async with standing_by(valkey, leases, store) as (waiting, leaders):
            await until(lambda: leaders == [LEADER.address])
            assert await journal.hand_over()
            await asyncio.wait_for(waiting, patient(20))
        held = await leases.read()
        assert held is not None
        assert held.lease == US


async def test_a_standby_leads_as_soon_as_it_reads_that_a_lease_which_is_gone_was_handed_over(
    valkey: ValkeyProcess, leases: RedisLeases
) -> None:
    """The standby saw the missing lease before it read the reason, and would have waited a minute."""
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        leader = replace(LEADER, epoch=journal.stats.epoch)
        await leases.hold(leader, 60_000)
        async with standing_by(valkey, leases, store, lease_ms=60_000) as (waiting, leaders):
            await until(lambda: leaders == [LEADER.address])
            with capture_logs() as logs:
                await leases.release(leader)
                await until(lambda: any("the lease is free" in line["event"] for line in logs))
                assert await journal.hand_over()
                await asyncio.wait_for(waiting, patient(20))
            assert logs[-1] == {"event": "lease taken", "log_level": "info", "handed_over": True}


async def test_after_a_time_without_the_store_a_standby_waits_one_more_lease(valkey: ValkeyProcess) -> None:
    """The leader is fine: it could only not renew, and does so as soon as the standby has found its lease gone."""
    leases = ReturningLeases(valkey.url, LEADER, left_ms=1)
    async with redis_store(valkey.url) as store:
        await leases.hold(LEADER, 60_000)
        async with standing_by(valkey, leases, store) as (waiting, leaders):
            await until(lambda: leaders == [LEADER.address])
            with capture_logs() as logs:
                valkey.kill()
                await until(lambda: any(line["event"] == "the lease cannot be read" for line in logs))
                valkey.start()
                valkey.command("DEL", "{quire:default}:lease")  # it ended meanwhile
                await until(lambda: any(line["event"].startswith("the lease is free") for line in logs))
                await asyncio.wait([waiting], timeout=2 * LEASE_MS / 1000)
            assert not waiting.done()
            assert leaders == [LEADER.address]
    await leases.close()


async def test_nothing_follows_the_end_of_an_epoch(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        accepted = journal.admit(admission(1))
        journal.append(sequences=[1], tokens=[5], on_durable=lambda: None)
        handing_over = asyncio.create_task(journal.hand_over())
        await asyncio.sleep(0)
        late = journal.admit(admission(2))
        journal.append(sequences=[1], tokens=[6], on_durable=lambda: None)
        assert await handing_over
        await accepted
        assert late.exception() is not None
        hot = new_hot(valkey, store)
        async with following(hot):
            await until(lambda: hot.ended_epoch == journal.stats.epoch)
        assert hot.replay.requests[1].samples[0].token_ids == [5]
        assert set(hot.replay.requests) == {1}
        await hot.close()


async def test_a_leader_that_hands_over_before_its_epoch_was_seen_is_followed_at_once(
    valkey: ValkeyProcess, leases: RedisLeases
) -> None:
    """A leader may lead for less than the time between two looks at its lease."""
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        beginning = Lease("test", "leader:1")
        await leases.hold(beginning, 60_000)
        async with standing_by(valkey, leases, store, lease_ms=60_000) as (waiting, leaders):
            await until(lambda: leaders == [beginning.address])
            await leases.release(replace(beginning, epoch=journal.stats.epoch))
            assert await journal.hand_over()
            with capture_logs() as logs:
                await asyncio.wait_for(waiting, patient(20))
            assert logs[-1] == {"event": "lease taken", "log_level": "info", "handed_over": True}


async def test_the_end_of_one_leader_is_none_of_another_that_has_no_epoch_yet(
    valkey: ValkeyProcess, leases: RedisLeases
) -> None:
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        other = Lease("other", "other:1")
        await leases.hold(other, 60_000)
        async with standing_by(valkey, leases, store) as (waiting, leaders):
            assert await journal.hand_over()
            num_reads = valkey.num_calls("PTTL")
            await until(lambda: valkey.num_calls("PTTL") > num_reads + 2)
            assert not waiting.done()
            assert leaders == [other.address]


async def test_a_lease_that_a_leader_holds_for_longer_on_purpose_is_not_shortened(valkey: ValkeyProcess) -> None:
    leases = RedisLeases(valkey.url, timeout_s=patient(20))
    async with redis_store(valkey.url) as store:
        await leases.hold(LEADER, LEASE_MS + MOST_LONGER_MS)
        num_reads = valkey.num_calls("PTTL")
        async with standing_by(valkey, leases, store):
            await until(lambda: valkey.num_calls("PTTL") > num_reads + 5)
        held = await leases.read()
    await leases.close()
    assert held is not None
    assert held.left_ms > MOST_LONGER_MS / 2


@pytest.mark.parametrize("failing", ["announcing", "following"])
async def test_a_standby_ends_with_what_its_announcing_or_following_ended_with(
    valkey: ValkeyProcess, leases: RedisLeases, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Else it would stand by unannounced, or unread, for ever, and nobody would know."""

    announce = leases.announce

    async def fail(*args: Any) -> None:
        if args[-1] == 0:  # it withdraws
            return await announce(*args)
        raise RuntimeError(failing)

    await leases.hold(LEADER, 60_000)
    if failing == "announcing":
        monkeypatch.setattr(leases, "announce", fail)
    else:
        monkeypatch.setattr(HotJournal, "follow", fail)
    async with redis_store(valkey.url) as store, standing_by(valkey, leases, store) as (waiting, _):
        await until(waiting.done)
        assert str(waiting.exception()) == failing


async def test_what_a_standby_has_followed_counts_as_written_for_the_first_trim_when_it_leads(
    valkey: ValkeyProcess,
) -> None:
    recovery = create_autospec(Recovery, instance=True)
    recovery.read.return_value = JournalContents.SETTLED
    async with hot_on(valkey) as (hot, store, journal):
        for number in range(20):
            await journal.admit(admission(number))
        async with following(hot):
            await until(lambda: hot.num_entries == 22)  # with LeaderStart and LeaderReady
        assert valkey.num_calls("xtrim") == 0
        successor = Journal(store, leader_id="next", trim_every=24)
        await open_journal(successor, recovery, store, hot, after_epoch=0)
        running = asyncio.create_task(successor.run())
        await successor.admit(admission(99))
        await until(lambda: valkey.num_calls("xtrim") == 1)
        await successor.close()
        await running
