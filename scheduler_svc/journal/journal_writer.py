"""Writer of journal entries: one after another, each exactly once, whatever the store does meanwhile.

Waits for a store that is slow, silent, restarted or full. Detects a store that has lost entries; the journal can begin
again in it, in a later epoch. Ends when a later leader that writes the store is ready.
Knows nothing of the contents of entries but which leader begins there.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from common.running_histogram import RunningHistogram, decades
from common.waits import growing_pauses, is_set_within
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
_WRITE_NS_WEIGHT = 0.1  # of the newest write in the moving average
_WRITE_S = decades((1, 2.5, 5), -5, 1)  # buckets
_PAGE = 8  # entries; one may have a megabyte
_LOOK_S = 0.1
UNREADY_S = 5.0

T = TypeVar("T")


class GaveUpError(Exception):
    """The writer was told not to wait for the store any longer. The entry may be durable or not."""


class JournalWriter:
    """Used by one task.

    Invariants: ids rise by one within an epoch. An id has the same payload however often it is sent, so that a delayed
    command does no harm. No two leaders share an epoch, whatever the store has lost: an epoch is later than each that
    the store knows, and contains the time and the leader. No new entry is sent while the last one may not have arrived.
    """

    def __init__(
        self,
        store: Store,
        leader_id: str,
        *,
        late_s: float,
        unready_s: float = UNREADY_S,
        oldest_needed: Callable[[], EntryId | None] = lambda: None,
    ) -> None:
        """Take a store that is open.

        Args:
            store: where entries go.
            leader_id: names this process in the journal.
            late_s: time without an answer after which the store is in trouble.
            unready_s: time for a later leader to become ready, before this one goes on.
            oldest_needed: returns the first entry that the store must still have; None if it need not have any.
        """
        self.epoch = 0
        self.last_id = JOURNAL_START  # acknowledged
        self.num_entries = 0  # acknowledged
        self.num_commands = 0
        self.num_recreated = 0
        self.write_ns = 0  # moving average
        self.write_s = RunningHistogram(_WRITE_S)
        self.is_ready = False  # it has served
        self.health = JournalHealth(late_s)
        self._store = store
        self._leader_id = leader_id
        self._unready_s = unready_s
        self._oldest_needed = oldest_needed
        self._known_epoch = 0  # news of later epochs are of another leader
        self._latest_epoch = 0  # of any leader that was seen in the journal
        self._familiar_epochs: set[int] = set()  # ours, and those that were read
        self._is_whole = True  # the store has each entry that it acknowledged, as far as is known
        self._is_sure = True  # it has the last one, since no command has failed after it
        self._whole_s = time.monotonic()  # when the journal was last found as we left it
        self._give_up = asyncio.Event()

    def silent_s(self) -> float:
        """Seconds since the journal was last found as we left it."""
        return time.monotonic() - self._whole_s

    async def take_epoch(self, after: int = 0, *, says_all_again: bool = False) -> int:
        """Begin an epoch later than `after` with a LeaderStart, which fences every earlier leader; returns the epoch.

        Raises StoreUnavailableError, or FencedError if other leaders keep coming in between.
        """
        pauses = growing_pauses()
        for attempt in range(1, _OPEN_ATTEMPTS + 1):
            try:
                await self._try_epoch(after, says_all_again=says_all_again)
            except (StaleEntryError, StoreFlushedError):
                pass  # another leader was faster, or the last entry is gone
            except StoreUnavailableError:
                if attempt == _OPEN_ATTEMPTS:
                    raise
                await asyncio.sleep(next(pauses))
            else:
                self._known_epoch = self.epoch
                return self.epoch
        raise FencedError("other schedulers took over while this one tried to lead")

    async def _try_epoch(self, after: int, *, says_all_again: bool) -> None:
        # The counter alone could repeat an epoch if the store lost its last count, and the journal's ids if it lost
        # the journal as well. The time may be set back; then the other two are later.
        counted = await self._store.next_epoch()
        last = await self._store.last_entry_id()
        epoch = epoch_after(max(counted, after, last.epoch if last is not None else 0), self._leader_id)
        await self._store.raise_epoch(epoch)
        self.num_commands += 2  # of the epoch
        start = pb.LeaderStart(leader_id=self._leader_id, started_unix_ns=time.time_ns(), says_all_again=says_all_again)
        payload = pb.JournalEntry(leader_start=start).SerializeToString()
        await self._store.append(EntryId(epoch, 0), payload, create=last is None)
        self.epoch, self.last_id, self._is_sure = epoch, EntryId(epoch, 0), True
        self._latest_epoch = max(self._latest_epoch, epoch)
        self._familiar_epochs.add(epoch)
        self.num_entries += 1

    def record_read(self, epoch: int) -> None:
        """Record that the entries of this epoch were read."""
        self._familiar_epochs.add(epoch)

    async def write_ready(self) -> None:
        """Write that this leader knows, and has restated, every live request: from now on it may serve.

        Raises as `write`; FencedError, too, if another leader began meanwhile and this one knows nothing more than it.
        """
        await self.write(pb.JournalEntry(leader_ready=pb.LeaderReady()).SerializeToString())
        self.is_ready = self._is_whole = True
        self._whole_s = time.monotonic()
        self._known_epoch = self.epoch
        self.health.record_answer()

    async def write(self, payload: bytes) -> EntryId:
        """Write an entry; returns its id once it is durable.

        Raises FencedError when a later leader is ready, GaveUpError after `give_up`, or JournalLostError: then nothing
        was written, and `begin_again` comes next.
        """
        started_ns = time.monotonic_ns()
        entry_id = EntryId(self.epoch, self.last_id.seq + 1)
        pauses = growing_pauses()
        is_there = may_be_there = False
        if not self._is_sure:  # another server may answer by now, which would take this entry without those before it
            await self._has_arrived(entry_id, may_be_there=False)
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
                self.health.record_trouble(error.message)
                await self._pause(next(pauses))
            is_there = await self._has_arrived(entry_id, may_be_there=may_be_there)
        self._record_written(entry_id, time.monotonic_ns() - started_ns)
        return entry_id

    async def probe(self) -> None:
        """Check that the journal is as we left it; waits for the store's answer. Raises the errors of `write`."""
        last = await self._last_id()
        await self._check_leading(last, self.last_id)
        self._check_not_lost(last)
        self._record_answer()

    async def confirm_entry(self, entry_id: EntryId) -> None:
        """Check that the store still has this entry, which was not trimmed. Raises JournalLostError, GaveUpError."""
        found = await self._until_answered(lambda: self._store.first_entry_id(entry_id, is_urgent=True))
        if found != entry_id:
            log.error("the store lost acknowledged entries", acknowledged=str(entry_id))
            raise JournalLostError(f"the store had acknowledged {entry_id}, and has it no more")

    async def begin_again(self, *, holds_nothing: bool = False) -> None:
        """Begin a later epoch in a store that has lost the journal or a part of it, or has a leader that knows less.

        The caller still holds the state in memory, writes it next, and then calls `write_ready`. Raises FencedError if
        a later leader was ready before that; with `holds_nothing` also if any other leader has begun the journal again,
        even one whose clock and epoch are behind: only it knows the requests that it has accepted. Raises GaveUpError.
        """
        if holds_nothing and (last := await self._last_id()) is not None and last.epoch not in self._familiar_epochs:
            raise FencedError(f"another scheduler began the lost journal again: it wrote {last}, nothing lives here")
        self.num_recreated += 1
        self._is_whole = False
        self.health.record_trouble("the journal is gone")
        while True:
            try:
                await self._until_answered(lambda: self._try_epoch(self._latest_epoch, says_all_again=True))
            except (StaleEntryError, StoreFlushedError):
                continue
            later = await self._later_leader(before=self.epoch)
            if later is not None and later.is_ready:  # it was so before we could say anything
                raise self._fenced(later.last_id)
            return

    async def wait_for_another(self, seconds: float) -> None:
        """Wait for another leader to begin in a journal that was emptied, for so long. Raises GaveUpError."""
        self.health.record_trouble("the journal is gone")
        log.info("waiting for a leader that may know what the store has lost", seconds=seconds, epoch=self.epoch)
        until_s = time.monotonic() + seconds
        while await self._last_id() is None and (left_s := until_s - time.monotonic()) > 0:
            await self._pause(min(left_s, _LOOK_S))

    def give_up(self) -> None:
        """Do not wait any longer for a store that does not answer."""
        self._give_up.set()

    async def _has_arrived(self, entry_id: EntryId, *, may_be_there: bool) -> bool:
        """True if an entry arrived whose acknowledgement did not.

        Raises FencedError if the journal goes on behind our last entry: we send one at a time, so another leader wrote.
        """
        last = await self._last_id()
        if last is None:
            return False  # the next attempt meets the same, and begins the journal again
        await self._check_leading(last, entry_id if may_be_there else self.last_id)
        self._check_not_lost(last)
        return last == entry_id

    async def _check_leading(self, last: EntryId | None, ours: EntryId) -> None:
        """Return if no leader wrote behind `ours`, or nothing is left of its entries.

        Waits for a later leader that is not ready: if the store loses the journal before that leader has read it, only
        we know our requests. If it cannot know them, or does not become ready, we lead behind it. Raises FencedError,
        or JournalLostError.
        """
        pauses = growing_pauses()
        give_up_s = time.monotonic() + self._unready_s
        while last is not None and last > ours:
            later = await self._later_leader()
            if last.epoch == self.epoch or (later is not None and later.is_ready):
                raise self._fenced(last)
            if later is not None:
                self.health.record_trouble("another scheduler is about to lead")
                if not self.is_ready and (self._is_whole or later.says_all_again):
                    raise self._fenced(last)
                if not (self._is_whole and later.follows_ours) or time.monotonic() >= give_up_s:
                    log.error("another scheduler begins to lead without what this one knows", last=str(last))
                    raise JournalLostError(f"another scheduler began at {last} without what was acknowledged")
                if (oldest := self._oldest_needed()) is not None:
                    await self.confirm_entry(oldest)  # our last entry may be there, and those before it be lost
                await self._pause(next(pauses))
            last = await self._last_id()

    async def _later_leader(self, before: int | None = None) -> LaterLeader | None:
        """Leader that has begun an epoch later than ours; None if none is seen, or none was ready before `before`."""
        found: LaterLeader | None = None
        follows_ours = False
        known_epoch = self.epoch if before is None else self._known_epoch
        from_id = self.last_id if before is None else EntryId(known_epoch + 1, 0)
        while True:
            at = from_id
            page = await self._until_answered(lambda at=at: self._store.read_entries(at, _PAGE, is_urgent=True))  # type: ignore[misc]
            for stored in page:
                if before is not None and stored.entry_id.epoch >= before:
                    return None
                follows_ours |= stored.entry_id == self.last_id
                self._latest_epoch = max(self._latest_epoch, stored.entry_id.epoch)
                if stored.entry_id.epoch > known_epoch:
                    found = LaterLeader.of(stored, found, follows_ours=follows_ours)
                    if found.is_ready:
                        return found
            if len(page) < _PAGE:
                return found
            from_id = EntryId(stored.entry_id.epoch, stored.entry_id.seq + 1)

    def _fenced(self, last: EntryId) -> FencedError:
        return FencedError(f"a newer scheduler took over: it wrote {last}, we are at {self.last_id}")

    def _check_not_lost(self, last: EntryId | None) -> None:
        if last is None or last < self.last_id:
            log.error("the store lost acknowledged entries", last=str(last), acknowledged=str(self.last_id))
            raise JournalLostError(f"the store has the journal up to {last}, and had acknowledged {self.last_id}")
        self._is_sure = True

    async def _last_id(self) -> EntryId | None:
        return await self._until_answered(self._store.last_entry_id)

    async def _until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the store until it answers. The command must be harmless to repeat."""
        pauses = growing_pauses()
        while True:
            try:
                self.num_commands += 1
                with self.health.asking():
                    return await ask()
            except StoreUnavailableError as error:
                self._is_sure = False
                self.health.record_trouble(error.message)
                await self._pause(next(pauses))

    def _record_written(self, entry_id: EntryId, elapsed_ns: int) -> None:
        self.last_id = entry_id
        self.num_entries += 1
        self.write_s.observe(elapsed_ns / 1e9)
        if self.write_ns == 0:
            self.write_ns = elapsed_ns
        else:
            self.write_ns += round(_WRITE_NS_WEIGHT * (elapsed_ns - self.write_ns))
        self._record_answer()

    def _record_answer(self) -> None:
        if self._is_whole:
            self._whole_s = time.monotonic()
            self.health.record_answer()

    async def _pause(self, seconds: float) -> None:
        if await is_set_within(self._give_up, seconds):
            raise GaveUpError
