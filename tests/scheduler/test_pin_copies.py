"""Pins of shard 0 in another shard: read from the journal, copied and removed once a difference has lasted."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import pairwise
from math import inf, nextafter
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.arrays import pack_int32
from quire.params import PIN_TIMEOUT_S
from quire.v1 import journal_pb2
from scheduler_svc.journal.store import EntryId, JournalDamagedError, StoredEntry, StoreUnavailableError
from scheduler_svc.requests.prefixes.pin_copies import MOST_PATIENCE_S, PATIENCE_S, PinCopies, read_pins
from scheduler_svc.requests.prefixes.prefix_pin import digest_of_pins
from scheduler_svc.requests.recovery.journal_replay import JournalReplay
from tests.scheduler.journal_setup import until
from tests.scheduler.pinning import PREFIX, beginning, cached_tokens, num_computed, num_pinned_blocks, pin, pinned
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, running_site
from tests.scheduler.test_restated_replay import Writer, restatements_of


def stored(entry_id: EntryId, entry: journal_pb2.JournalEntry) -> StoredEntry:
    payload = entry.SerializeToString()
    return StoredEntry(entry_id, payload, b"%08x" % crc32(payload))


class Journal:
    """Entries of another shard, read in pages."""

    def __init__(self, entries: Sequence[StoredEntry] = ()) -> None:
        self.entries = list(entries)

    async def read_after(self, last: EntryId, limit: int) -> Sequence[StoredEntry]:
        return [each for each in self.entries if each.entry_id > last][:limit]


@settings(max_examples=30)
@given(st.integers(0, 1 << 32), st.integers(0, 90), st.integers(0, 90), st.booleans())
def test_the_pins_that_are_read_are_those_that_a_new_leader_would_find(
    seed: int, before: int, behind: int, is_restated: bool
) -> None:
    """Entries have requests, too, and a leader may have lost the last ones and say everything again."""
    random_ = random.Random(seed)
    writer, replay = Writer(random_), JournalReplay()
    entries: list[StoredEntry] = []

    def write(entry: journal_pb2.JournalEntry) -> None:
        entries.append(stored(EntryId(1, len(entries) + 1), entry))
        replay.apply(entries[-1].entry_id, entry)

    for _ in range(before):
        write(writer.entry())
    if is_restated and before:
        write(journal_pb2.JournalEntry(leader_start=journal_pb2.LeaderStart(says_all_again=True)))
        known = JournalReplay()
        for each in entries[: random_.randrange(before)]:
            known.apply(each.entry_id, journal_pb2.JournalEntry.FromString(each.payload or b""))
        for restated, _ in restatements_of(known).restate_all():
            write(restated)
    for _ in range(behind):
        write(writer.entry())
    found = asyncio.run(read_pins(Journal(entries).read_after))
    assert {(each.tenant, each.name): each for each in found} == {key: each.change for key, each in replay.pins.items()}


async def test_reading_ends_although_the_journal_grows_as_fast_as_it_is_read() -> None:
    entries: list[StoredEntry] = []

    async def read_after(last: EntryId, limit: int) -> Sequence[StoredEntry]:
        entries.append(stored(EntryId(1, len(entries) + 1), journal_pb2.JournalEntry(pins=[change("system")])))
        assert len(entries) < 100, "it never ends"
        return await Journal(entries).read_after(last, limit)

    assert [each.name for each in await read_pins(read_after)] == ["system"]


async def test_a_damaged_entry_is_told() -> None:
    with pytest.raises(JournalDamagedError):
        await read_pins(Journal([StoredEntry(EntryId(1, 1), b"x", b"0")]).read_after)


def change(name: str, token_ids: Sequence[int] = PREFIX, fingerprint: str = "counting-1") -> journal_pb2.PinChange:
    return journal_pb2.PinChange(name=name, token_ids=pack_int32(token_ids), model_fingerprint=fingerprint)


def test_the_digest_is_of_content_in_any_order() -> None:
    one, two = change("a"), change("b")
    assert digest_of_pins([one, two]) == digest_of_pins([two, one]) != digest_of_pins([one])
    assert digest_of_pins([]) == 0 != digest_of_pins([one])
    others = [change("a", PREFIX[1:]), change("a", fingerprint="m-2"), change("b")]
    digests = {digest_of_pins([each]) for each in (one, *others)}
    assert len(digests) == 4 and all(each < 1 << 64 for each in digests)  # as the wire has it


class First:
    """Shard 0: its pins as they are read, and as its leader says."""

    def __init__(self, *pins: journal_pb2.PinChange) -> None:
        self.pins = list(pins)
        self.num_reads = 0
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def digest(self) -> int:
        return digest_of_pins(self.pins)

    async def read(self) -> Sequence[journal_pb2.PinChange]:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        await self.may_answer.wait()
        return list(self.pins)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


async def test_a_pin_that_was_made_before_is_copied_and_computed_and_goes_with_the_other(site: Site) -> None:
    await site.add_worker()
    first = First(change("system"))
    copies = PinCopies(site.keeper, first.read)
    await copies.update(first.digest, 10.0)
    assert not first.num_reads  # a client may be about to pin it here, too
    await copies.update(first.digest, 10.0 + PATIENCE_S)
    await until(lambda: num_pinned_blocks(site) == {"w1": 2})
    assert await pinned(site) == {"system": ["w1"]}
    assert await cached_tokens(site, beginning(PREFIX)) == 32
    assert site.keeper.digest == first.digest()
    first.pins.clear()
    await copies.update(first.digest, 20.0)
    await copies.update(first.digest, 20.0 + PATIENCE_S)
    assert await pinned(site) == {} and site.keeper.digest == 0
    await until(lambda: num_pinned_blocks(site) == {"w1": 0})
    await site.idle()


async def test_a_copy_waits_for_a_worker_and_is_in_the_journal_meanwhile(site: Site) -> None:
    first = First(change("system"))
    copies = PinCopies(site.keeper, first.read)
    await copies.update(first.digest, 10.0)
    await copies.update(first.digest, 20.0)
    assert await pinned(site) == {"system": []}
    await until(lambda: site.journal.stats.num_needed == 1)
    await site.add_worker()
    await until(lambda: num_pinned_blocks(site) == {"w1": 2})


async def test_what_is_read_counts_only_if_it_is_what_the_leader_says(site: Site) -> None:
    """Pins may be said that are not in the journal yet, or the store may not answer: it is tried again, less often."""
    await site.add_worker()
    first = First(change("system"))
    copies, now_s = PinCopies(site.keeper, first.read), 0.0
    newer = digest_of_pins([*first.pins, change("other")])
    for error in (None, StoreUnavailableError("gone"), JournalDamagedError("damaged")):
        first.error = error
        while first.num_reads < 4:
            await copies.update(lambda: newer, now_s)
            now_s += 0.25
        assert await pinned(site) == {}
        first.num_reads = 0
    first.error = None
    began_s = now_s
    while not first.num_reads:
        await copies.update(first.digest, now_s)
        now_s += 0.25
    assert PATIENCE_S < now_s - began_s <= MOST_PATIENCE_S + 0.25
    assert (await pinned(site)).keys() == {"system"}


async def test_each_attempt_in_vain_doubles_the_wait_for_the_next_until_the_pins_are_equal(site: Site) -> None:
    first = First(change("system"))
    first.error = StoreUnavailableError("gone")
    copies = PinCopies(site.keeper, first.read)
    for _ in range(2):
        moments = [0.0]
        for tick in range(2000):
            num_reads, now_s = first.num_reads, tick / 4
            await copies.update(first.digest, now_s)
            moments += [now_s] * (first.num_reads - num_reads)
        waits = [after - before for before, after in pairwise(moments)]
        assert len(waits) > 8 and waits == [min(PATIENCE_S * 2**i, MOST_PATIENCE_S) for i in range(len(waits))]
        await copies.update(lambda: site.keeper.digest, 500.0)


async def test_a_copy_of_another_models_pin_waits_for_a_worker_of_that_model(site: Site) -> None:
    worker = await site.add_worker()
    first = First(change("system", fingerprint="counting-2"))
    await mend(PinCopies(site.keeper, first.read), first)
    assert await pinned(site) == {"system": []} and site.keeper.digest == first.digest()
    await cached_tokens(site, beginning(PREFIX))
    assert await pinned(site) == {"system": []} and num_computed(worker) == 41 + 3


async def test_nothing_is_read_while_the_pins_are_equal_or_those_of_shard_0_are_not_known(site: Site) -> None:
    await site.add_worker()
    await pin(site)
    first = First()
    copies = PinCopies(site.keeper, first.read)
    for now_s in range(0, 100, 10):
        said = None if now_s % 20 else site.keeper.digest
        await copies.update(partial(lambda digest: digest, said), float(now_s))
    assert not first.num_reads and await pinned(site) == {"system": ["w1"]}


async def test_a_pin_with_another_content_is_replaced_once_its_client_waits_no_more(site: Site) -> None:
    await site.add_worker()
    await pin(site, range(2000, 2040))
    first = First(change("system"))
    await mend(PinCopies(site.keeper, first.read), first)
    assert await cached_tokens(site, beginning(range(2000, 2040))) == 32
    await mend(PinCopies(site.keeper, first.read), first, later_s=PIN_TIMEOUT_S)
    await until(lambda: num_pinned_blocks(site) == {"w1": 2})
    assert await cached_tokens(site, beginning(PREFIX)) == 32
    assert site.keeper.digest == first.digest()


async def mend(copies: PinCopies, first: First, *, later_s: float = 0.0) -> None:
    """Lets the difference last long enough, so much later than now."""
    now_s = asyncio.get_running_loop().time() + later_s
    await copies.update(first.digest, now_s)
    await copies.update(first.digest, now_s + PATIENCE_S)


async def test_a_pin_that_shard_0_still_computes_for_the_client_stays(site: Site) -> None:
    """The client has pinned in both shards at once, and this one was done first."""
    await site.add_worker()
    await pin(site)
    first = First()
    await mend(PinCopies(site.keeper, first.read), first)
    assert first.num_reads and await pinned(site) == {"system": ["w1"]}
    await mend(PinCopies(site.keeper, first.read), first, later_s=PIN_TIMEOUT_S)
    assert await pinned(site) == {}


async def test_a_pin_counts_as_asked_for_since_the_very_moment_of_the_call(site: Site) -> None:
    await site.add_worker()
    await pin(site)
    asked_s = next(iter(site.keeper)).asked_s
    site.keeper.replace_pins([], asked_before_s=asked_s)
    assert await pinned(site) == {"system": ["w1"]}
    site.keeper.replace_pins([], asked_before_s=nextafter(asked_s, inf))
    assert await pinned(site) == {}


async def test_a_pin_that_a_client_asks_for_again_stays_and_its_call_does_not_fail(site: Site) -> None:
    first = First(change("system"))
    copies = PinCopies(site.keeper, first.read)
    await mend(copies, first)
    worker = await site.add_worker()
    await until(lambda: num_pinned_blocks(site) == {"w1": 2})
    await pin(site)
    first.pins.clear()
    await mend(copies, first)
    assert await pinned(site) == {"system": ["w1"]}

    await worker.stop()
    await until(lambda: not site.workers.members)
    other = ScriptedWorker("w2")
    other.may_answer.clear()
    await site.start_worker(other)
    pinning = asyncio.create_task(pin(site))
    kept = next(iter(site.keeper))
    await until(lambda: bool(kept.waiters))
    await mend(PinCopies(site.keeper, first.read), first, later_s=PIN_TIMEOUT_S)  # a client may wait longer
    other.may_answer.set()
    assert (await pinning).prefix.worker_ids == ["w2"]


async def test_pins_that_have_changed_while_they_were_read_do_not_count(site: Site) -> None:
    await site.add_worker()
    first = First(change("system"))
    copies, said = PinCopies(site.keeper, first.read), [first.digest()]
    first.may_answer.clear()
    await copies.update(lambda: said[-1], 10.0)
    updating = asyncio.create_task(copies.update(lambda: said[-1], 20.0))
    await until(lambda: first.num_reads == 1)
    said.append(0)  # the client has unpinned it in both
    first.may_answer.set()
    await updating
    assert await pinned(site) == {}
