"""Writes one journal entry after another, each exactly once, whatever the store does meanwhile.

A store that is slow, silent, restarted or full is waited for. One that has lost entries is found out, and the journal
can be begun again in it. One that another leader writes ends the writer. Knows nothing of what is in an entry but its
own LeaderStart.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal_health import JournalHealth
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

T = TypeVar("T")


class GaveUpError(Exception):
    """The writer was told not to wait for the store any longer. Whether the entry is durable is unknown."""


class JournalWriter:
    """Used by one task.

    Invariants: ids rise by one within an epoch. An id carries the same payload however often it is sent, so that a
    command delayed on its way does no harm; only after a loss the id of what did not arrive carries a LeaderStart,
    behind which everything is said again. Nothing new is sent while it is unknown whether the last entry arrived.
    """

    def __init__(self, store: Store, leader_id: str, *, late_s: float) -> None:
        self.epoch = 0
        self.last_id = JOURNAL_START  # acknowledged
        self.num_entries = 0  # acknowledged
        self.num_commands = 0
        self.num_recreated = 0
        self.write_ns = 0  # moving average
        self.health = JournalHealth(late_s)
        self._store = store
        self._leader_id = leader_id
        self._is_whole = True  # as far as we know: the store has all that it acknowledged
        self._give_up = asyncio.Event()

    async def take_epoch(self, after: int = 0) -> int:
        """Begins an epoch later than `after` with a LeaderStart, which fences every earlier leader, and returns it.

        Raises StoreUnavailableError, or FencedError if other leaders keep coming in between.
        """
        for attempt in range(1, _OPEN_ATTEMPTS + 1):
            try:
                return await self._try_epoch(after)
            except StaleEntryError:
                continue  # another leader was faster
            except StoreUnavailableError:
                if attempt == _OPEN_ATTEMPTS:
                    raise
                await asyncio.sleep(min(_MIN_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S))
        raise FencedError("other schedulers took over while this one was about to lead")

    async def _try_epoch(self, after: int) -> int:
        # The counter alone could repeat an epoch if the store lost its last count; the journal's ids cannot.
        epoch = await self._store.next_epoch()
        if epoch <= after:
            await self._store.raise_epoch(after)
            epoch = await self._store.next_epoch()
        last = await self._store.last_entry_id()
        if last is not None:
            epoch = max(epoch, last.epoch + 1)
        self.num_commands += 2  # the epoch is counted on another connection
        await self._store.append(EntryId(epoch, 0), self._leader_start(), create=True)
        self.epoch, self.last_id = epoch, EntryId(epoch, 0)
        self.num_entries += 1
        return epoch

    async def write(self, payload: bytes) -> EntryId:
        """Returns the id under which the payload is durable.

        Raises FencedError when a newer leader writes, GaveUpError after `give_up`, or JournalLostError: then nothing
        was written, and `begin_again` comes next.
        """
        return await self._write(payload, create=False)

    async def probe(self) -> None:
        """Looks whether the journal is as we left it, and waits until the store says so. Raises as `write` does."""
        last = await self._last_id()
        if last is not None and last > self.last_id:
            raise self._fenced(last)
        self._check_not_lost(last)
        self._note_answer()

    async def begin_again(self) -> None:
        """Begins the journal anew, in the same epoch, in a store that has lost it or a part of it.

        Memory still holds the state, which the caller writes next, and then calls `note_whole`. Raises as `write` does.
        """
        self.num_recreated += 1
        self._is_whole = False
        self.health.note_trouble("the journal is gone")
        await self._until_answered(lambda: self._store.raise_epoch(self.epoch))
        await self._write(self._leader_start(), create=True)

    def note_whole(self) -> None:
        """All that the store had lost is written again."""
        self._is_whole = True
        self.health.note_answer()

    def give_up(self) -> None:
        """From now on a store that does not answer is not waited for."""
        self._give_up.set()

    async def _write(self, payload: bytes, *, create: bool) -> EntryId:
        started_ns = time.monotonic_ns()
        entry_id = self._next_id()
        backoff_s = _MIN_BACKOFF_S
        is_there = may_be_there = False
        while not is_there:
            try:
                self.num_commands += 1
                with self.health.asking():
                    await self._store.append(entry_id, payload, create=create)
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

    async def _find_out(self, entry_id: EntryId, *, may_be_there: bool) -> bool:
        """Whether an entry arrived whose acknowledgement did not.

        Raises FencedError if the journal goes on behind what we sent: we send one entry at a time, so that was
        someone else.
        """
        last = await self._last_id()
        if last is None:
            return False  # the next attempt meets the same, and begins the journal again
        if last > entry_id or (last == entry_id and not may_be_there):
            raise self._fenced(last)
        self._check_not_lost(last)
        return last == entry_id

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

    def _next_id(self) -> EntryId:
        return EntryId(self.epoch, self.last_id.seq + 1)

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

    def _leader_start(self) -> bytes:
        start = pb.LeaderStart(leader_id=self._leader_id, started_unix_ns=time.time_ns())
        return pb.JournalEntry(leader_start=start).SerializeToString()
