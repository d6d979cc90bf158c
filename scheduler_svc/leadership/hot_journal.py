"""Journal as followed by a standby while the leader writes it, so that a take-over has little left to read.

Ended requests are forgotten once no reader can need them, so the memory is about that of the leader. Knows nothing of
leases.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal_entry import begins_again, decode, is_news
from scheduler_svc.journal.store import (
    JOURNAL_START,
    EntryId,
    JournalDamagedError,
    Store,
    StoredEntry,
    StoreUnavailableError,
)
from scheduler_svc.requests.recovery.journal_reading import recorded_request_ids
from scheduler_svc.requests.recovery.journal_replay import BegunReplay, JournalReplay

log = structlog.get_logger()

_PAGE = 64  # entries; one may have a megabyte
_RETRY_S = 0.1
_ANEW_S = 1.0  # before it is read again from its start after a fault of ours
FORGET_EVERY_S = 5.0  # at least


class JournalTail(Protocol):
    """End of a journal that another process writes. Every method may raise StoreUnavailableError."""

    async def read_after(self, last: EntryId, limit: int) -> Sequence[StoredEntry]:
        """Read up to `limit` entries behind `last`; none if none has come for a while."""

    async def first(self) -> StoredEntry | None:
        """Oldest entry that is not trimmed; None if there is none."""

    async def has(self, entry_id: EntryId) -> bool:
        """True if this entry is there."""

    async def close(self) -> None:
        """Close the connection."""


class HotJournal:
    """Follows a journal. Invariant: `replay` has applied every entry up to `last` that was not trimmed before."""

    def __init__(
        self, tail: JournalTail, store: Store, *, record_ttl_s: int, forget_every_s: float = FORGET_EVERY_S
    ) -> None:
        """Take a tail of its own, and the store with the records of ended requests."""
        self.replay = JournalReplay()
        self.last = JOURNAL_START
        self.has_caught_up = asyncio.Event()  # set while all was read that was there at the last look
        self.has_ended = asyncio.Event()  # set whenever `ended_epoch` is
        self.ended_epoch = 0  # of a leader that handed over, while no other has begun
        self.ended_leader_id = ""  # of the same leader
        self.num_entries = self.num_bytes = 0  # followed since the replay began; some may be trimmed by now
        self.forgotten_since_s: float | None = None  # since when a leader is seen to begin without our entries
        self._tail = tail
        self._store = store
        self._record_ttl_s = record_ttl_s
        self._forget_every_s = forget_every_s
        self._forgot_s = time.monotonic()
        self._epochs: set[int] = set()  # of all entries that were read
        self._ended_s: dict[int, float] = {}  # by number: when its end was seen

    async def follow(self) -> None:
        """Follow until cancelled, or until an entry is damaged: the next leader will report it."""
        page_size, is_late = _PAGE, False
        while True:
            try:
                page = await self._tail.read_after(self.last, page_size)
                newest = page[-1].entry_id if page else await self._store.last_entry_id()
                goes_on = await self._continues_with(page[0]) if page else not self._is_led_below(newest)
                if not goes_on:
                    self._track_lag(has_caught_up=False)
                    if not await self._is_led_without_ours():
                        await self._track_forgotten()
                        await asyncio.sleep(_RETRY_S)  # the leader that begins there may know less than we do
                        continue
                    log.warning("journal trimmed before it was read; reading it from its start", last=str(self.last))
                    self._begin_again()
                    continue
                self._apply_page(page)
                self._track_lag(has_caught_up=len(page) < page_size)
                if newest is None or (self.replay.is_cut_short and not self.replay.is_settled):
                    await self._track_forgotten()  # the next leader may not know it, nor the one that is restating
                else:
                    self.forgotten_since_s = None
                await self._prune_periodically()
                page_size, is_late = min(page_size + 1, _PAGE), False
            except StoreUnavailableError as error:
                if not is_late:
                    log.warning("journal not followed for now", reason=error.message, last=str(self.last))
                page_size, is_late = max(page_size // 2, 1), True  # it may be the page that takes too long
                self._track_lag(has_caught_up=False)
                await asyncio.sleep(_RETRY_S)
            except JournalDamagedError as error:
                log.error("journal not followed any more", reason=str(error))
                self._begin_again()
                return
            except Exception:  # an entry may be half applied
                log.exception("journal not followed; reading it from its start", last=str(self.last))
                self._begin_again()
                await asyncio.sleep(_ANEW_S)

    async def begun(self, epoch: int) -> BegunReplay:
        """Replay so far, for a leader that has opened the journal at `epoch`, behind the entries that were read.

        Entries that the store has lost since are kept: they happened. If entries were trimmed before they were read,
        the replay starts again. It stays ours until `close`: that leader may fail. Raises StoreUnavailableError.
        """
        first = await self._tail.first()
        is_whole = True
        if self.last == JOURNAL_START:
            pass
        elif first is None or first.entry_id > self.last:
            is_new = first is None or first.entry_id.epoch >= epoch or _begins_again(first)
            is_whole = not is_new and await self._is_led_without_ours()
            if is_whole:
                self._begin_again()
        elif not await self._tail.has(self.last):
            is_whole = await self._was_led_unread(epoch)
            if is_whole:
                self._begin_again()
        return BegunReplay(self.replay, self._next(), is_whole, self._record_read)

    async def outlives_journal(self) -> bool:
        """True if requests were read here, and no leader was ready in the journal, nor says everything again there.

        If not, nothing is forgotten. Raises StoreUnavailableError, or JournalDamagedError.
        """
        outlives = bool(self.replay.requests) and await self._is_emptied()
        if not outlives:
            self.forgotten_since_s = None
        return outlives

    async def close(self) -> None:
        """Drop the replay, and close the connection."""
        self._begin_again()
        await self._tail.close()

    def _record_read(self, entry_id: EntryId, entry: pb.JournalEntry) -> None:
        """Record that the replay has applied this entry, too."""
        self.last = entry_id
        self.num_entries += 1
        self.num_bytes += entry.ByteSize()
        self._epochs.add(entry_id.epoch)
        self.ended_epoch = entry_id.epoch if entry.HasField("leader_end") else 0
        self.ended_leader_id = entry.leader_end.leader_id

    async def _continues_with(self, stored: StoredEntry) -> bool:
        """True if no entry was trimmed or lost between the last one read and this one, the first behind it.

        After a loss the leader restates everything: the replay is needed until it has done so.
        """
        if self.last == JOURNAL_START or stored.entry_id == self._next() or _begins_again(stored):
            return True
        return await self._tail.has(self.last)

    def _is_led_below(self, newest: EntryId | None) -> bool:
        """True if a leader unknown here has begun in an emptied journal, at an epoch before our last entry.

        Its clock is behind, so its entries never come behind our last one. A journal that has only lost its end has no
        such leader.
        """
        return newest is not None and newest < self.last and newest.epoch not in self._epochs

    async def _was_led_unread(self, epoch: int | None = None) -> bool:
        """True if a leader unknown here was ready before `epoch`, which is ours: only it knows what it accepted.

        If its clock was behind, its entries do not come behind our last one.
        """
        last = JOURNAL_START
        while page := await self._tail.read_after(last, _PAGE):
            last = page[-1].entry_id
            unread = [each for each in page if each.entry_id.epoch not in (*self._epochs, epoch)]
            if any(is_news(decode(each)) for each in unread):
                return True
            if len(page) < _PAGE:
                break
        return False

    async def _is_led_without_ours(self) -> bool:
        """True if a leader is ready in a journal without our entries: they were trimmed, or their requests ended.

        Where the journal has only lost its end, that leader is one behind the loss, and unknown here.
        """
        first = await self._tail.first()
        if first is not None and first.entry_id <= self.last and first.entry_id.epoch in self._epochs:
            return await self._was_led_unread()
        return any(is_news(decode(each)) for each in await self._tail.read_after(JOURNAL_START, _PAGE))

    async def _is_emptied(self) -> bool:
        """True if the journal has no more than the beginnings of leaders of which the last knows nothing of before."""
        if await self._tail.first() is None:
            return True  # a page of it would be waited for
        page = await self._tail.read_after(JOURNAL_START, _PAGE)
        entries = [decode(each) for each in page]
        if not entries or not entries[0].HasField("leader_start"):
            return False  # it was not emptied but trimmed, by a leader that was ready
        last_start = [each.leader_start for each in entries if each.HasField("leader_start")][-1]
        return len(page) < _PAGE and not last_start.says_all_again and not any(is_news(each) for each in entries)

    async def _track_forgotten(self) -> None:
        if await self.outlives_journal() and self.forgotten_since_s is None:
            self.forgotten_since_s = time.monotonic()

    def _next(self) -> EntryId:
        return EntryId(self.last.epoch, self.last.seq + 1) if self.last != JOURNAL_START else JOURNAL_START

    def _begin_again(self) -> None:
        self.replay, self.last = JournalReplay(), JOURNAL_START
        self.ended_epoch, self.ended_leader_id = 0, ""
        self.num_entries = self.num_bytes = 0
        self._ended_s.clear()
        self._epochs.clear()
        self.forgotten_since_s = None
        self.has_caught_up.clear()

    def _track_lag(self, *, has_caught_up: bool) -> None:
        if has_caught_up:
            self.has_caught_up.set()
        else:
            self.has_caught_up.clear()

    def _apply_page(self, page: Sequence[StoredEntry]) -> None:
        for stored in page:
            entry = decode(stored)
            self.replay.apply(stored.entry_id, entry)
            self._record_read(stored.entry_id, entry)
        if self.ended_epoch:
            self.has_ended.set()

    async def _prune_periodically(self) -> None:
        """Forget requests that have a record, or ended so long ago that it has expired.

        Counts from the moment when this process saw the end: the time of day of the end is by another process's clock.
        """
        now_s = time.monotonic()
        if now_s < self._forgot_s + self._forget_every_s:
            return
        self._forgot_s = now_s
        requests = self.replay.requests.values()
        open_ids = {each.request_id for each in requests if each.finish is None}  # one of them must stay the later
        ended = [each for each in requests if each.finish is not None and each.request_id not in open_ids]
        recorded = await recorded_request_ids(ended, self._store)
        self._ended_s = {each.number: self._ended_s.get(each.number, now_s) for each in ended}
        for each in ended:
            if each.request_id in recorded or self._ended_s[each.number] + self._record_ttl_s <= now_s:
                self.replay.forget_request(each.number)


def _begins_again(stored: StoredEntry) -> bool:
    return begins_again(stored.entry_id, decode(stored))
