"""Judgement of the simulation's checker: lost, repeated, or new."""

from quire.v1 import inference_pb2, journal_pb2
from scheduler_svc.journal.store import EntryId
from tests.simulation.history import History
from tests.simulation.journal_truth import JournalTruth
from tests.simulation.machine_clocks import VirtualClock


def truth_of(*request_ids: str) -> JournalTruth:
    truth = JournalTruth(History(VirtualClock(), is_traced=False))
    for number, request_id in enumerate(request_ids):
        truth.take(EntryId(1, number), admission(number, request_id))
    return truth


def admission(number: int, request_id: str) -> bytes:
    request = inference_pb2.GenerateRequest(request_id=request_id)
    return journal_pb2.JournalEntry(
        admissions=[journal_pb2.Admission(sequence=number, request=request)]
    ).SerializeToString()


def test_an_entry_that_may_have_been_lost_unheard_of_counts_once_though_it_comes_again() -> None:
    truth = truth_of("a")
    truth.note_loss(True, True)
    truth.take(EntryId(2, 0), admission(0, "a"))
    assert truth.num_entries == 1


def test_the_same_bytes_are_news_once_their_writer_has_heard_that_the_first_were_taken() -> None:
    """The reply was on the way when the store lost everything: the same token of the same request may come twice."""
    truth = truth_of("a")
    truth.note_loss(True, True)
    truth.note_answered(admission(0, "a"))
    truth.take(EntryId(2, 0), admission(0, "a"))
    assert truth.num_entries == 2


def test_an_admission_that_was_lost_is_followed_by_the_next_of_its_id() -> None:
    truth = truth_of("a", "b")
    truth.note_loss(False, True)
    truth.take(EntryId(2, 0), admission(7, "a"))
    finish = journal_pb2.Finish(sequence=7, state=inference_pb2.REQUEST_STATE_FINISHED)
    truth.take(EntryId(2, 1), journal_pb2.JournalEntry(finishes=[finish]).SerializeToString())
    assert [each.request_id for each in truth.unended()] == ["b"]


def begun(truth: JournalTruth, epoch: int, leader_id: str) -> None:
    start = journal_pb2.JournalEntry(leader_start=journal_pb2.LeaderStart(leader_id=leader_id))
    ready = journal_pb2.JournalEntry(leader_ready=journal_pb2.LeaderReady())
    truth.take(EntryId(epoch, 0), start.SerializeToString())
    truth.take(EntryId(epoch, 1), ready.SerializeToString())


def finish_of(number: int) -> bytes:
    finish = journal_pb2.Finish(sequence=number, state=inference_pb2.REQUEST_STATE_FINISHED)
    return journal_pb2.JournalEntry(finishes=[finish]).SerializeToString()


def test_an_entry_whose_leader_heard_nothing_and_writes_it_again_in_a_later_epoch_counts_once() -> None:
    truth = JournalTruth(History(VirtualClock(), is_traced=False))
    begun(truth, 1, "me")
    truth.take(EntryId(1, 2), admission(0, "a"))
    truth.take(EntryId(1, 3), finish_of(0))
    begun(truth, 2, "another")
    begun(truth, 3, "me")
    truth.take(EntryId(3, 2), finish_of(0))
    assert not truth.history.violations


def test_the_same_entry_again_is_a_fault_of_another_leader_and_of_one_that_was_answered() -> None:
    for is_answered, second in ((False, "another"), (True, "me")):
        truth = JournalTruth(History(VirtualClock(), is_traced=False))
        begun(truth, 1, "me")
        truth.take(EntryId(1, 2), admission(0, "a"))
        truth.take(EntryId(1, 3), finish_of(0))
        if is_answered:
            truth.note_answered(finish_of(0))
        begun(truth, 2, second)
        truth.take(EntryId(2, 2), finish_of(0))
        assert [violation.partition("s: ")[2] for violation in truth.history.violations] == ["P1: a ended twice"]
