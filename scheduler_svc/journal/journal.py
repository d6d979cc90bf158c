"""Journal: one entry is in flight at a time, and records that come meanwhile make up the next entry.

Callers never wait: they add records, and are called back when these are durable. Knows nothing of requests beyond their
sequence numbers.

Requests and pins that live long are restated from time to time, so that the journal can be trimmed behind them; and all
of them when the store has lost the journal. A restatement has the durable state between two entries.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import structlog

from common.native_faults import CONTROL_FLOW
from common.running_histogram import RunningHistogram
from common.waits import is_set_within
from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal_counters import JournalCounters
from scheduler_svc.journal.journal_entry import PendingEntry, read_journal
from scheduler_svc.journal.journal_health import JournalHealth
from scheduler_svc.journal.journal_writer import UNREADY_S, GaveUpError, JournalWriter
from scheduler_svc.journal.needed_entries import NeededEntries, Restate, restating_alone
from scheduler_svc.journal.store import (
    JOURNAL_START,
    EntryId,
    FencedError,
    JournalLostError,
    Store,
    StoreError,
    StoreUnavailableError,
)
from scheduler_svc.journal.trimmer import Trimmer

log = structlog.get_logger()

_FOLLOWED_LEASES = 2  # in which a standby that knows more than an emptied journal begins to lead


class Journal:
    """Owned by the event loop's thread. Records are acknowledged in the order in which they were added."""

    def __init__(
        self,
        store: Store,
        *,
        leader_id: str,
        max_entry_bytes: int = 1 << 20,
        trim_every: int = 512,
        restate_entries: int = 4096,
        restate_bytes: int = 64 << 20,
        probe_every_s: float = 0.5,
        late_s: float = 0.4,
        close_timeout_s: float = 5.0,
        unready_s: float = UNREADY_S,
        lease_s: float = 1.5,
    ) -> None:
        """Take a store that is open.

        Args:
            store: where entries go.
            leader_id: names this process in the journal.
            max_entry_bytes: about so much goes into one entry; more records begin another one.
            trim_every: entries between two trims; large ones are trimmed sooner.
            restate_entries: entries written behind a request or pin, after which it is restated,
            restate_bytes: or bytes of news behind it.
            probe_every_s: time between two probes of the store while nothing is written.
            late_s: time without an answer after which the store is in trouble.
            close_timeout_s: longest wait of `close` for pending records.
            unready_s: time for a later leader to become ready, before this one goes on.
            lease_s: life of a lease: who is without the store for so long may have been followed.
        """
        self._store = store
        self._leader_id = leader_id
        self._max_entry_bytes = max_entry_bytes
        self._trimmer = Trimmer(store, trim_every)
        self._needed = NeededEntries(restate_entries=restate_entries, restate_bytes=restate_bytes)
        self._writer = JournalWriter(
            store, leader_id, late_s=late_s, unready_s=unready_s, oldest_needed=lambda: self._needed.oldest
        )
        self._lease_s = lease_s
        self._probe_every_s = probe_every_s
        self._close_timeout_s = close_timeout_s
        self._pending: deque[PendingEntry] = deque()
        self._in_flight: PendingEntry | None = None
        self.num_pending = 0  # records that are not known to be durable
        self.pending_bytes = 0  # of these together
        self.on_acknowledged: Callable[[], None] | None = None  # called when an entry is no longer pending
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopped.set()
        self._seen_id = JOURNAL_START  # the last entry when it was last looked back
        self._looked_back_s = 0.0
        self._later_epoch = 0  # the latest of another scheduler that had the lease
        self._is_whole = True
        self._closing = False
        self._is_handed_over = False  # the entry that ends the epoch is pending or written: nothing may follow it
        self._ended_by: StoreError | None = None

    @property
    def is_ready(self) -> bool:
        """True if this leader may serve: see `begin`."""
        return self._writer.is_ready

    @property
    def stats(self) -> JournalCounters:
        writer = self._writer
        return JournalCounters(
            epoch=writer.epoch,
            entries=writer.num_entries,
            commands=writer.num_commands,
            pending=self.num_pending,
            pending_bytes=self.pending_bytes,
            write_ns=writer.write_ns,
            degraded=writer.health.is_degraded,
            num_recreated=writer.num_recreated,
            num_needed=len(self._needed),
            oldest_needed=self._needed.oldest,
            num_restated=self._needed.num_restated,
        )

    @property
    def write_s(self) -> RunningHistogram:
        """Times from sending an entry to its acknowledgement, in seconds."""
        return self._writer.write_s

    @property
    def health(self) -> JournalHealth:
        """Health of the store, as its answers show it."""
        return self._writer.health

    async def open(self, *, after_epoch: int = 0, says_all_again: bool = False) -> int:
        """Take a new epoch and begin it with a LeaderStart, which fences every earlier leader.

        Returns the epoch, which is later than `after_epoch` though the store may have lost that. `says_all_again` tells
        other standbys that this one knows what the store has lost. Raises
        StoreUnavailableError, or FencedError if other leaders keep coming in between.
        """
        return await self._writer.take_epoch(after_epoch, says_all_again=says_all_again)

    def admit(self, admission: pb.Admission, restate: Restate | None = None) -> "asyncio.Future[None]":
        """Copy an admission into the next entry, where it is needed by its sequence until `forget`.

        `restate` writes the durable state of the request; by default that is the admission. The future is done once the
        admission is durable.

        It fails with StoreUnavailableError or FencedError if the journal ends before that. Cancelling it does not
        withdraw the admission.
        """
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._ended_by is not None or self._is_handed_over:
            accepted.set_exception(self._ended_by or StoreUnavailableError("the journal was handed over"))
            return accepted
        entry = self._open_entry()
        bytes_before = entry.num_bytes
        entry.add_admission(admission, accepted)
        self._needed.add_coming(admission.sequence, restate or restating_alone(admission))
        self._count_added(1, entry.num_bytes - bytes_before)
        return accepted

    def append(
        self,
        *,
        sequences: Sequence[int] = (),
        tokens: Sequence[int] = (),
        logprobs: Sequence[pb.DeltaLogprobs] = (),
        prompt_logprobs: Sequence[pb.PromptTokenLogprobs] = (),
        beam_steps: Sequence[pb.BeamStep] = (),
        pauses: Sequence[pb.PauseChange] = (),
        sample_finishes: Sequence[pb.SampleEnd] = (),
        preemptions: Sequence[pb.Preemption] = (),
        finishes: Sequence[pb.Finish] = (),
        pins: Sequence[pb.PinChange] = (),
        deletions: Sequence[str] = (),
        needed: Mapping[Hashable, Restate] = MappingProxyType({}),
        on_durable: Callable[[], None] | None = None,
    ) -> None:
        """Copy the records of one iteration of one worker into the next entry.

        Args:
            sequences: number of each token's sequence.
            tokens: beside `sequences`.
            logprobs: their `delta` is an index into `tokens`.
            prompt_logprobs: of requests, each once.
            beam_steps: of beam searches.
            pauses: begun and ended.
            sample_finishes: of samples that ended by themselves.
            preemptions: of requests.
            finishes: of requests that ended.
            pins: made or removed.
            deletions: ids of requests that have ended and whose records are deleted: no leader makes them again.
            needed: keys that begin here and are needed until `forget`, each with the function that restates it.
            on_durable: called after the store's acknowledgement, in the order of the calls of append. Never, if
                the journal ends before. None: nobody waits for it.
        """
        if self._ended_by is not None or self._is_handed_over:
            return
        entry = self._open_entry()
        bytes_before = entry.num_bytes
        if logprobs:
            entry.add_logprobs(logprobs, entry.num_deltas)
        entry.add_deltas(sequences, tokens)
        num_records = entry.num_records
        for name, records in (
            ("prompt_logprobs", prompt_logprobs),
            ("beam_steps", beam_steps),
            ("pauses", pauses),
            ("sample_finishes", sample_finishes),
            ("preemptions", preemptions),
            ("finishes", finishes),
            ("pins", pins),
        ):
            if records:
                entry.add_records(name, records)
        if deletions:
            entry.add_deletions(deletions)
        for key, restate in needed.items():
            self._needed.add_coming(key, restate)
            entry.needed.append(key)
        if on_durable is not None:
            entry.on_durable.append(on_durable)
        self._count_added(len(tokens) + entry.num_records - num_records, entry.num_bytes - bytes_before)

    def keep_entry(self, key: Hashable, entry_id: EntryId, restate: Restate) -> None:
        """Keep an entry of an earlier leader that a request (by its sequence) or a pin still needs.

        Call it after `read`, before `begin`, which may have to restate it. `restate` writes the durable state.
        """
        assert not self._writer.is_ready, "begin() would not know it"
        self._needed.keep_entry(key, entry_id, restate)

    def restate_by(self, key: Hashable, restate: Restate) -> None:
        """Restate a kept request or pin by this function from now on."""
        self._needed.restate_by(key, restate)

    async def read(self, from_id: EntryId = JOURNAL_START) -> AsyncIterator[tuple[EntryId, pb.JournalEntry]]:
        """Read the entries of earlier leaders from `from_id` on. Call it after `open`, which fences them, before `run`.

        Raises JournalDamagedError at a damaged entry, JournalLostError if the store loses the journal meanwhile,
        FencedError if another leader has begun behind us, StoreUnavailableError.
        """
        epoch = self._writer.epoch
        assert epoch, "open() comes first"
        async for entry_id, entry in read_journal(self._store, from_id):
            if entry_id.epoch > epoch:
                raise FencedError(f"another scheduler began to lead: it wrote {entry_id}, we are of epoch {epoch}")
            if entry_id.epoch == epoch:
                return
            self._writer.record_read(entry_id.epoch)
            num_bytes = entry.ByteSize()
            self._needed.count_read(num_bytes)
            self._trimmer.count_read(1, num_bytes)
            yield entry_id, entry
        raise JournalLostError("the store lost the journal while it was read")

    def count_followed(self, num_entries: int, num_bytes: int) -> None:
        """Count entries that were read before, as a standby, and are not read again."""
        self._trimmer.count_read(num_entries, num_bytes)

    def rewrite_on_begin(self) -> None:
        """Make `begin` rewrite the live state before anything else: the store has lost some of it."""
        self._is_whole = False

    async def begin(self) -> None:
        """Declare this leader ready, after `read`: from now on it may serve.

        Raises FencedError if another one has begun to lead, JournalLostError if the store has lost what was read.
        """
        self._needed.sort()
        if self._is_whole:
            # Do not write into a journal that was emptied and begun again by another leader whose clock is behind ours:
            # its entries are below ours, which would fence it though we have read nothing of it.
            await self._writer.probe()
            await self._writer.write_ready()
        else:
            await self._rewrite_live_state()

    async def confirm_leading(self) -> None:
        """Raise FencedError if a newer leader writes the journal, StoreUnavailableError if that is not known yet.

        It is not known while a newer one has begun, and as long as our last entry is not there: the store has lost the
        journal, and a newer leader's entries with ours. Uses another connection than the writer, which takes a broken
        one as a reason to look for lost entries.
        """
        epoch = self._writer.epoch
        wrote = await self._store.first_entry_id(EntryId(epoch + 1, 0))
        if wrote is not None and self._writer.health.is_degraded:
            raise StoreUnavailableError("another scheduler is about to lead")
        if wrote is not None:
            raise FencedError(f"a newer scheduler took over: it wrote {wrote}, we are of epoch {epoch}")
        ours = await self._store.first_entry_id(self._writer.last_id)  # later ones of ours may come meanwhile
        if ours is None:
            self.probe_soon()
            raise StoreUnavailableError("the store has lost the journal, and another scheduler may lead")

    def forget(self, key: Hashable) -> None:
        """Forget a request (by its sequence) or a pin: its entries are not needed any more."""
        self._needed.forget(key)

    def probe_soon(self) -> None:
        """Probe the store now, if no entry is in flight, since it seems silent."""
        self._wake.set()

    def look_for_leader(self, epoch: int) -> None:
        """Probe the store now, since another scheduler has the lease, and leads in this epoch; 0: in none yet.

        If that is later than ours, the store has lost the journal meanwhile, and nothing lives here, then we end: the
        other, or a standby of it, may know more.
        """
        self._later_epoch = max(self._later_epoch, epoch)
        self.probe_soon()

    async def run(self) -> None:
        """Write entries, as the one writer. Returns after `close`; raises FencedError when a newer leader is ready."""
        assert self._writer.epoch, "open() comes first"
        self._stopped.clear()
        reason: StoreError = StoreUnavailableError("the journal was closed")
        try:
            if not self._writer.is_ready:
                await self.begin()
            while await self._wait_for_pending():
                await self._write_next()
        except GaveUpError:
            if self._has_to_write:
                log.error("journal closed with unwritten records", pending=self.num_pending)
        except FencedError as error:
            reason = error
            raise
        finally:
            await self._end(reason)
            self._stopped.set()

    async def hand_over(self) -> bool:
        """Close with a LeaderEnd as the last entry. Returns True if that, and so every entry before it, is durable."""
        is_durable = asyncio.get_running_loop().create_future()
        end = PendingEntry()
        end.set_leader_end(self._leader_id, is_durable)
        self._pending.append(end)
        self._is_handed_over = True
        await self.close()
        return is_durable.done() and is_durable.exception() is None

    async def close(self) -> None:
        """Write pending records, as long as the time limit allows, and end `run`.

        Does not wait for the store if there is nothing to write, and nothing to rewrite after a loss.
        """
        self._closing = True
        self._wake.set()
        if not self._has_to_write:
            self._writer.give_up()
        await asyncio.sleep(0)  # `run` may have been begun just now, and has its turn before this
        if not await is_set_within(self._stopped, self._close_timeout_s):
            self._writer.give_up()
            await self._stopped.wait()
        await self._end(StoreUnavailableError("the journal was closed"))

    @property
    def _has_to_write(self) -> bool:
        return bool(self._pending or self._in_flight is not None or len(self._needed))

    def _open_entry(self) -> PendingEntry:
        if not self._pending or self._pending[-1].num_bytes >= self._max_entry_bytes:
            self._pending.append(PendingEntry())
        return self._pending[-1]

    def _count_added(self, num_records: int, num_bytes: int) -> None:
        self.num_pending += num_records
        self.pending_bytes += num_bytes
        self._wake.set()

    async def _wait_for_pending(self) -> bool:
        while not self._pending:
            if self._closing:
                return False
            self._wake.clear()
            await is_set_within(self._wake, self._probe_every_s)
            if not self._pending and not self._closing:  # woken by `probe_soon`, or by nobody for a while
                await self._probe()
        return self._ended_by is None

    async def _probe(self) -> None:
        try:
            await self._writer.probe()
        except JournalLostError:
            await self._rewrite_live_state()

    async def _write_next(self) -> None:
        """Write one entry. Not a part of `run`, which would keep the entry and its requests alive while it waits."""
        self._in_flight = entry = self._pending.popleft()
        if not entry.ends_epoch:
            entry.restate(self._needed.restate_due)
        entry_id = await self._write(entry)
        self._in_flight = None
        self._acknowledge(entry, entry_id)
        self._trimmer.trim_if_due(self._writer.num_entries, self._needed.oldest or entry_id, entry.num_bytes)

    async def _write(self, entry: PendingEntry) -> EntryId:
        payload = entry.encode()
        while True:
            try:
                await self._look_back()
                return await self._writer.write(payload)
            except JournalLostError:
                await self._rewrite_live_state()

    async def _look_back(self) -> None:
        """Check now and then that an entry of ours from a while ago is still there.

        A store that was emptied, and in which another leader has begun an epoch before ours, takes our entries. Raises
        JournalLostError, GaveUpError.
        """
        now_s = time.monotonic()
        if now_s < self._looked_back_s + self._probe_every_s:
            return
        seen, self._seen_id, self._looked_back_s = self._seen_id, self._writer.last_id, now_s
        if seen > self._trimmer.trimmed_to:
            await self._writer.confirm_entry(seen)

    async def _rewrite_live_state(self) -> None:
        """Rewrite every live request and pin after a loss in the store, before anything new is acknowledged."""
        while True:
            num_restated = 0
            holds_nothing = self._needed.oldest is None  # what is on its way was not accepted yet
            if holds_nothing and self._later_epoch > self._writer.epoch:
                raise FencedError(f"another scheduler led in epoch {self._later_epoch}, and nothing lives here")
            with suppress(JournalLostError):  # then again
                if holds_nothing and self._writer.silent_s() > self._lease_s:
                    await self._writer.wait_for_another(_FOLLOWED_LEASES * self._lease_s)
                await self._writer.begin_again(holds_nothing=holds_nothing)
                for restated, keys in self._needed.restate_all():
                    entry_id = await self._writer.write(restated.SerializeToString())
                    self._needed.record_written(keys, entry_id)
                    num_restated += len(keys)
                await self._writer.write_ready()
                self._seen_id = JOURNAL_START
                log.warning("every live request was written into the journal again", num_restated=num_restated)
                return

    def _acknowledge(self, entry: PendingEntry, entry_id: EntryId) -> None:
        self.num_pending -= entry.num_records
        self.pending_bytes -= entry.num_bytes
        self._needed.record_written(entry.needed, entry_id, entry.num_bytes)
        for accepted in entry.accepted:
            if not accepted.done():
                accepted.set_result(None)
        for on_durable in entry.on_durable:
            try:
                on_durable()
            except CONTROL_FLOW:
                raise
            except BaseException:
                log.exception("a callback of the journal failed")
        if self.on_acknowledged is not None:
            self.on_acknowledged()

    async def _end(self, reason: StoreError) -> None:
        """Fail the admissions that still wait. Idempotent."""
        if self._ended_by is not None:
            return
        self._ended_by = reason
        unwritten = [*([self._in_flight] if self._in_flight is not None else []), *self._pending]
        for accepted in (accepted for entry in unwritten for accepted in entry.accepted):
            if not accepted.done():
                accepted.set_exception(reason)
        await self._trimmer.close()
