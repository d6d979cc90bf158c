"""Restatements: live state is written to the journal again, so it can be trimmed or lost, and no request notices."""

import asyncio
import random
from collections.abc import Callable, Hashable

import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.journal_counters import JournalCounters
from scheduler_svc.journal.journal_entry import PendingEntry
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId, StoreFlushedError, StoreUnavailableError
from tests.scheduler.journal_setup import entries_of, until
from tests.scheduler.mortal_sites import (
    Client,
    Lives,
    SlowStore,
    assert_as_undisturbed,
    lives_on,
    run_through_deaths,
    speaking_worker,
)
from tests.scheduler.sample_outputs import assert_recorded, record_of
from tests.scheduler.scripted_beams import of_kind
from tests.scheduler.serving_site import counting


class LossyStore(SlowStore):
    """Can lose all that it has, or the newest entries of it, as a server that was replaced by a lagging copy."""

    def __init__(self, random_: random.Random) -> None:
        super().__init__(random_)
        self.num_losses = 0
        self.on_loss: Callable[[], None] = lambda: None
        self.on_append: Callable[[], None] = lambda: None
        self._fails = False
        self._losing_at: set[int] = set()
        self._num_appends = 0

    def lose_at(self, appends: set[int]) -> None:
        """Lose entries before each of these appends."""
        self._num_appends, self._losing_at = 0, appends

    def lose(self, num_kept: int) -> None:
        """Lose all but the first `num_kept` entries; the connection breaks."""
        self.num_losses += 1
        num_left = min(num_kept, len(self._ids))
        del self._ids[num_left:], self._payloads[num_left:]
        self._last = self._ids[-1] if self._ids else None
        self._epoch, self._fails = 0, True
        self.on_loss()

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        self._num_appends += 1
        if self._num_appends in self._losing_at:
            self.lose(self._random.choice([0, 0, len(self._ids) // 2, len(self._ids) - 1]))
        if self._fails:
            self._fails = False
            raise StoreUnavailableError("connection lost")
        if self._last is None and not create:
            raise StoreFlushedError("gone")
        await super().append(entry_id, payload, create=create)
        self.on_append()


def requests_of_all_kinds(random_: random.Random, num_requests: int, length: int = 40) -> list[pb.GenerateRequest]:
    requests = []
    for i in range(num_requests):
        request = of_kind(i % 5, random_.randrange(300), random_.randrange(length, 2 * length), f"r{i}", random_)
        request.on_disconnect = pb.ON_DISCONNECT_CONTINUE
        if i % 2:
            request.output.logprobs = i % 3
        if i % 4 == 1:
            request.output.prompt_logprobs = 1
        requests.append(request)
    return requests


async def undisturbed(disturbed: list[Client]) -> list[Client]:
    """Clients with the same requests, in one life."""
    async with lives_on(SlowStore(random.Random(0))) as lives:
        clients = [Client(each.request) for each in disturbed]
        await run_through_deaths(lives, clients, [])
    return clients


@pytest.mark.parametrize("seed", [1, 2])
async def test_requests_outlive_deaths_though_the_journal_is_trimmed_behind_their_restatements(seed: int) -> None:
    random_ = random.Random(seed)
    clients = [Client(each) for each in requests_of_all_kinds(random_, 10)]
    async with lives_on(SlowStore(random_), restate_entries=4, trim_every=2, preempt_every=5) as lives:
        await run_through_deaths(lives, clients, [random_.randrange(6, 14) for _ in range(4)])
        await assert_as_undisturbed(lives.site, clients, await undisturbed(clients))
        assert lives.num_recovered
        assert lives.num_restated


def journal_stats(lives: Lives) -> JournalCounters:
    return lives.site.journal.stats


async def test_the_journal_stays_short_however_long_a_request_lives() -> None:
    async with lives_on(MemoryStore(), restate_entries=8, trim_every=4) as lives:
        site = await lives.begin()
        await lives.add_workers()
        client = Client(counting(5, 200, "long", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
        await client.come(site)
        longest = 0
        while not client.is_done:
            longest = max(longest, len(await entries_of(lives.store)))
            await asyncio.sleep(0)
        assert journal_stats(lives).entries > 2 * longest
        assert longest <= 8 + 2 * 4 + 2  # restated when that old, trimmed every four, a trim on its way
        assert client.seen.token_ids == [list(range(6, 206))]


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_store_that_lost_the_journal_has_all_that_lives_when_the_scheduler_dies_then(seed: int) -> None:
    random_ = random.Random(seed)
    store = LossyStore(random_)
    clients = [Client(each) for each in requests_of_all_kinds(random_, 5, length=90)]
    async with lives_on(store, preempt_every=29) as lives:
        # Else a quick machine has computed everything before the journal is whole again.
        may_answer = lives.workers[0].may_answer
        store.on_loss, store.on_append = may_answer.clear, may_answer.set
        for num_entries in (8, 11, 14):
            site = await lives.begin()
            coming = [asyncio.create_task(client.come(site)) for client in clients if client.is_accepted]
            await lives.add_workers()
            coming += [asyncio.create_task(client.come(site)) for client in clients if not client.is_accepted]
            await asyncio.gather(*coming)
            before = journal_stats(lives).entries
            store.lose_at({2, 5, random_.randrange(3, 8)})
            await until(lambda: store.num_losses > 0 or all(client.is_done for client in clients))
            await until(
                lambda n=before + num_entries: (
                    journal_stats(lives).entries >= n  # type: ignore[misc]
                    or all(client.is_done for client in clients)
                )
            )
            await until(lambda: not journal_stats(lives).degraded)
            store.lose_at(set())
            await lives.die()
        await run_through_deaths(lives, clients, [])
        await assert_as_undisturbed(lives.site, clients, await undisturbed(clients))
        assert store.num_losses >= 3 and lives.num_recovered


async def test_a_request_whose_end_the_store_lost_stays_as_its_record_says() -> None:
    store = LossyStore(random.Random(1))
    async with lives_on(store) as lives:
        site = await lives.begin()
        await lives.add_workers()
        client = Client(counting(10, 4, "ended", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
        await client.come(site)
        await until(lambda: client.is_done and not site.records.num_pending)
        entries = [entry for _, entry in await entries_of(store)]
        store.lose(next(place for place, entry in enumerate(entries) if entry.finishes))
        await lives.die()
        site = await lives.begin()
        assert not site.recovery.num_waiting
        assert_recorded(await record_of(site, "ended"), client.seen)


def test_what_is_said_again_is_no_news() -> None:
    def write(restated: journal_pb2.JournalEntry) -> list[Hashable]:
        restated.finishes.add(sequence=1, state=pb.REQUEST_STATE_FINISHED)
        return [1]

    entry = PendingEntry()
    entry.add_deltas([5], [7])
    entry.restate(write)
    assert entry.num_records == 1


async def test_an_idle_scheduler_finds_out_that_the_journal_is_gone() -> None:
    """Without a worker no entry is written, so the scheduler must check by itself."""
    store = LossyStore(random.Random(1))
    async with lives_on(store, probe_every_s=0.02) as lives:
        site = await lives.begin()
        await lives.add_workers()
        worker = lives.workers.pop()
        client = Client(counting(5, 200, "patient", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
        await client.come(site)
        await until(lambda: len(client.seen.samples) == 1 and len(client.seen.token_ids[0]) > 3)
        await worker.stop()
        await site.until_nobody_is_left()
        await until(lambda: not site.journal.stats.pending)
        store.lose(0)
        await until(lambda: site.journal.stats.num_recreated == 1)
        await until(lambda: site.journal.stats.oldest_needed is not None and not site.journal.stats.degraded)
        assert await store.next_epoch() > site.journal.stats.epoch  # it was not forgotten
        await lives.die()
        lives.workers.append(speaking_worker(num_blocks=64))
        await run_through_deaths(lives, [client], [])
        assert client.seen.token_ids == [list(range(6, 206))]


async def test_requests_that_wait_for_their_model_outlive_the_loss_of_the_journal() -> None:
    store = LossyStore(random.Random(1))
    async with lives_on(store, probe_every_s=0.02) as lives:
        clients = [Client(each) for each in requests_of_all_kinds(random.Random(1), 5, length=90)]
        site = await lives.begin()
        store.stop_after(5)
        await lives.add_workers()
        coming = [asyncio.create_task(client.come(site)) for client in clients]
        await until(lambda: store.is_fatal.is_set())
        await lives.die()
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        store.stop_after(None)
        site = await lives.begin()
        num_waiting = site.recovery.num_waiting
        assert num_waiting == 5
        store.lose(0)
        await until(lambda: site.journal.stats.num_recreated == 1 and not site.journal.stats.degraded)
        await until(lambda: site.journal.stats.oldest_needed is not None and not site.journal.stats.pending)
        await lives.die()
        await run_through_deaths(lives, clients, [])
        await assert_as_undisturbed(lives.site, clients, await undisturbed(clients))
        assert lives.site.recovery.num_recovered == num_waiting
