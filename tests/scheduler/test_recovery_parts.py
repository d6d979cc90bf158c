"""Parts of recovery: the replay of entries, resumed searches, and groups that arrive with output."""

from typing import Any

import pytest

from common.arrays import pack_int32, pack_int64, unpack_int64
from common.step import Candidates
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.beam_search import BeamSearchParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.journal.store import EntryId, JournalDamagedError
from scheduler_svc.requests.live.beam_decoding import BeamDecoding
from scheduler_svc.requests.recovery.journal_replay import JournalReplay
from tests.scheduler.journal_setup import replayed

FAR = 5_000_000_000  # a number of 2.5 years at 60 a second: more than 32 bits hold


def admitted(number: int, request_id: str, n: int = 1, fingerprint: str = "m") -> journal_pb2.JournalEntry:
    request = pb.GenerateRequest(request_id=request_id, sampling=pb.SamplingParams(n=n))
    admission = journal_pb2.Admission(sequence=number, request=request, model_fingerprint=fingerprint)
    return journal_pb2.JournalEntry(admissions=[admission])


def deltas(numbers: list[int], tokens: list[int]) -> journal_pb2.JournalEntry:
    return journal_pb2.JournalEntry(delta_sequences=pack_int64(numbers), delta_tokens=pack_int32(tokens))


def test_numbers_beyond_32_bits_name_sequences() -> None:
    assert list(unpack_int64(pack_int64([FAR, -1]))) == [FAR, -1]
    replay = replayed(admitted(FAR, "far", n=2), deltas([FAR, FAR + 1, FAR], [7, 8, 9]))
    assert [sample.token_ids for sample in replay.requests[FAR].samples] == [[7, 9], [8]]
    assert replay.highest_number == FAR + 1


def test_what_names_an_admission_that_was_trimmed_away_is_passed_over() -> None:
    changes = deltas([3, 4], [2, 5])
    for number in (3, 4):
        logprobs = pb.TokenLogprobs(token_id=number)
        changes.delta_logprobs.add(delta=number - 3, logprobs=logprobs)
        changes.prompt_logprobs.add(sequence=number, logprobs=[logprobs])
        changes.beam_steps.add(sequence=number, token_ids=pack_int32([number]))
        changes.preemptions.add(sequence=number)
        changes.pauses.add(sequence=number, paused=True)
        changes.sample_finishes.add(sequence=number, finish=pb.SampleFinish(stop_token_id=number))
        changes.finishes.add(sequence=number, error=f"of {number}")
    (here,) = replayed(deltas([3], [1]), admitted(4, "here"), changes).requests.values()
    assert (here.request_id, here.number) == ("here", 4)
    mine = pb.TokenLogprobs(token_id=4)
    (sample,) = here.samples
    assert (sample.token_ids, sample.logprobs, sample.finish) == ([5], [mine], pb.SampleFinish(stop_token_id=4))
    assert (here.prompt_logprobs, here.num_preemptions, here.is_paused) == ([mine], 1, True)
    assert [each.sequence for each in here.beam_steps] == [4]
    assert here.finish is not None and here.finish.error == "of 4"


def test_the_later_of_two_admissions_owns_their_id_unless_it_was_withdrawn() -> None:
    both = [admitted(1, "twice"), admitted(2, "twice")]
    replay = replayed(*both)
    assert ([each.number for each in replay.owners()], [each.number for each in replay.disowned()]) == ([2], [1])
    for number, owner in ((1, 2), (2, 1)):
        gone = journal_pb2.JournalEntry(finishes=[journal_pb2.Finish(sequence=number, withdrawn=True)])
        replay = replayed(*both, gone)
        assert [each.number for each in replay.owners()] == [owner]
        assert not list(replay.disowned())


def ended(*numbers: int) -> journal_pb2.JournalEntry:
    return journal_pb2.JournalEntry(finishes=[journal_pb2.Finish(sequence=number) for number in numbers])


def test_a_deletion_forgets_what_has_ended_before_it_and_nothing_that_came_since() -> None:
    deletion = journal_pb2.JournalEntry(deletions=["r", "unknown"])
    before = [admitted(1, "r"), admitted(2, "other"), ended(1, 2)]
    assert set(replayed(*before, deletion).requests) == {2}
    assert set(replayed(*before, deletion, admitted(3, "r"), ended(3)).requests) == {2, 3}
    assert set(replayed(*before, admitted(3, "r"), deletion, ended(3)).requests) == {1, 2, 3}  # it had expired
    restated = journal_pb2.JournalEntry(deletions=["r"])  # in one entry with its restatement, which comes first
    restated.restatements.add(admission=before[0].admissions[0])
    restated.finishes.add(sequence=1)
    assert set(replayed(*before, restated).requests) == {2}


def test_a_deletion_makes_no_request_the_owner_again_that_was_sent_once_more() -> None:
    deletion = journal_pb2.JournalEntry(deletions=["twice"])
    replay = replayed(admitted(1, "twice"), admitted(2, "twice"), ended(2), deletion)
    assert (list(replay.owners()), list(replay.disowned())) == ([], [])


def test_requests_of_an_older_version_are_counted_and_left_alone() -> None:
    replay = replayed(admitted(1, "old", fingerprint=""), deltas([1], [2]), admitted(2, "older", fingerprint=""))
    assert (replay.num_unreadable, replay.requests, replay.highest_number) == (2, {}, 0)
    replay = JournalReplay()
    assert (replay.num_unreadable, replay.highest_number, replay.is_settled, replay.is_cut_short) == (
        0,
        0,
        False,
        False,
    )


def test_a_pause_lasts_until_it_is_resumed_and_a_pin_until_it_is_unpinned() -> None:
    def paused(is_paused: bool) -> journal_pb2.JournalEntry:
        return journal_pb2.JournalEntry(pauses=[journal_pb2.PauseChange(sequence=1, paused=is_paused)])

    def pin(name: str, **fields: Any) -> journal_pb2.JournalEntry:
        return journal_pb2.JournalEntry(pins=[journal_pb2.PinChange(tenant="t", name=name, **fields)])

    assert replayed(admitted(1, "r"), paused(True)).requests[1].is_paused
    assert not replayed(admitted(1, "r"), paused(True), paused(False)).requests[1].is_paused
    pins = replayed(
        pin("a"), pin("b"), pin("b", cache_salt="new"), pin("a", unpinned=True), pin("?", unpinned=True)
    ).pins
    ((key, kept),) = pins.items()
    assert (key, kept.entry_id, kept.change.cache_salt) == (("t", "b"), EntryId(1, 3), "new")


def test_a_request_that_is_forgotten_leaves_nothing_behind() -> None:
    replay = replayed(admitted(1, "gone", n=3), admitted(4, "here"))
    replay.forget_request(1)
    replay.forget_request(1)  # it is gone
    replay.apply(EntryId(1, 3), deltas([1, 2, 3, 4], [5, 6, 7, 8]))
    replay.apply(EntryId(1, 4), admitted(2, "new"))  # its numbers are free
    assert {each.request_id: each.samples[0].token_ids for each in replay.owners()} == {"here": [8], "new": []}


def test_no_request_that_has_ended_is_disowned() -> None:
    both = [admitted(1, "twice"), admitted(2, "twice")]
    finish = journal_pb2.JournalEntry(finishes=[journal_pb2.Finish(sequence=1)])
    assert not list(replayed(*both, finish).disowned())
    assert [each.number for each in replayed(*both, admitted(3, "once"), admitted(4, "twice")).disowned()] == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        deltas([1], [1, 2]),
        journal_pb2.JournalEntry(delta_sequences=bytes(7)),
        admitted(1, "again"),
        admitted(0, "upon the next", n=2),
        journal_pb2.JournalEntry(
            delta_sequences=bytes(8), delta_tokens=bytes(4), delta_logprobs=[journal_pb2.DeltaLogprobs(delta=1)]
        ),
    ],
)
def test_an_entry_that_contradicts_itself_or_those_before_it_is_named(bad: journal_pb2.JournalEntry) -> None:
    with pytest.raises(JournalDamagedError, match="journal entry 1-2 contradicts itself"):
        replayed(admitted(1, "whole"), bad)


def group_of(*outputs: list[int], awaits_host: bool = False) -> SequenceGroup:
    """Sequences of one prompt of 20 tokens that have these outputs."""
    prompt = list(range(20))
    sequences = [
        Sequence(
            seq_id=i + 1, token_ids=prompt + output, num_prompt_tokens=20, max_tokens=50, stop_token_ids=frozenset()
        )
        for i, output in enumerate(outputs)
    ]
    return SequenceGroup(sequences, arrival=1, awaits_host=awaits_host, num_candidates=4 if awaits_host else 0)


def test_a_group_with_output_comes_back_as_one_that_was_preempted() -> None:
    scheduler = Scheduler(SchedulerConfig(pipeline_depth=1))
    scheduler.workers.add_worker("w", num_blocks=32, block_size=4, num_seats=8)
    group = group_of([100, 101, 102], [200], [])
    scheduler.finish(group.sequences[2])  # it had ended
    scheduler.add(group)
    assert [each.status for each in group.live] == [SequenceStatus.PREEMPTED] * 2
    plan = scheduler.schedule("w")
    assert plan is not None
    # The first computes all it has, 20 + 3; the second what is its own behind five shared blocks of four.
    assert [(each.seq_id, num) for each, num in zip(plan.sequences, plan.num_tokens, strict=True)] == [(1, 23), (2, 1)]
    scheduler.apply("w", plan.step_id, [103, 201])
    assert group.num_recomputed_tokens == 22  # all but the last token of the first; the second shares its 20
    scheduler.check()
    scheduler.finish_group(group)
    scheduler.check()


def test_a_replayed_search_goes_on_as_the_one_that_was_not_interrupted() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=9, eos_token_ids=frozenset({0}))
    first, again = BeamDecoding(params), BeamDecoding(params)
    scheduler = Scheduler(SchedulerConfig(pipeline_depth=1))
    scheduler.workers.add_worker("w", num_blocks=32, block_size=4, num_seats=8)
    group = group_of([], [], awaits_host=True)
    scheduler.add(group)
    for step in range(5):
        plan = scheduler.schedule("w")
        assert plan is not None
        scheduler.apply("w", plan.step_id, [])
        for row in plan.candidate_rows:
            last = plan.sequences[row].token_ids[-1]
            tokens = [last % 7 + 1, last % 5 + 8, 0]
            logprobs = [-0.25 - last % 3 / 16, -0.5, -3.0 - step]
            first.store_candidates(plan.sequences[row], Candidates(token_ids=tokens, logprobs=logprobs))
        again.replay(first.advance(scheduler, group))
    restored = group_of([], [], awaits_host=True)
    again.assign_beams(restored)
    assert again.common_token_ids == first.common_token_ids
    assert again.hypotheses() == first.hypotheses()
    assert sorted(each.token_ids for each in restored.live) == sorted(each.token_ids for each in group.live)
    assert not again.is_done and again.num_steps == 5


@pytest.mark.parametrize(
    "step",
    [
        journal_pb2.BeamStep(num_candidates=pack_int32([1, 1]), token_ids=pack_int32([5, 6]), logprobs=bytes(8)),
        journal_pb2.BeamStep(num_candidates=pack_int32([1]), token_ids=pack_int32([5, 6]), logprobs=bytes(8)),
        journal_pb2.BeamStep(num_candidates=pack_int32([2]), token_ids=pack_int32([5, 6]), logprobs=bytes(4)),
        journal_pb2.BeamStep(
            num_candidates=pack_int32([2]),
            token_ids=pack_int32([5, 6]),
            logprobs=bytes(8),
            token_logprobs=[pb.TokenLogprobs(token_id=5)],
        ),
    ],
)
def test_a_step_that_is_not_of_this_search_is_refused(step: journal_pb2.BeamStep) -> None:
    search = BeamDecoding(BeamSearchParams(beam_width=2, max_tokens=9, eos_token_ids=frozenset()))
    with pytest.raises(ValueError):
        search.replay(step)


def test_a_search_that_has_ended_takes_no_step_more() -> None:
    search = BeamDecoding(BeamSearchParams(beam_width=2, max_tokens=1, eos_token_ids=frozenset()))
    search.replay(journal_pb2.BeamStep(num_candidates=pack_int32([2]), token_ids=pack_int32([5, 6]), logprobs=bytes(8)))
    assert search.is_done
    with pytest.raises(ValueError, match="after its end"):
        search.replay(journal_pb2.BeamStep())
