"""Epochs of leaders: a new one that no other leader takes, and the leader of a later one.

Pure but for the time of day. Knows of entries only what they say of leaders.
"""

import time
from dataclasses import dataclass
from zlib import crc32

from scheduler_svc.journal.journal_entry import decode, is_news
from scheduler_svc.journal.store import EntryId, JournalDamagedError, StoredEntry

_NONCE_BITS = 11  # with milliseconds in the other bits an epoch is exact in the store's floating-point scripts


def epoch_after(floor: int, leader_id: str) -> int:
    """New epoch, later than `floor`, that no other leader takes: the time in milliseconds and a hash of the leader."""
    nonce = crc32(leader_id.encode()) & ((1 << _NONCE_BITS) - 1)
    epoch = (time.time_ns() // 1_000_000 << _NONCE_BITS) | nonce
    return epoch if epoch > floor else ((floor >> _NONCE_BITS) + 1 << _NONCE_BITS) | nonce


@dataclass(frozen=True, slots=True)
class LaterLeader:
    """Last leader that has begun behind our last entry."""

    last_id: EntryId  # of the entries looked at
    is_ready: bool  # it, or a leader before it
    says_all_again: bool
    follows_ours: bool  # our last entry was there when it began

    @classmethod
    def of(cls, stored: StoredEntry, before: "LaterLeader | None", *, follows_ours: bool) -> "LaterLeader":
        """Leader as this entry shows it, behind earlier ones. An unreadable entry begins no epoch."""
        try:
            entry = decode(stored)
        except JournalDamagedError:
            return cls(stored.entry_id, is_ready=True, says_all_again=False, follows_ours=follows_ours)
        begins = entry.HasField("leader_start")
        says_all_again = entry.leader_start.says_all_again if begins or before is None else before.says_all_again
        is_ready = is_news(entry) or (before is None and not begins)  # the rest was trimmed
        return cls(stored.entry_id, is_ready, says_all_again, follows_ours)
