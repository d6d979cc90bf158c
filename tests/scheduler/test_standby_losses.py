"""Losses of the store while a standby follows: a live leader keeps leading; without one no read entry is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from structlog.testing import capture_logs

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.redis_tail import RedisTail
from scheduler_svc.journal.store import (
    JOURNAL_START,
    EntryId,
    StoredEntry,
    StoreUnavailableError,
)
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.requests.recovery.journal_reading import replay_journal
from scheduler_svc.requests.recovery.journal_replay import JournalReplay
from tests.patience import patient
from tests.scheduler.journal_setup import Writer, redis_store, replay_of, running_journal, until
from tests.scheduler.renewed_leases import RenewedLeases, ReturningLeases
from tests.scheduler.test_standby import (
    LEADER,
    LEASE_MS,
    TTL_S,
    US,
    admission,
    following,
    new_hot,
    standing_by,
)
from tests.valkey import ValkeyProcess


@pytest.fixture
async def store(valkey: ValkeyProcess) -> AsyncIterator[RedisStore]:
    async with redis_store(valkey.url) as opened:
        yield opened


async def lose(valkey: ValkeyProcess, store: RedisStore, num_kept: int) -> None:
    """Drop all but the first entries, the lease and the epoch counter; every connection breaks."""
    entries = await store.read_entries(JOURNAL_START, 1000)
    valkey.command("FLUSHALL")
    for each in entries[:num_kept]:
        assert each.payload is not None
        await store.append(each.entry_id, each.payload, create=True)
    valkey.command("CLIENT", "KILL", "TYPE", "normal")


async def hot_after_loss(valkey: ValkeyProcess, store: RedisStore) -> HotJournal:
    """Read a request in a journal that is lost then, with all else."""
    hot = new_hot(valkey, store)
    async with running_journal(store) as leader, following(hot):
        await leader.admit(admission(1))
        await until(lambda: 1 in hot.replay.requests)
        assert hot.forgotten_since_s is None
    await lose(valkey, store, 0)
    return hot


async def read_two(store: RedisStore, hot: HotJournal) -> int:
    """Have a leader admit two requests, and the standby read them; return the leader's epoch."""
    async with running_journal(store) as leader, following(hot):
        await leader.admit(admission(1))
        await leader.admit(admission(2))
        await until(lambda: 2 in hot.replay.requests)
        return leader.stats.epoch


async def until_read_again(valkey: ValkeyProcess) -> None:
    """Wait until the standby has seen all that the journal has."""
    num_reads = valkey.num_calls("XREAD")
    await until(lambda: valkey.num_calls("XREAD") > num_reads + 2)


def tokens(replay: JournalReplay, number: int) -> list[int]:
    return replay.requests[number].samples[0].token_ids


async def test_a_leader_whose_lease_is_lost_with_the_journal_keeps_leading(
    valkey: ValkeyProcess, store: RedisStore
) -> None:
    leases = ReturningLeases(valkey.url, LEADER)
    await leases.hold(LEADER, 60_000)
    async with standing_by(valkey, leases, store) as (waiting, leaders):
        await until(lambda: leaders == [LEADER.address])
        with capture_logs() as logs:
            valkey.command("FLUSHALL")
            await until(lambda: any(line["event"].startswith("the lease is free") for line in logs))
        await asyncio.wait([waiting], timeout=2 * LEASE_MS / 1000)
        assert not waiting.done()
        assert leaders == [LEADER.address]
        leases.returns = False
        valkey.command("FLUSHALL")
        await asyncio.wait_for(waiting, patient(20))  # nobody takes it again
    await leases.close()


async def test_an_older_leaders_end_does_not_shorten_the_patience_with_the_present_one(
    valkey: ValkeyProcess, store: RedisStore
) -> None:
    leases = RenewedLeases(valkey.url)
    async with running_journal(store) as journal:
        assert await journal.hand_over()
    present = Lease(LEADER.leader_id, LEADER.address, 2)
    await leases.hold(present, 60_000)
    async with standing_by(valkey, leases, store) as (waiting, leaders):
        await until(lambda: leaders == [present.address])
        with capture_logs() as logs:
            valkey.command("DEL", "{quire:default}:lease")
            await until(lambda: any(line["event"].startswith("the lease is free") for line in logs))
        assert not waiting.done()
    await leases.close()


@pytest.mark.parametrize("num_kept", [0, 3])
async def test_what_a_standby_has_read_and_the_store_has_lost_is_said_again_before_anything_else(
    valkey: ValkeyProcess, store: RedisStore, num_kept: int
) -> None:
    hot = new_hot(valkey, store)
    async with running_journal(store) as leader, following(hot):
        await leader.admit(admission(1))
        await leader.admit(admission(2))
        for token in (7, 8, 9):
            leader.append(sequences=[1, 2], tokens=[token, token], on_durable=lambda: None)
            await until(lambda: leader.stats.pending == 0)
        await until(lambda: 2 in hot.replay.requests and len(tokens(hot.replay, 2)) == 3)
    await lose(valkey, store, num_kept)
    async with redis_store(valkey.url) as next_store:
        journal = Journal(next_store, leader_id="next")
        epoch = await journal.open(after_epoch=hot.last.epoch)
        assert epoch > 1  # no worker has seen it
        replay, from_id, is_whole, _ = await hot.begun(epoch)
        assert not is_whole
        assert not [each async for each in journal.read(from_id)]
        for each in replay.requests.values():
            journal.keep_entry(each.number, each.entry_id, each.restate)
        journal.rewrite_on_begin()
        writer = Writer(journal)
        writer.append()
        running = asyncio.create_task(journal.run())
        await writer.all_durable()
        found = await replay_of(next_store)
        assert (tokens(found, 1), tokens(found, 2)) == ([7, 8, 9, 0], [7, 8, 9])
        assert await next_store.next_epoch() > epoch
        await journal.close()
        await running
    await hot.close()


async def test_what_a_leader_could_not_say_again_before_its_death_is_known_to_its_standby(
    valkey: ValkeyProcess, store: RedisStore
) -> None:
    hot = new_hot(valkey, store)
    start = pb.JournalEntry(leader_start=pb.LeaderStart()).SerializeToString()
    both = pb.JournalEntry(admissions=[admission(1), admission(2)])
    await store.append(EntryId(1, 0), start, create=True)
    await store.append(EntryId(1, 1), both.SerializeToString())
    async with following(hot):
        await until(lambda: 2 in hot.replay.requests)
    valkey.command("FLUSHALL")
    await store.append(EntryId(1, 7), start, create=True)  # it had written more, which is lost, too
    said = pb.JournalEntry(restatements=[pb.Restatement(admission=admission(1))])
    await store.append(EntryId(1, 8), said.SerializeToString())
    journal = Journal(store, leader_id="next")
    replay, from_id, is_whole, _ = await hot.begun(await journal.open(after_epoch=1))
    async for entry_id, entry in journal.read(from_id):
        replay.apply(entry_id, entry)
    assert not is_whole
    assert set(replay.requests) == {1, 2}
    await hot.close()


async def test_a_loss_behind_which_another_leader_went_on_is_forgotten(
    valkey: ValkeyProcess, store: RedisStore
) -> None:
    """Entries that the new leader did not find never happened."""
    hot = new_hot(valkey, store)
    async with running_journal(store) as leader, following(hot):
        await leader.admit(admission(1))
        leader.append(sequences=[1], tokens=[7], on_durable=lambda: None)
        await until(lambda: 1 in hot.replay.requests and tokens(hot.replay, 1) == [7])
    await lose(valkey, store, 3)
    async with redis_store(valkey.url) as next_store, running_journal(next_store) as other:
        other.append(sequences=[1], tokens=[8], on_durable=lambda: None)
        async with following(hot):
            await until(lambda: hot.last == EntryId(other.stats.epoch, 2))
        assert tokens(hot.replay, 1) == [8]
    await hot.close()


async def begin_below(store: RedisStore, *, is_ready: bool) -> EntryId:
    """Begin to lead in an emptied journal, with an earlier clock, and so epoch, than the leader before."""
    start = pb.JournalEntry(leader_start=pb.LeaderStart(leader_id="newcomer"))
    await store.append(EntryId(1, 0), start.SerializeToString(), create=True)
    if is_ready:
        ready = pb.JournalEntry(leader_ready=pb.LeaderReady())
        await store.append(EntryId(1, 1), ready.SerializeToString())
    return EntryId(1, int(is_ready))


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_leader_that_begins_below_what_was_read_is_noticed(
    valkey: ValkeyProcess, store: RedisStore, is_ready: bool
) -> None:
    """No entry of that leader continues what was read, which the standby keeps until that leader serves."""
    hot = await hot_after_loss(valkey, store)
    async with redis_store(valkey.url) as next_store:
        last = await begin_below(next_store, is_ready=is_ready)
        async with following(hot):
            if is_ready:
                await until(lambda: hot.last == last)
                assert not hot.replay.requests
            else:
                await until(lambda: hot.forgotten_since_s is not None)
                assert 1 in hot.replay.requests
    await hot.close()


@pytest.mark.parametrize("is_ready", [False, True])
async def test_who_begins_behind_a_leader_that_began_below_and_was_ready_reads_what_that_one_wrote(
    valkey: ValkeyProcess, store: RedisStore, is_ready: bool
) -> None:
    """Between the decision to lead and the new epoch time may pass, in which the other accepts requests."""
    hot = await hot_after_loss(valkey, store)
    async with redis_store(valkey.url) as next_store:
        await begin_below(next_store, is_ready=is_ready)
        journal = Journal(next_store, leader_id="standby")
        replay, from_id, is_whole, _ = await hot.begun(await journal.open(after_epoch=hot.last.epoch))
    assert is_whole == is_ready
    assert (from_id == JOURNAL_START) == is_ready
    assert (1 in replay.requests) != is_ready
    await hot.close()


class LostJournal(HotJournal):
    """Journal whose entries the store has lost long ago, and no leader has said again."""

    async def follow(self) -> None:
        self.forgotten_since_s = time.monotonic() - 1000
        await asyncio.Event().wait()


async def test_who_has_just_taken_the_lease_has_time_to_say_again_what_the_store_has_lost(
    valkey: ValkeyProcess, store: RedisStore
) -> None:
    """Whoever took the lease may know all that the standby knows, however long nobody could say it."""
    leases, hot = RenewedLeases(valkey.url), LostJournal(RedisTail(valkey.url), store, record_ttl_s=TTL_S)
    leaders: list[str | None] = []
    waiting = asyncio.create_task(Standby(leases, US, hot, lease_ms=60_000, on_leader=leaders.append).wait())
    holders = [LEADER, Lease("next", "next:1")]
    for holder in holders:
        assert await leases.hold(holder, 60_000) is None
        for _ in range(4):
            num_looks = valkey.num_calls("PTTL")
            hot.has_ended.set()  # it looks again at once
            await until(lambda: valkey.num_calls("PTTL") > num_looks)  # noqa: B023 - awaited at once
        assert not waiting.done()
        await leases.release(holder)
    assert leaders == [holder.address for holder in holders]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await hot.close()
    await leases.close()


async def test_an_emptied_journal_that_nobody_begins_again_is_noticed(valkey: ValkeyProcess, store: RedisStore) -> None:
    """Whoever has the lease then may be a leader that was followed without notice, and knows nothing."""
    hot = await hot_after_loss(valkey, store)
    async with following(hot):
        await until(lambda: hot.forgotten_since_s is not None)
        async with redis_store(valkey.url) as next_store, running_journal(next_store):
            await until(lambda: hot.forgotten_since_s is None)
    await hot.close()


@pytest.mark.parametrize("num_restated", [0, 1])
async def test_a_leader_behind_one_that_could_not_restate_everything_is_noticed_until_it_is_ready(
    valkey: ValkeyProcess, store: RedisStore, num_restated: int
) -> None:
    """A standby that read the journal before its loss knows all; that leader may know nothing of it."""
    hot = new_hot(valkey, store)
    epoch = await read_two(store, hot)
    await lose(valkey, store, 0)
    async with redis_store(valkey.url) as next_store:
        restating = Journal(next_store, leader_id="restating")
        first = await restating.open(after_epoch=epoch, says_all_again=True)
        restated = pb.JournalEntry(restatements=[pb.Restatement(admission=admission(1))])
        for seq in range(1, num_restated + 1):
            await next_store.append(EntryId(first, seq), restated.SerializeToString())
        async with following(hot):
            await until(lambda: hot.last == EntryId(first, num_restated))
            assert hot.forgotten_since_s is None  # it goes on, as far as is known
            newcomer = Journal(next_store, leader_id="newcomer")
            await newcomer.open()
            await until(lambda: hot.forgotten_since_s is not None)
            assert {1, 2} <= hot.replay.requests.keys()
            await newcomer.begin()
            await until(lambda: hot.forgotten_since_s is None)
    await hot.close()


@pytest.mark.parametrize("has_newcomer", [False, True])
async def test_a_journal_that_was_trimmed_to_a_restatement_is_none_that_was_emptied(
    valkey: ValkeyProcess, store: RedisStore, has_newcomer: bool
) -> None:
    hot = new_hot(valkey, store)
    async with running_journal(store) as leader, following(hot):
        await leader.admit(admission(1))
        await until(lambda: 1 in hot.replay.requests)
        last = EntryId(leader.stats.epoch, 30)
    await lose(valkey, store, 0)
    restated = pb.JournalEntry(restatements=[pb.Restatement(admission=admission(2))])
    async with redis_store(valkey.url) as trimmed:
        await trimmed.append(last, restated.SerializeToString(), create=True)
        if has_newcomer:
            await Journal(trimmed, leader_id="newcomer").open()
        assert not await hot.outlives_journal()
    await hot.close()


async def test_a_journal_that_has_lost_its_end_is_not_led_by_another(valkey: ValkeyProcess, store: RedisStore) -> None:
    hot = new_hot(valkey, store)
    await read_two(store, hot)
    await lose(valkey, store, 2)
    async with following(hot):
        await until_read_again(valkey)
        assert hot.forgotten_since_s is None
        assert set(hot.replay.requests) == {1, 2}
    await hot.close()


async def test_what_was_read_is_kept_where_an_attempt_to_lead_failed_behind_the_lost_end(
    valkey: ValkeyProcess, store: RedisStore
) -> None:
    """Such as our own, after which this standby stands by again: nobody has accepted anything behind it."""
    hot = new_hot(valkey, store)
    await read_two(store, hot)
    await lose(valkey, store, 3)  # the first admission is there
    async with redis_store(valkey.url) as next_store:
        await Journal(next_store, leader_id="failed").open(after_epoch=hot.last.epoch)
        async with following(hot):
            await until_read_again(valkey)
        assert set(hot.replay.requests) == {1, 2}
        replay, _, is_whole, _ = await hot.begun(await Journal(next_store, leader_id="standby").open())
        assert not is_whole
        assert set(replay.requests) == {1, 2}
    await hot.close()


async def test_what_our_own_failed_attempt_to_lead_has_read_is_kept_where_the_store_loses_its_end(
    valkey: ValkeyProcess, store: RedisStore
) -> None:
    """Read by the attempt alone: the leader was not followed before."""
    hot = new_hot(valkey, store)
    async with running_journal(store) as leader:
        await leader.admit(admission(1))
        await leader.admit(admission(2))
    attempt = Journal(store, leader_id="failed")
    await replay_journal(attempt, await hot.begun(await attempt.open()))
    assert set(hot.replay.requests) == {1, 2}
    await lose(valkey, store, 3)  # the first admission is there
    async with redis_store(valkey.url) as next_store:
        async with following(hot):
            await until_read_again(valkey)
        assert set(hot.replay.requests) == {1, 2}
        standby = Journal(next_store, leader_id="standby")
        replay, _, is_whole, _ = await hot.begun(await standby.open(after_epoch=hot.last.epoch))
        assert not is_whole
        assert set(replay.requests) == {1, 2}
    await hot.close()


async def test_a_failed_attempt_to_lead_leaves_what_following_would_have_left(
    valkey: ValkeyProcess, store: RedisStore
) -> None:
    hot, follower = new_hot(valkey, store), new_hot(valkey, store)
    async with running_journal(store, leader_id="leader") as leader:
        await leader.admit(admission(1))
        epoch = leader.stats.epoch
        assert await leader.hand_over()
    async with following(follower):
        await until(lambda: follower.ended_epoch == epoch)
    attempt = Journal(store, leader_id="failed")
    await replay_journal(attempt, await hot.begun(await attempt.open()))
    for each in (hot, follower):
        assert (each.ended_epoch, each.ended_leader_id) == (epoch, "leader")
    assert (hot.last, hot.num_entries, hot.num_bytes) == (follower.last, follower.num_entries, follower.num_bytes)
    await hot.close()
    await follower.close()


async def test_a_loss_is_noticed_though_someone_else_met_the_broken_connection_first(
    valkey: ValkeyProcess, store: RedisStore
) -> None:
    async with redis_store(valkey.url) as other:
        journal = Journal(store, leader_id="leader", probe_every_s=600)
        await journal.open()
        running = asyncio.create_task(journal.run())
        writer = Writer(journal)
        for _ in range(4):
            writer.append()
            await writer.all_durable()
        await lose(valkey, other, 3)
        for _ in range(2):
            await store.get_record("none")
        writer.append()
        await writer.all_durable()
        assert journal.stats.num_recreated == 1
        await journal.close()
        await running


class ShortOfTime(RedisTail):
    """Store that delivers only the first entries in time."""

    def __init__(self, url: str, limit: int) -> None:
        super().__init__(url)
        self._limit = limit

    async def read_after(self, last: EntryId, limit: int) -> Sequence[StoredEntry]:
        if limit > self._limit:
            raise StoreUnavailableError("no answer in time")
        return await super().read_after(last, limit)


async def test_pages_become_shorter_until_one_comes_in_time(valkey: ValkeyProcess, store: RedisStore) -> None:
    hot = HotJournal(ShortOfTime(valkey.url, 40), store, record_ttl_s=TTL_S)
    async with running_journal(store) as journal:
        await journal.admit(admission(1))
        with capture_logs() as logs:
            async with following(hot):
                await until(lambda: 1 in hot.replay.requests)
    assert [line["event"] for line in logs] == ["journal not followed for now"]
    await hot.close()


class FaultyStore(RedisStore):
    """Has a fault that shows once."""

    is_faulty = True

    async def known_records(self, request_ids: Sequence[str]) -> set[str]:
        if self.is_faulty:
            self.is_faulty = False
            raise RuntimeError("a fault")
        return await super().known_records(request_ids)


async def test_a_fault_while_following_has_the_journal_read_anew(valkey: ValkeyProcess) -> None:
    store = FaultyStore(valkey.url)
    hot = new_hot(valkey, store)
    async with running_journal(store) as journal:
        await journal.admit(admission(1))
        async with following(hot):
            await until(lambda: not store.is_faulty)
            await journal.admit(admission(2))
            await until(lambda: set(hot.replay.requests) == {1, 2})
    await hot.close()
    await store.close()
