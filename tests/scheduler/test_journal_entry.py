"""An entry that gathers records: what it counts, where restatements stand in it; and what a written entry says."""

import asyncio
from collections.abc import Callable, Hashable

import pytest

from quire.v1 import inference_pb2
from quire.v1 import journal_pb2 as pb
from scheduler_svc.journal.journal_entry import PendingEntry, begins_again, decode, is_news
from scheduler_svc.journal.store import EntryId, JournalDamagedError, StoredEntry
from tests.scheduler.journal_setup import admission

ADMISSION = admission(1, prompt_tokens=100)
LOGPROBS = inference_pb2.TokenLogprobs(token_id=1, logprob=-1.0)


def admit(entry: PendingEntry) -> None:
    entry.add_admission(ADMISSION, asyncio.Future())


def add_three(name: str) -> Callable[[PendingEntry], None]:
    """Three records of the kind that is kept in this field."""
    kind = getattr(pb.JournalEntry(), name).add
    return lambda entry: entry.add_records(name, [kind(sequence=number) for number in range(1, 4)])


def add_pin(entry: PendingEntry) -> None:
    entry.add_records("pins", [pb.PinChange(name="a prefix", token_ids=bytes(400))])


NEWS: dict[str, tuple[Callable[[PendingEntry], None], int]] = {
    "an admission": (admit, 1),
    "tokens": (lambda entry: entry.add_deltas([1, 2, 3], [7, 8, 9]), 3),
    "steps of beam searches": (add_three("beam_steps"), 3),
    "preemptions": (add_three("preemptions"), 3),
    "pauses": (add_three("pauses"), 3),
    "a pin": (add_pin, 1),
    "ends of samples": (add_three("sample_finishes"), 3),
    "ends of requests": (add_three("finishes"), 3),
    "deletions of records": (lambda entry: entry.add_deletions(["r1", "a" * 100]), 2),
}


@pytest.mark.parametrize("kind", NEWS)
async def test_news_of_each_kind_count_by_number_and_by_bytes(kind: str) -> None:
    add, number = NEWS[kind]
    entry = PendingEntry()
    admit(entry)
    add(entry)
    assert entry.num_records == 1 + number
    assert entry.num_bytes == pytest.approx(len(entry.encode()), rel=0.1)


def test_logprobs_of_more_tokens_count_for_more_bytes() -> None:
    entry = PendingEntry()
    for _ in range(2):
        entry.add_logprobs([pb.DeltaLogprobs(delta=0, logprobs=LOGPROBS)] * 50, 0)
        assert entry.num_bytes >= len(entry.encode())


def restating(*sequences: int) -> Callable[[pb.JournalEntry], list[Hashable]]:
    """Restates requests of which only the admission is durable."""

    def write(entry: pb.JournalEntry) -> list[Hashable]:
        for each in sequences:
            entry.restatements.add(admission=admission(each))
            entry.finishes.add(sequence=each)
        return list(sequences)

    return write


async def test_restatements_stand_in_front_of_news_and_are_none() -> None:
    entry = PendingEntry()
    admit(entry)
    entry.add_records("finishes", [pb.Finish(sequence=9)])
    num_bytes = entry.num_bytes
    entry.restate(restating(5, 6))
    assert (entry.num_records, entry.num_bytes, entry.needed) == (2, num_bytes, [5, 6, 1])
    written = pb.JournalEntry.FromString(entry.encode())
    assert [each.sequence for each in written.finishes] == [5, 6, 9]
    assert [each.admission.sequence for each in written.restatements] == [5, 6]
    assert list(written.admissions) == [ADMISSION]


async def test_an_entry_stays_as_it_is_where_nothing_is_restated() -> None:
    entry = PendingEntry()
    admit(entry)
    before = entry.encode()
    entry.restate(restating())
    assert (entry.encode(), entry.num_records, entry.needed) == (before, 1, [1])


async def test_an_entry_ends_an_epoch_if_it_says_so() -> None:
    entry = PendingEntry()
    assert not entry.ends_epoch
    entry.set_leader_end("us", asyncio.Future())
    assert entry.ends_epoch
    assert (
        entry.encode()
        == pb.JournalEntry(
            leader_end=pb.LeaderEnd(leader_id="us"), delta_sequences=b"", delta_tokens=b""
        ).SerializeToString()
    )


RESTATED = pb.JournalEntry(restatements=[pb.Restatement(admission=ADMISSION)])


@pytest.mark.parametrize(
    ("entry", "is_it"),
    [
        (pb.JournalEntry(leader_start=pb.LeaderStart()), False),
        (RESTATED, False),
        (pb.JournalEntry(pins=[pb.PinChange()]), False),
        (pb.JournalEntry(leader_ready=pb.LeaderReady()), True),
        (pb.JournalEntry(finishes=[pb.Finish()]), True),
        (pb.JournalEntry(restatements=RESTATED.restatements, admissions=[ADMISSION]), True),
        (pb.JournalEntry(restatements=RESTATED.restatements, delta_tokens=bytes(4)), True),
        (pb.JournalEntry(restatements=RESTATED.restatements, beam_steps=[pb.BeamStep()]), True),
    ],
)
def test_only_a_leader_that_was_ready_writes_news(entry: pb.JournalEntry, is_it: bool) -> None:
    assert is_news(entry) is is_it


@pytest.mark.parametrize("seq", [0, 1, 4])
@pytest.mark.parametrize("says_all_again", [False, True])
def test_a_leader_begins_again_where_it_says_so_or_goes_on_in_an_epoch(seq: int, says_all_again: bool) -> None:
    start = pb.JournalEntry(leader_start=pb.LeaderStart(says_all_again=says_all_again))
    assert begins_again(EntryId(7, seq), start) is (says_all_again or seq > 0)
    assert not begins_again(EntryId(7, seq), RESTATED)


@pytest.mark.parametrize(("payload", "checksum"), [(None, b"00000000"), (b"", None)])
def test_an_entry_without_payload_or_checksum_is_damaged(payload: bytes | None, checksum: bytes | None) -> None:
    with pytest.raises(JournalDamagedError, match="journal entry 7-4 has no payload or no checksum"):
        decode(StoredEntry(EntryId(7, 4), payload, checksum))
