"""The journal: one entry is on its way at a time, and all that happens meanwhile is the next entry.

Callers never wait: they hand in admissions and iterations, and are told when these are durable. Knows nothing of
requests beyond their sequence numbers.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import structlog

from protos import journal_pb2 as pb
from scheduler_svc.journal.journal_entry import PendingEntry, read_journal
from scheduler_svc.journal.journal_writer import GaveUpError, JournalWriter
from scheduler_svc.journal.store import JOURNAL_START, EntryId, FencedError, Store, StoreError, StoreUnavailableError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """A picture of now. Counters run from the journal's opening."""

    epoch: int
    entries: int  # acknowledged
    commands: int  # sent on the journal's connection, the failed ones included
    pending: int  # admissions, tokens and finishes not yet acknowledged
    pending_bytes: int  # about
    write_ns: int  # moving average from sending an entry to its acknowledgement
    degraded: bool  # the store does not take entries now
    num_recreated: int  # times that the store had lost the journal


class Journal:
    """Owned by the event loop's thread. What was handed in is acknowledged in the order of handing in."""

    def __init__(
        self,
        store: Store,
        *,
        leader_id: str,
        max_entry_bytes: int = 1 << 20,
        trim_every: int = 512,
        close_timeout_s: float = 5.0,
    ) -> None:
        """Takes a store that is open.

        Args:
            store: where entries go.
            leader_id: names this process in the journal.
            max_entry_bytes: after about this much, what piles up is continued in another entry.
            trim_every: entries between two trims.
            close_timeout_s: how long `close` waits for what is pending.
        """
        self._store = store
        self._leader_id = leader_id
        self._writer = JournalWriter(store, leader_id)
        self._max_entry_bytes = max_entry_bytes
        self._trim_every = trim_every
        self._next_trim = trim_every
        self._trimming: asyncio.Task[None] | None = None
        self._close_timeout_s = close_timeout_s
        self._pending: deque[PendingEntry] = deque()
        self._in_flight: PendingEntry | None = None
        self._num_pending = 0
        self._pending_bytes = 0
        # By sequence, in order of admission: the entry of each admission still needed; None until it is durable.
        self._needed: dict[int, EntryId | None] = {}
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopped.set()
        self._closing = False
        self._is_handed_over = False  # the entry that ends the epoch is pending or written: nothing may follow it
        self._ended_by: StoreError | None = None

    @property
    def stats(self) -> JournalStats:
        writer = self._writer
        return JournalStats(
            epoch=writer.epoch,
            entries=writer.num_entries,
            commands=writer.num_commands,
            pending=self._num_pending,
            pending_bytes=self._pending_bytes,
            write_ns=writer.write_ns,
            degraded=writer.is_degraded,
            num_recreated=writer.num_recreated,
        )

    async def open(self) -> int:
        """Takes a new epoch and begins it with a LeaderStart, which fences every earlier leader.

        Returns the epoch. Raises StoreUnavailableError, or FencedError if other leaders keep coming in between.
        """
        return await self._writer.take_epoch()

    def admit(self, admission: pb.Admission) -> "asyncio.Future[None]":
        """Copies the admission into the next entry. The future is done once it is durable.

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
        self._needed[admission.sequence] = None
        self._note_added(1, entry.num_bytes - bytes_before)
        return accepted

    def append(
        self,
        *,
        sequences: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[pb.DeltaLogprobs] = (),
        prompt_logprobs: Sequence[pb.PromptTokenLogprobs] = (),
        beam_steps: Sequence[pb.BeamStep] = (),
        sample_finishes: Sequence[pb.SampleEnd] = (),
        finishes: Sequence[pb.Finish] = (),
        on_durable: Callable[[], None],
    ) -> None:
        """Copies what one iteration of one worker brought into the next entry.

        Args:
            sequences: of each token.
            tokens: beside `sequences`.
            logprobs: their `delta` is an index into `tokens`.
            prompt_logprobs: of requests, each once.
            beam_steps: of beam searches.
            sample_finishes: of samples that ended by themselves.
            finishes: of requests that ended.
            on_durable: called after the store's acknowledgement, in the order of the calls of append. Never, if
                the journal ends before.
        """
        if self._ended_by is not None or self._is_handed_over:
            return
        entry = self._open_entry()
        bytes_before = entry.num_bytes
        if logprobs:
            entry.add_logprobs(logprobs, entry.num_deltas)
        entry.add_deltas(sequences, tokens)
        num_records = entry.num_records
        if prompt_logprobs:
            entry.add_prompt_logprobs(prompt_logprobs)
        if beam_steps:
            entry.add_beam_steps(beam_steps)
        if sample_finishes:
            entry.add_sample_finishes(sample_finishes)
        if finishes:
            entry.add_finishes(finishes)
        entry.on_durable.append(on_durable)
        self._note_added(len(tokens) + entry.num_records - num_records, entry.num_bytes - bytes_before)

    def keep(self, sequence: int, entry_id: EntryId) -> None:
        """Says that the entry of an earlier leader's admission is still needed. In their order, before any `admit`."""
        self._needed[sequence] = entry_id

    async def read(self, from_id: EntryId = JOURNAL_START) -> AsyncIterator[tuple[EntryId, pb.JournalEntry]]:
        """All entries of earlier leaders from `from_id` on. After `open`, so that they cannot add any, before `run`.

        Raises DataLossError at one that is damaged, StoreUnavailableError.
        """
        assert self._writer.epoch, "open() comes first"
        async for entry_id, entry in read_journal(self._store, from_id):
            if entry_id.epoch >= self._writer.epoch:
                return
            yield entry_id, entry

    def forget(self, sequence: int) -> None:
        """Says that nothing of this request has to be read from the journal again."""
        self._needed.pop(sequence, None)

    async def run(self) -> None:
        """The one writer. Returns after `close`; raises FencedError when a newer leader has taken over."""
        assert self._writer.epoch, "open() comes first"
        self._stopped.clear()
        reason: StoreError = StoreUnavailableError("the journal was closed")
        try:
            while await self._wait_for_pending():
                self._in_flight = entry = self._pending.popleft()
                entry_id = await self._writer.write(entry.encode())
                self._in_flight = None
                self._acknowledge(entry, entry_id)
                self._trim_now_and_then()
        except GaveUpError:
            log.error("journal closed with unwritten records", pending=self._num_pending)
        except FencedError as error:
            reason = error
            raise
        finally:
            await self._end(reason)
            self._stopped.set()

    async def hand_over(self) -> bool:
        """As `close`, with a LeaderEnd as the last entry. Returns whether that is durable, and so all before it."""
        is_durable = asyncio.get_running_loop().create_future()
        end = PendingEntry()
        end.set_leader_end(self._leader_id, is_durable)
        self._pending.append(end)
        self._is_handed_over = True
        await self.close()
        return is_durable.done() and is_durable.exception() is None

    async def close(self) -> None:
        """Writes what is pending, for as long as the time limit allows, and ends `run`."""
        self._closing = True
        self._wake.set()
        try:
            await asyncio.wait_for(self._stopped.wait(), self._close_timeout_s)
        except TimeoutError:
            self._writer.give_up()
            await self._stopped.wait()
        await self._end(StoreUnavailableError("the journal was closed"))

    def _open_entry(self) -> PendingEntry:
        if not self._pending or self._pending[-1].num_bytes >= self._max_entry_bytes:
            self._pending.append(PendingEntry())
        return self._pending[-1]

    def _note_added(self, num_records: int, num_bytes: int) -> None:
        self._num_pending += num_records
        self._pending_bytes += num_bytes
        self._wake.set()

    async def _wait_for_pending(self) -> bool:
        while not self._pending:
            if self._closing:
                return False
            self._wake.clear()
            await self._wake.wait()
        return self._ended_by is None

    def _acknowledge(self, entry: PendingEntry, entry_id: EntryId) -> None:
        self._num_pending -= entry.num_records
        self._pending_bytes -= entry.num_bytes
        for sequence in entry.admitted_sequences:
            if sequence in self._needed:
                self._needed[sequence] = entry_id
        for accepted in entry.accepted:
            if not accepted.done():
                accepted.set_result(None)
        for on_durable in entry.on_durable:
            try:
                on_durable()
            except Exception:
                log.exception("a callback of the journal failed")

    def _trim_now_and_then(self) -> None:
        num_entries = self._writer.num_entries
        if num_entries < self._next_trim or (self._trimming is not None and not self._trimming.done()):
            return
        self._next_trim = num_entries + self._trim_every
        oldest = next(iter(self._needed.values()), None)
        self._trimming = asyncio.create_task(self._trim(oldest or self._writer.last_id))

    async def _trim(self, oldest: EntryId) -> None:
        try:
            await self._store.trim(oldest)
        except StoreUnavailableError as error:
            log.warning("journal not trimmed", reason=error.message)

    async def _end(self, reason: StoreError) -> None:
        """Tells everyone who still waits. Idempotent."""
        if self._ended_by is not None:
            return
        self._ended_by = reason
        unwritten = [*([self._in_flight] if self._in_flight is not None else []), *self._pending]
        for accepted in (accepted for entry in unwritten for accepted in entry.accepted):
            if not accepted.done():
                accepted.set_exception(reason)
        if self._trimming is not None:
            self._trimming.cancel()
            await asyncio.wait([self._trimming])
