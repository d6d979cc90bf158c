"""Writes one journal entry after another, each exactly once, whatever the store does meanwhile.

A store that is slow, silent, restarted or full is waited for. One that has lost entries is found out, and the journal
can be begun again in it, in a later epoch. One that a later leader writes ends the writer, once that leader is ready.
Knows nothing of what is in an entry but who begins to lead there.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal_health import JournalHealth
from scheduler_svc.journal.leader_epochs import LaterLeader, epoch_after
from scheduler_svc.journal.store import (
    JOURNAL_START,
    EntryId,
    FencedError,
    JournalLostError,
    StaleEntryError,
    Store,
    StoreFlushedError,
    StoreUnavailableError,
)

log = structlog.get_logger()

_OPEN_ATTEMPTS = 8
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_WRITE_NS_WEIGHT = 0.1  # of the newest write in the moving average
_PAGE = 8  # entries; one may have a megabyte
UNREADY_S = 5.0

T = TypeVar("T")


class GaveUpError(Exception):
    """The writer was told not to wait for the store any longer. Whether the entry is durable is unknown."""


class JournalWriter:
    """Used by one task.

    Invariants: ids rise by one within an epoch. An id carries the same payload however often it is sent, so that a
    command delayed on its way does no harm. No two leaders share an epoch, whatever the store has forgotten: it is
    later than all that the store knows, and has the time and the leader in it. Nothing new is sent while it is unknown
    whether the last entry arrived.
    """

    def __init__(self, store: Store, leader_id: str, *, late_s: float, unready_s: float = UNREADY_S) -> None:
        """`unready_s` is how long a later leader may take to become ready before this one goes on."""
        self.epoch = 0
        self.last_id = JOURNAL_START  # acknowledged
        self.num_entries = 0  # acknowledged
        self.num_commands = 0
        self.num_recreated = 0
        self.write_ns = 0  # moving average
        self.is_ready = False  # it has served
        self.health = JournalHealth(late_s)
        self._store = store
        self._leader_id = leader_id
        self._unready_s = unready_s
        self._known_epoch = 0  # news of later epochs are another leader's
        self._familiar_epochs: set[int] = set()  # ours, and those that were read
        self._is_whole = True  # as far as we know: the store has all that it acknowledged
        self._give_up = asyncio.Event()

    async def take_epoch(self, after: int = 0, *, says_all_again: bool = False) -> int:
        """Begins an epoch later than `after` with a LeaderStart, which fences every earlier leader, and returns it.

        Raises StoreUnavailableError, or FencedError if other leaders keep coming in between.
        """
        for attempt in range(1, _OPEN_ATTEMPTS + 1):
            try:
                await self._try_epoch(after, says_all_again=says_all_again)
            except (StaleEntryError, StoreFlushedError):
                continue  # another leader was faster, or what was found is gone
            except StoreUnavailableError:
                if attempt == _OPEN_ATTEMPTS:
                    raise
                await asyncio.sleep(min(_MIN_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S))
            else:
                self._known_epoch = self.epoch
                return self.epoch
        raise FencedError("other schedulers took over while this one was about to lead")

    async def _try_epoch(self, after: int, *, says_all_again: bool) -> None:
        # The counter alone could repeat an epoch if the store lost its last count, and the journal's ids if it lost
        # the journal as well. The time may be set back; then the other two are later.
        counted = await self._store.next_epoch()
        last = await self._store.last_entry_id()
        epoch = epoch_after(max(counted - 1, after, last.epoch if last is not None else 0), self._leader_id)
        if epoch > counted:
            await self._store.raise_epoch(epoch)
        self.num_commands += 2  # of the epoch
        payload = self._leader_start(says_all_again=says_all_again)
        await self._store.append(EntryId(epoch, 0), payload, create=last is None)
        self.epoch, self.last_id = epoch, EntryId(epoch, 0)
        self._familiar_epochs.add(epoch)
        self.num_entries += 1

    def note_read(self, epoch: int) -> None:
        """What a leader wrote in this epoch is known here."""
        self._familiar_epochs.add(epoch)

    async def write_ready(self) -> None:
        """Says that this leader knows, and has written, all that there is: from now on it may serve.

        Raises as `write`; FencedError, too, if another leader began meanwhile and this one knows nothing more than it.
        """
        await self.write(pb.JournalEntry(leader_ready=pb.LeaderReady()).SerializeToString())
        self.is_ready = self._is_whole = True
        self._known_epoch = self.epoch
        self.health.note_answer()

    async def write(self, payload: bytes) -> EntryId:
        """Returns the id under which the payload is durable.

        Raises FencedError when a later leader is ready, GaveUpError after `give_up`, or JournalLostError: then nothing
        was written, and `begin_again` comes next.
        """
        started_ns = time.monotonic_ns()
        entry_id = EntryId(self.epoch, self.last_id.seq + 1)
        backoff_s = _MIN_BACKOFF_S
        is_there = may_be_there = False
        while not is_there:
            try:
                self.num_commands += 1
                with self.health.asking():
                    await self._store.append(entry_id, payload)
                break
            except StoreFlushedError as error:
                log.error("the store lost the journal; beginning it again", epoch=self.epoch)
                raise JournalLostError("the store lost the journal") from error
            except StaleEntryError:
                pass
            except StoreUnavailableError as error:
                may_be_there = True
                self.health.note_trouble(error.message)
                await self._pause(backoff_s)
                backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
            is_there = await self._find_out(entry_id, may_be_there=may_be_there)
        self._note_written(entry_id, time.monotonic_ns() - started_ns)
        return entry_id

    async def probe(self) -> None:
        """Looks whether the journal is as we left it, and waits until the store says so. Raises as `write` does."""
        last = await self._last_id()
        await self._check_leading(last, self.last_id)
        self._check_not_lost(last)
        self._note_answer()

    async def begin_again(self, *, holds_nothing: bool = False) -> None:
        """Begins a later epoch in a store that has lost the journal or a part of it, or has a leader who knows less.

        Memory still holds the state, which the caller writes next, and then calls `write_ready`. Raises FencedError if
        a later leader was ready before that, and of who `holds_nothing` if another one has begun the journal again at
        all, though its clock, and so its epoch, be behind: what it has accepted nobody else knows. Raises GaveUpError.
        """
        if holds_nothing and (last := await self._last_id()) is not None and last.epoch not in self._familiar_epochs:
            raise FencedError(f"another scheduler began the lost journal again: it wrote {last}, nothing lives here")
        self.num_recreated += 1
        self._is_whole = False
        self.health.note_trouble("the journal is gone")
        while True:
            try:
                await self._until_answered(lambda: self._try_epoch(self.epoch, says_all_again=True))
            except (StaleEntryError, StoreFlushedError):
                continue
            later = await self._later_leader(before=self.epoch)
            if later is not None and later.is_ready:  # it was so before we could say anything
                raise self._fenced(later.last_id)
            return

    def give_up(self) -> None:
        """From now on a store that does not answer is not waited for."""
        self._give_up.set()

    async def _find_out(self, entry_id: EntryId, *, may_be_there: bool) -> bool:
        """Whether an entry arrived whose acknowledgement did not.

        Raises FencedError if the journal goes on behind what we sent: we send one entry at a time, so that was
        someone else.
        """
        last = await self._last_id()
        if last is None:
            return False  # the next attempt meets the same, and begins the journal again
        await self._check_leading(last, entry_id if may_be_there else self.last_id)
        self._check_not_lost(last)
        return last == entry_id

    async def _check_leading(self, last: EntryId | None, ours: EntryId) -> None:
        """Returns if nobody wrote behind `ours`, or nothing is left of it.

        A later leader that is not ready is waited for: should the store lose the journal before that leader has read
        it, nobody knows what we know. One that cannot know it, or does not become ready, is followed by us. Raises
        FencedError, or JournalLostError.
        """
        backoff_s = _MIN_BACKOFF_S
        give_up_s = time.monotonic() + self._unready_s
        while last is not None and last > ours:
            later = await self._later_leader()
            if last.epoch == self.epoch or (later is not None and later.is_ready):
                raise self._fenced(last)
            if later is not None:
                self.health.note_trouble("another scheduler is about to lead")
                if not self.is_ready and (self._is_whole or later.says_all_again):
                    raise self._fenced(last)
                if not (self._is_whole and later.follows_ours) or time.monotonic() >= give_up_s:
                    log.error("another scheduler begins to lead without what this one knows", last=str(last))
                    raise JournalLostError(f"another scheduler began at {last} without what was acknowledged")
                await self._pause(backoff_s)
                backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
            last = await self._last_id()

    async def _later_leader(self, before: int | None = None) -> LaterLeader | None:
        """Who has begun an epoch later than ours, and earlier than `before`. None: nobody, as far as is to be seen."""
        found: LaterLeader | None = None
        follows_ours = False
        known_epoch = self.epoch if before is None else self._known_epoch
        from_id = self.last_id if before is None else EntryId(known_epoch + 1, 0)
        while True:
            at = from_id
            page = await self._until_answered(lambda at=at: self._store.read_entries(at, _PAGE, is_urgent=True))  # type: ignore[misc]
            for stored in page:
                if before is not None and stored.entry_id.epoch >= before:
                    return found
                follows_ours |= stored.entry_id == self.last_id
                if stored.entry_id.epoch > known_epoch:
                    found = LaterLeader.of(stored, found, follows_ours=follows_ours)
                    if found.is_ready:
                        return found
            if len(page) < _PAGE:
                return found
            from_id = EntryId(page[-1].entry_id.epoch, page[-1].entry_id.seq + 1)

    def _fenced(self, last: EntryId) -> FencedError:
        return FencedError(f"a newer scheduler took over: it wrote {last}, we are at {self.last_id}")

    def _check_not_lost(self, last: EntryId | None) -> None:
        if last is None or last < self.last_id:
            log.error("the store lost acknowledged entries", last=str(last), acknowledged=str(self.last_id))
            raise JournalLostError(f"the store has the journal up to {last}, and had acknowledged {self.last_id}")

    async def _last_id(self) -> EntryId | None:
        return await self._until_answered(self._store.last_entry_id)

    async def _until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What is asked must be harmless to repeat."""
        backoff_s = _MIN_BACKOFF_S
        while True:
            try:
                self.num_commands += 1
                with self.health.asking():
                    return await ask()
            except StoreUnavailableError as error:
                self.health.note_trouble(error.message)
                await self._pause(backoff_s)
                backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    def _note_written(self, entry_id: EntryId, elapsed_ns: int) -> None:
        self.last_id = entry_id
        self.num_entries += 1
        if self.write_ns == 0:
            self.write_ns = elapsed_ns
        else:
            self.write_ns += round(_WRITE_NS_WEIGHT * (elapsed_ns - self.write_ns))
        self._note_answer()

    def _note_answer(self) -> None:
        if self._is_whole:
            self.health.note_answer()

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._give_up.wait(), seconds)
        except TimeoutError:
            return
        raise GaveUpError

    def _leader_start(self, *, says_all_again: bool) -> bytes:
        start = pb.LeaderStart(leader_id=self._leader_id, started_unix_ns=time.time_ns(), says_all_again=says_all_again)
        return pb.JournalEntry(leader_start=start).SerializeToString()
