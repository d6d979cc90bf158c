"""Epochs that no two leaders share, and what entries behind ours say of the leader that wrote them."""

import time
from zlib import crc32

import pytest

from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.leader_epochs import LaterLeader, epoch_after
from scheduler_svc.journal.store import EntryId, StoredEntry
from tests.scheduler.journal_setup import admission

NOW_MS = 1_700_000_000_123
LEADER_IDS = [f"scheduler-{number}" for number in range(32)]
START = pb.JournalEntry(leader_start=pb.LeaderStart())
START_AGAIN = pb.JournalEntry(leader_start=pb.LeaderStart(says_all_again=True))
RESTATEMENT = pb.JournalEntry(restatements=[pb.Restatement(admission=admission(1))])
READY = pb.JournalEntry(leader_ready=pb.LeaderReady())


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: NOW_MS * 1_000_000 + 999_999)


def test_an_epoch_is_the_time_in_milliseconds_and_a_hash_of_its_leader() -> None:
    epochs = [epoch_after(0, each) for each in LEADER_IDS]
    assert {epoch >> 11 for epoch in epochs} == {NOW_MS}
    assert len(set(epochs)) == len(LEADER_IDS)
    assert {epoch & 1 for epoch in epochs} == {0, 1}  # every bit of the hash counts
    assert all(float(epoch) == epoch for epoch in epochs), "scripts of the store count in floating point"


def test_an_epoch_is_later_than_another_of_the_same_time_or_of_a_clock_that_is_ahead() -> None:
    epoch = epoch_after(0, "us")
    assert epoch_after(epoch - 1, "us") == epoch
    assert epoch_after(epoch, "us") == epoch + (1 << 11)
    ahead = (NOW_MS + 3_600_000 << 11) + 5
    assert ahead < epoch_after(ahead, "us") <= ahead + (2 << 11)


def leader_of(*entries: pb.JournalEntry) -> LaterLeader:
    """Leader of epoch 9, as its entries show it."""
    found: LaterLeader | None = None
    for seq, entry in enumerate(entries):
        found = LaterLeader.of(stored(seq, entry.SerializeToString()), found, follows_ours=True)
    assert found is not None
    return found


def stored(seq: int, payload: bytes) -> StoredEntry:
    return StoredEntry(EntryId(9, seq), payload, b"%08x" % crc32(payload))


@pytest.mark.parametrize(
    ("entries", "is_ready", "says_all_again"),
    [
        ([START], False, False),
        ([START_AGAIN], False, True),
        ([START, RESTATEMENT], False, False),
        ([START_AGAIN, RESTATEMENT], False, True),
        ([START_AGAIN, START], False, False),
        ([START, START_AGAIN, RESTATEMENT], False, True),
        ([START, READY], True, False),
        ([START_AGAIN, READY], True, True),
    ],
)
def test_a_leader_is_ready_when_it_writes_news_and_says_all_again_if_its_start_does(
    entries: list[pb.JournalEntry], is_ready: bool, says_all_again: bool
) -> None:
    leader = leader_of(*entries)
    assert (leader.is_ready, leader.says_all_again) == (is_ready, says_all_again)
    assert (leader.last_id, leader.follows_ours) == (EntryId(9, len(entries) - 1), True)


def test_a_leader_whose_start_was_trimmed_was_ready() -> None:
    assert leader_of(RESTATEMENT).is_ready


def test_an_entry_that_cannot_be_read_is_of_a_leader_that_was_ready() -> None:
    damaged = StoredEntry(EntryId(9, 3), b"\xff", b"00000000")
    leader = LaterLeader.of(damaged, leader_of(START_AGAIN), follows_ours=False)
    assert leader == LaterLeader(EntryId(9, 3), is_ready=True, says_all_again=False, follows_ours=False)
