"""Saying everything again changes nothing: who reads the journal from there finds what its earlier readers found."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.arrays import pack_int32, pack_int64
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.needed_entries import NeededEntries
from scheduler_svc.journal.store import EntryId
from scheduler_svc.requests.recovery.journal_replay import JournaledRequest, JournalReplay


@dataclass(slots=True)
class Writer:
    """Entries as a leader might write them, of a few requests and pins that come and go."""

    random: random.Random
    live: dict[int, int] = field(default_factory=dict)  # number of samples by number, 0 for a beam search
    next_number: int = 1

    def entry(self) -> journal_pb2.JournalEntry:
        entry, chance = journal_pb2.JournalEntry(), self.random.random
        if chance() < 0.4:
            self._admit(entry)
        sequences: list[int] = []
        tokens: list[int] = []
        for number, num_samples in self.live.items():
            for index in range(num_samples):
                for _ in range(self.random.randrange(3)):
                    if chance() < 0.3:
                        logprobs = pb.TokenLogprobs(token_id=len(tokens), logprob=-chance())
                        entry.delta_logprobs.add(delta=len(tokens), logprobs=logprobs)
                    sequences.append(number + index)
                    tokens.append(self.random.randrange(1000))
            for index in range(num_samples):
                if chance() < 0.1:
                    finish = pb.SampleFinish(stop_token_id=self.random.randrange(9))
                    entry.sample_finishes.add(sequence=number + index, finish=finish)
            if not num_samples:
                entry.beam_steps.add(sequence=number, token_ids=pack_int32([self.random.randrange(9)]))
            elif chance() < 0.1:
                entry.prompt_logprobs.add(sequence=number, logprobs=[pb.TokenLogprobs(logprob=-chance())])
            if chance() < 0.2:
                entry.preemptions.add(sequence=number)
            if chance() < 0.2:
                entry.pauses.add(sequence=number, paused=chance() < 0.5)
        entry.delta_sequences, entry.delta_tokens = pack_int64(sequences), pack_int32(tokens)
        for number in [each for each in self.live if chance() < 0.15]:
            end = entry.finishes.add(sequence=number, state=pb.REQUEST_STATE_FINISHED, withdrawn=chance() < 0.2)
            end.outcome.usage.completion_tokens = number
            del self.live[number]
        for _ in range(self.random.randrange(2)):
            entry.pins.add(
                tenant="t", name=self.random.choice("abc"), unpinned=chance() < 0.4, cache_salt=str(chance())
            )
        return entry

    def _admit(self, entry: journal_pb2.JournalEntry) -> None:
        num_samples = self.random.randrange(4)
        request = pb.GenerateRequest(request_id=self.random.choice("uvwxyz"))
        request.sampling.n = max(1, num_samples)
        if not num_samples:
            request.beam.beam_width = 2
        entry.admissions.add(sequence=self.next_number, request=request, model_fingerprint="m")
        self.live[self.next_number] = num_samples
        self.next_number += max(2, num_samples)


def said(request: JournaledRequest) -> journal_pb2.JournalEntry:
    entry = journal_pb2.JournalEntry()
    request.restate(entry)
    return entry


def assert_same(one: JournalReplay, other: JournalReplay) -> None:
    assert {number: said(each) for number, each in one.requests.items()} == {
        number: said(each) for number, each in other.requests.items()
    }
    assert {number: each.finish for number, each in one.requests.items()} == {
        number: each.finish for number, each in other.requests.items()
    }
    assert {key: pin.change for key, pin in one.pins.items()} == {key: pin.change for key, pin in other.pins.items()}
    assert [each.number for each in one.owners()] == [each.number for each in other.owners()]


def restatements_of(replay: JournalReplay) -> NeededEntries:
    needed = NeededEntries(restate_entries=1, restate_bytes=1)
    for number, request in replay.requests.items():
        needed.keep_entry(number, request.entry_id, request.restate)
    for pin in replay.pins.values():
        needed.keep_entry(pin, pin.entry_id, lambda entry, pin=pin: entry.pins.append(pin.change))  # type: ignore[misc]
    return needed


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(0, 12), st.integers(0, 12))
def test_a_reader_from_the_restatements_on_finds_the_same(random_: random.Random, before: int, behind: int) -> None:
    writer, whole, short = Writer(random_), JournalReplay(), JournalReplay()
    for seq in range(before):
        whole.apply(EntryId(1, seq), writer.entry())
    for entry, _ in restatements_of(whole).restate_all():
        short.apply(EntryId(1, before), entry)
        whole.apply(EntryId(1, before), entry)
    assert_same(whole, short)
    for seq in range(before + 1, before + 1 + behind):
        entry = writer.entry()
        whole.apply(EntryId(1, seq), entry)
        short.apply(EntryId(1, seq), entry)
    assert_same(whole, short)


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(0, 12))
def test_what_a_leader_does_not_say_again_after_a_loss_has_ended(
    random_: random.Random, before: int, num_lost: int
) -> None:
    """The store has only the first entries left; the leader has seen them all, and dies before or behind its saying."""
    writer, leader, reader = Writer(random_), JournalReplay(), JournalReplay()
    entries = [writer.entry() for _ in range(before)]
    for seq, entry in enumerate(entries, start=1):
        leader.apply(EntryId(1, seq), entry)
        if seq + num_lost <= before:
            reader.apply(EntryId(1, seq), entry)
    left = set(reader.requests)
    reader.apply(EntryId(1, before + 1), journal_pb2.JournalEntry(leader_start=journal_pb2.LeaderStart()))
    for restated, _ in restatements_of(leader).restate_all():
        reader.apply(EntryId(1, before + 2), restated)
    assert left <= set(reader.requests)
    news = journal_pb2.JournalEntry(delta_sequences=pack_int64([999]), delta_tokens=pack_int32([1]))
    leader.apply(EntryId(1, before + 3), news)
    reader.apply(EntryId(1, before + 3), news)
    assert_same(leader, reader)


def test_a_restatement_that_does_not_fit_its_admission_is_refused() -> None:
    admission = journal_pb2.Admission(sequence=1, request=pb.GenerateRequest(), model_fingerprint="m")
    bad = journal_pb2.Restatement(admission=admission, samples=[journal_pb2.RestatedSample()] * 2)
    with pytest.raises(Exception, match="journal entry 1-1 contradicts itself"):
        JournalReplay().apply(EntryId(1, 1), journal_pb2.JournalEntry(restatements=[bad]))


def restating(number: int) -> journal_pb2.Restatement:
    return journal_pb2.Restatement(admission=journal_pb2.Admission(sequence=number))


def test_what_is_old_is_restated_a_few_at_a_time_and_makes_way_for_trimming() -> None:
    needed = NeededEntries(restate_entries=10, restate_bytes=1 << 30)
    for number in range(1, 8):
        needed.add_coming(number, lambda entry, number=number: entry.restatements.append(restating(number)))  # type: ignore[misc]
        needed.record_written([number], EntryId(1, number), 1)
    for seq in range(8, 11):
        assert not needed.restate_due(journal_pb2.JournalEntry())
        needed.record_written([], EntryId(1, seq), 1)
    assert needed.oldest == EntryId(1, 1)
    seen = []
    for seq in range(11, 30):
        entry = journal_pb2.JournalEntry()
        keys = needed.restate_due(entry)
        assert [each.admission.sequence for each in entry.restatements] == keys
        seen += keys
        needed.record_written(keys, EntryId(1, seq), 1)
        assert needed.oldest is not None and seq - needed.oldest.seq <= 10
    assert seen[:7] == [1, 2, 3, 4, 5, 6, 7]


def test_bytes_that_are_only_restated_make_nothing_due() -> None:
    needed = NeededEntries(restate_entries=1000, restate_bytes=100)
    needed.add_coming(1, lambda entry: entry.restatements.append(restating(1)))
    needed.record_written([1], EntryId(1, 1), 60)
    needed.record_written([], EntryId(1, 2), 99)
    assert not needed.restate_due(journal_pb2.JournalEntry())
    needed.record_written([], EntryId(1, 3), 1)
    assert needed.restate_due(journal_pb2.JournalEntry()) == [1]
    needed.record_written([1], EntryId(1, 4), 0)
    assert not needed.restate_due(journal_pb2.JournalEntry())
    assert needed.oldest == EntryId(1, 4)
