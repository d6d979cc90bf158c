"""Counters of the journal, for GetStats and for its users."""

from dataclasses import dataclass

from scheduler_svc.journal.store import EntryId


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalCounters:
    """Present values. Counters run from the journal's opening."""

    epoch: int
    entries: int  # acknowledged
    commands: int  # sent on the journal's connection, the failed ones included
    pending: int  # admissions, tokens and finishes not yet acknowledged
    pending_bytes: int  # about
    write_ns: int  # moving average from sending an entry to its acknowledgement
    degraded: bool  # the store does not take entries now
    num_recreated: int  # times that the store had lost the journal, or a part of it
    num_needed: int  # requests and pins that have to be read from it
    oldest_needed: EntryId | None  # from which on it is kept
    num_restated: int  # restatements of requests and pins, so that older entries could be trimmed
