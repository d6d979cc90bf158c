"""The journal on a real Valkey that is frozen, killed, emptied and filled up, and whose replies are lost."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.journal_entry import read_journal
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.store import (
    EntryId,
    FencedError,
    JournalDamagedError,
    StaleEntryError,
    StoreUnavailableError,
)
from tests.patience import patient
from tests.scheduler.journal_setup import (
    Writer,
    admission,
    assert_nothing_lost_or_doubled,
    entries_of,
    redis_store,
    running_journal,
    tokens_of,
    until,
)
from tests.scheduler.reply_dropper import ReplyDropper
from tests.valkey import ValkeyProcess

KEY = "{quire:default}:journal"


async def test_an_iteration_is_one_command_whatever_the_batch(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_journal(store, probe_every_s=1000.0) as journal:
        for _ in range(10):
            done = asyncio.Event()
            journal.append(sequences=range(256), tokens=range(256), on_durable=done.set)
            await done.wait()
        assert valkey.num_calls("xadd") == 12  # with LeaderStart and LeaderReady
        assert journal.stats.commands == 14  # with two looks at the last id before that
        assert journal.stats.entries == 12
        assert journal.stats.write_ns > 0


async def test_many_iterations_at_once_share_commands_and_keep_their_order(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        writer = Writer(journal)
        writer.append()
        await asyncio.sleep(0)  # the writer takes what there is: one token
        await asyncio.sleep(0)
        writer.append(500)
        await writer.all_durable()
        assert valkey.num_calls("xadd") == 4  # LeaderStart, LeaderReady, the first token, all others
        assert writer.durable == await tokens_of(store) == list(range(501))


async def test_a_burst_of_admissions_is_one_command(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        await asyncio.gather(*(journal.admit(admission(sequence)) for sequence in range(64)))
        assert valkey.num_calls("xadd") == 3
        _, entry = (await entries_of(store))[-1]
        assert [each.sequence for each in entry.admissions] == list(range(64))


async def test_a_second_scheduler_fences_the_first(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, redis_store(valkey.url) as other_store:
        first = Journal(store, leader_id="first")
        await first.open()
        writing = asyncio.create_task(first.run())
        writer = Writer(first)
        writer.append(3)
        await writer.all_durable()
        async with running_journal(other_store, leader_id="second") as second:
            assert second.stats.epoch > first.stats.epoch
            writer.append()
            accepted = first.admit(admission(1))
            with pytest.raises(FencedError, match="a newer scheduler took over: it wrote "):
                await writing
            with pytest.raises(FencedError):
                await accepted
            second_writer = Writer(second)
            second_writer.append(2)
            await second_writer.all_durable()
        assert writer.durable == [0, 1, 2]
        epochs = [int(entry_id.partition("-")[0]) for entry_id, _ in await entries_of(store)]
        assert epochs == [first.stats.epoch] * 3 + [second.stats.epoch] * 3


@pytest.mark.parametrize("and_cut", [True, False], ids=["connection cut", "silence"])
async def test_a_lost_reply_leaves_exactly_one_entry(valkey: ValkeyProcess, tmp_path: Path, and_cut: bool) -> None:
    async with (
        ReplyDropper(valkey.socket_path.with_name("p"), valkey.socket_path) as proxy,
        redis_store(proxy.url, timeout_s=0.3) as store,
        running_journal(store) as journal,
    ):
        writer = Writer(journal)
        writer.append()
        await writer.all_durable()
        proxy.drop_next_reply(and_cut=and_cut)
        writer.append()
        await until(lambda: journal.stats.degraded)
        writer.append(4)  # meanwhile
        await writer.all_durable()
        assert not journal.stats.degraded
        assert proxy.num_dropped == 1
        assert valkey.num_calls("xadd") == 5  # LeaderStart, LeaderReady, 1, 1, 4: none was sent twice
        assert writer.durable == await tokens_of(store) == list(range(6))


async def append_in_the_end(store: RedisStore, entry_id: EntryId) -> None:
    """Append an entry to a store that is slow, and gives little time."""
    while True:
        try:
            return await store.append(entry_id, b"", create=True)
        except StoreUnavailableError:
            pass
        except StaleEntryError:
            return None  # it has arrived


async def test_a_long_entry_has_longer_to_be_sent_and_is_looked_at_like_a_short_one(valkey: ValkeyProcess) -> None:
    """Otherwise an entry that takes longer than other commands may would be sent again for ever."""
    async with redis_store(valkey.url, timeout_s=0.2) as store:
        await append_in_the_end(store, EntryId(1, 0))
        valkey.freeze()
        appending = asyncio.create_task(store.append(EntryId(1, 1), bytes(48 << 20)))
        await asyncio.wait([appending], timeout=0.6)
        valkey.thaw()
        await appending
        async with asyncio.timeout(patient(20)):
            while True:
                try:
                    assert await store.last_entry_id() == EntryId(1, 1)
                    break
                except StoreUnavailableError:  # a busy machine may take longer than the limit of this test
                    continue


async def test_a_frozen_store_delays_and_loses_nothing(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url, timeout_s=0.2) as store, running_journal(store) as journal:
        writer = Writer(journal)
        writer.append(5)
        await writer.all_durable()
        valkey.freeze()
        for _ in range(30):  # the caller is never held up
            writer.append()
            await asyncio.sleep(0)
        accepted = journal.admit(admission(1))
        await until(lambda: journal.stats.degraded)
        commands = journal.stats.commands
        await until(lambda: journal.stats.commands >= commands + 2)  # it asks again, and stays unheard
        assert writer.durable == list(range(5))
        valkey.thaw()
        await writer.all_durable()
        await accepted
        assert not journal.stats.degraded
        assert writer.durable == await tokens_of(store) == list(range(35))


async def test_a_killed_store_comes_back_with_all_it_acknowledged(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url, timeout_s=0.5) as store, running_journal(store) as journal:
        writer = Writer(journal)
        for round_number in range(1, 4):
            target = len(writer.sent) + 20
            while len(writer.durable) < target:
                writer.append()
                await asyncio.sleep(0)
            writer.append(10)
            valkey.kill()
            acknowledged = list(writer.durable)
            await until(lambda: journal.stats.degraded)
            writer.append(10)
            valkey.start()
            written = await tokens_of(store)
            assert_nothing_lost_or_doubled(acknowledged, written)
            await writer.all_durable()
            assert not journal.stats.degraded, round_number
        assert writer.durable == await tokens_of(store) == writer.sent


async def test_a_flushed_store_gets_its_journal_again_and_an_error_is_logged(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_journal(store, probe_every_s=1000.0) as journal:
        writer = Writer(journal)
        writer.append(3)
        await writer.all_durable()
        with capture_logs() as logs:
            valkey.command("FLUSHALL")
            writer.append(2)
            await writer.all_durable()
        assert [log["event"] for log in logs if log["log_level"] == "error"] == [
            "the store lost the journal; beginning it again"
        ]
        assert journal.stats.num_recreated == 1
        entries = await entries_of(store)
        assert [entry_id for entry_id, _ in entries] == [f"{journal.stats.epoch}-{seq}" for seq in range(3)]
        assert entries[0][1].leader_start.leader_id == "test"
        assert await tokens_of(store) == [3, 4]


async def test_a_store_that_comes_back_empty_gets_its_journal_again(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url, timeout_s=0.3) as store, running_journal(store) as journal:
        writer = Writer(journal)
        writer.append(3)
        await writer.all_durable()
        valkey.command("FLUSHALL")
        valkey.kill()
        writer.append(2)
        await until(lambda: journal.stats.degraded)
        valkey.start()
        await writer.all_durable()
        assert journal.stats.num_recreated == 1
        assert await tokens_of(store) == [3, 4]


async def test_a_store_out_of_memory_is_waited_for() -> None:
    with ValkeyProcess(max_memory_bytes=64 << 20) as valkey:
        async with redis_store(valkey.url) as store, running_journal(store) as journal:
            valkey.command("CONFIG", "SET", "maxmemory", "1")
            writer = Writer(journal)
            with capture_logs() as logs:
                writer.append(2)
                await until(lambda: journal.stats.degraded)
            assert "it is full" in logs[0]["reason"]
            assert writer.durable == []
            valkey.command("CONFIG", "SET", "maxmemory", "0")
            await writer.all_durable()
            assert writer.durable == await tokens_of(store) == [0, 1]


async def test_a_store_that_became_a_replica_is_waited_for(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        writer = Writer(journal)
        writer.append()
        await writer.all_durable()
        valkey.command("REPLICAOF", "127.0.0.1", "1")  # nobody: it keeps its data and takes no writes
        with capture_logs() as logs:
            writer.append()
            await until(lambda: journal.stats.degraded)
        assert "read-only replica" in logs[0]["reason"]
        valkey.command("REPLICAOF", "NO", "ONE")
        await writer.all_durable()
        assert writer.durable == await tokens_of(store) == [0, 1]


async def test_a_damaged_entry_is_named(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_journal(store) as journal:
        await journal.admit(admission(1))
        epoch = journal.stats.epoch
        valkey.command("XADD", KEY, f"{epoch}-3", "e", b"\x0a\x00", "c", "00000000")
        valkey.command("XADD", KEY, f"{epoch}-4", "unrelated", "x")
        seen: list[EntryId] = []
        with pytest.raises(JournalDamagedError, match=rf"journal entry {epoch}-3 is damaged"):
            async for entry_id, _ in read_journal(store):
                seen.append(entry_id)
        assert seen == [EntryId(epoch, seq) for seq in range(3)]
        with pytest.raises(JournalDamagedError, match=rf"journal entry {epoch}-4 has no payload"):
            await anext(read_journal(store, EntryId(epoch, 4)))


async def test_a_checksum_that_fits_no_entry_is_named(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store:
        await store.append(EntryId(1, 0), b"\xff\xff\xff", create=True)
        with pytest.raises(JournalDamagedError, match=r"journal entry 1-0 cannot be decoded"):
            await anext(read_journal(store))


async def test_a_long_journal_is_read_whole_and_from_any_entry(valkey: ValkeyProcess) -> None:
    async with (
        redis_store(valkey.url) as store,
        running_journal(store, max_entry_bytes=8, trim_every=10_000) as journal,
    ):
        writer = Writer(journal)
        writer.append(600)  # one token an entry
        await writer.all_durable()
        epoch = journal.stats.epoch
        assert [str(entry_id) for entry_id, _ in await entries_of(store)] == [f"{epoch}-{seq}" for seq in range(602)]
        tail = [entry_id async for entry_id, _ in read_journal(store, EntryId(epoch, 590))]
        assert tail == [EntryId(epoch, seq) for seq in range(590, 602)]


async def test_the_journal_does_not_grow_without_bound(valkey: ValkeyProcess) -> None:
    async with redis_store(valkey.url) as store, running_journal(store, trim_every=50) as journal:
        for sequence in range(300):
            await journal.admit(admission(sequence, prompt_tokens=256))  # about four entries a node of the stream
            if sequence >= 20:
                journal.forget(sequence - 20)
        length = int(valkey.command("XLEN", KEY)[1:])
        assert 20 <= length <= 20 + 50 + 10
        ids = [entry_id async for entry_id, _ in read_journal(store)]
        assert ids[0] <= EntryId(journal.stats.epoch, 282)  # of the oldest admission still needed, which is 280
        assert valkey.num_calls("xadd") == 302
