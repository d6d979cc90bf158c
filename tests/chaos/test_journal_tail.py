"""Verdict of the journal's tail on two leaders: tokens told before they were kept, entries written late or twice."""

import time
from collections.abc import Sequence

from common.arrays import pack_int32, pack_int64
from quire.v1 import journal_pb2
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId, StoredEntry, StoreUnavailableError
from tests.chaos.history import Piece, Told
from tests.chaos.journal_tail import JournalTail

FIRST = 4  # number of the request's first sequence
OUTPUT = [5, 6, 7]


class LenientStore(MemoryStore):
    """Store that takes entries in any order, as no Valkey does, and can be away."""

    is_away = False

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        index = sum(each < entry_id for each in self._ids)
        self._ids.insert(index, entry_id)
        self._payloads.insert(index, payload)

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False) -> Sequence[StoredEntry]:
        if self.is_away:
            raise StoreUnavailableError("away")
        return await super().read_entries(first, limit, is_urgent=is_urgent)

    async def write(self, epoch: int, seq: int, entry: journal_pb2.JournalEntry) -> None:
        await self.append(EntryId(epoch, seq), entry.SerializeToString())

    async def begin(self, epoch: int) -> None:
        start = journal_pb2.LeaderStart(leader_id=f"leader {epoch}")
        await self.write(epoch, 0, journal_pb2.JournalEntry(leader_start=start))

    async def admit(self, epoch: int, seq: int) -> None:
        admission = journal_pb2.Admission(sequence=FIRST)
        admission.request.request_id = "one"
        await self.write(epoch, seq, journal_pb2.JournalEntry(admissions=[admission]))

    async def keep(self, epoch: int, seq: int, tokens: Sequence[int]) -> None:
        numbers = pack_int64([FIRST] * len(tokens))
        await self.write(
            epoch, seq, journal_pb2.JournalEntry(delta_sequences=numbers, delta_tokens=pack_int32(list(tokens)))
        )


def told(tokens: Sequence[int], at_s: float) -> Told:
    piece = Piece(at_s=at_s, sample=0, position=0, tokens=list(tokens), logprobs=[], finish="length")
    return Told("one", 0, at_s, pieces=[piece], state="finished")


async def begun() -> tuple[LenientStore, JournalTail]:
    """A journal with one request, read up to there."""
    store = LenientStore()
    tail = JournalTail(store)
    await store.begin(1)
    await store.admit(1, 1)
    await tail.catch_up()
    return store, tail


async def test_tokens_of_an_old_leader_that_the_next_one_computes_again_were_not_in_the_journal_when_told() -> None:
    store, tail = await begun()
    request = told(OUTPUT, time.monotonic())
    await tail.catch_up()
    assert tail.num_unknown([request]) == 3
    await store.begin(2)
    await store.keep(2, 1, OUTPUT)
    await tail.catch_up()
    assert tail.num_unknown([request]) == 3


async def test_tokens_told_once_they_are_kept_are_known_however_late_they_are_read() -> None:
    store, tail = await begun()
    await store.keep(1, 2, OUTPUT)
    request = told(OUTPUT, time.monotonic())
    store.is_away = True
    for _ in range(3):
        try:
            await tail.catch_up()
        except StoreUnavailableError:
            continue
    store.is_away = False
    assert tail.num_unknown([request]) == 3
    await tail.catch_up()
    assert tail.num_unknown([request]) == 0


async def test_an_entry_that_an_old_leader_writes_behind_the_next_ones_start_is_stale() -> None:
    store, tail = await begun()
    await store.begin(2)
    await tail.catch_up()
    await store.keep(1, 2, OUTPUT)
    await store.keep(2, 1, OUTPUT)
    await tail.catch_up()
    await tail.look_behind()
    assert tail.num_stale == 1
    await tail.look_behind()
    assert tail.num_stale == 1


async def test_what_an_old_leader_writes_under_the_next_ones_epoch_is_there_twice() -> None:
    store, tail = await begun()
    await store.begin(2)
    await store.keep(2, 1, OUTPUT)
    await store.keep(2, 2, OUTPUT)
    request = told(OUTPUT, time.monotonic())
    await tail.catch_up()
    await tail.look_behind()
    assert (tail.num_stale, tail.num_unknown([request]), tail.num_twice([request])) == (0, 0, 3)


async def test_a_trimmed_journal_of_two_leaders_has_nothing_stale() -> None:
    store, tail = await begun()
    await store.keep(1, 2, OUTPUT[:1])
    await tail.catch_up()
    await store.begin(2)
    await store.keep(2, 1, OUTPUT[1:])
    await tail.catch_up()
    await store.trim(EntryId(1, 2))
    await tail.look_behind()
    request = told(OUTPUT, time.monotonic())
    assert (tail.num_stale, tail.num_unknown([request]), tail.num_twice([request])) == (0, 0, 0)
    assert tail.epochs == [1, 2]


async def test_a_leader_began_no_earlier_than_the_last_read_without_it() -> None:
    store, tail = await begun()
    before_s = time.monotonic()
    await tail.catch_up()
    await store.begin(2)
    await tail.catch_up()
    assert before_s <= tail.not_begun_s[2] <= time.monotonic()
