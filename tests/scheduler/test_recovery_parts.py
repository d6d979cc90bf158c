"""Parts of recovery: the replay of entries, resumed searches, and groups that arrive with output."""

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

FAR = 5_000_000_000  # a number of 2.5 years at 60 a second: more than 32 bits hold


def admitted(number: int, request_id: str, n: int = 1, fingerprint: str = "m") -> journal_pb2.JournalEntry:
    request = pb.GenerateRequest(request_id=request_id, sampling=pb.SamplingParams(n=n))
    admission = journal_pb2.Admission(sequence=number, request=request, model_fingerprint=fingerprint)
    return journal_pb2.JournalEntry(admissions=[admission])


def deltas(numbers: list[int], tokens: list[int]) -> journal_pb2.JournalEntry:
    return journal_pb2.JournalEntry(delta_sequences=pack_int64(numbers), delta_tokens=pack_int32(tokens))


def replayed(*entries: journal_pb2.JournalEntry) -> JournalReplay:
    replay = JournalReplay()
    for seq, entry in enumerate(entries, start=1):
        replay.apply(EntryId(1, seq), entry)
    return replay


def test_numbers_beyond_32_bits_name_sequences() -> None:
    assert list(unpack_int64(pack_int64([FAR, -1]))) == [FAR, -1]
    replay = replayed(admitted(FAR, "far", n=2), deltas([FAR, FAR + 1, FAR], [7, 8, 9]))
    assert [sample.token_ids for sample in replay.requests[FAR].samples] == [[7, 9], [8]]
    assert replay.highest_number == FAR + 1


def test_what_names_an_admission_that_was_trimmed_away_is_passed_over() -> None:
    finish = journal_pb2.JournalEntry(finishes=[journal_pb2.Finish(sequence=3, state=pb.REQUEST_STATE_FINISHED)])
    replay = replayed(deltas([3], [1]), admitted(4, "here"), deltas([3, 4], [2, 5]), finish)
    assert [(each.request_id, each.samples[0].token_ids) for each in replay.requests.values()] == [("here", [5])]


def test_the_later_of_two_admissions_owns_their_id_unless_it_was_withdrawn() -> None:
    both = [admitted(1, "twice"), admitted(2, "twice")]
    replay = replayed(*both)
    assert ([each.number for each in replay.owners()], [each.number for each in replay.disowned()]) == ([2], [1])
    for number, owner in ((1, 2), (2, 1)):
        gone = journal_pb2.JournalEntry(finishes=[journal_pb2.Finish(sequence=number, withdrawn=True)])
        replay = replayed(*both, gone)
        assert [each.number for each in replay.owners()] == [owner]
        assert not list(replay.disowned())


def test_requests_of_an_older_version_are_counted_and_left_alone() -> None:
    replay = replayed(admitted(1, "old", fingerprint=""), deltas([1], [2]))
    assert (replay.num_unreadable, replay.requests, replay.highest_number) == (1, {}, 0)


@pytest.mark.parametrize(
    "bad",
    [
        deltas([1], [1, 2]),
        journal_pb2.JournalEntry(delta_sequences=bytes(7)),
        admitted(1, "again"),
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
