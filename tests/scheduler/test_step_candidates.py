"""Beams on the wire: what a step asks of their rows, and which answers can be answers."""

import math
from dataclasses import replace
from typing import Any

import pytest

from common.sampling_params import SequenceSampling
from common.step import Candidates, LogprobRows, Step, StepResult
from common.step_codec import result_from_pb, result_to_pb, step_from_pb, step_to_pb
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live.result_check import ImpossibleAnswerError, NotFiniteError, check_result
from scheduler_svc.workers.step_builder import build_step

PROMPT = [11, 12, 13, 14, 15, 16]
NUM_CANDIDATES = 4
VOCAB_SIZE = 1000
GOOD = Candidates(token_ids=[7, 3, 9, 1], logprobs=[-0.5, -1.0, -2.0, -math.inf])


def make_scheduler(max_num_batched_tokens: int = 64) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, pipeline_depth=1))
    scheduler.workers.add_worker("w", num_blocks=40, block_size=4, num_seats=16)
    return scheduler


def add(scheduler: Scheduler, first_id: int, num_sequences: int, *, is_beam: bool) -> SequenceGroup:
    sequences = [
        Sequence(first_id + i, [first_id, *PROMPT], len(PROMPT) + 1, 8, frozenset()) for i in range(num_sequences)
    ]
    num_candidates = NUM_CANDIDATES if is_beam else 0
    group = SequenceGroup(sequences, arrival=first_id, awaits_host=is_beam, num_candidates=num_candidates)
    scheduler.add(group)
    return group


def next_step(scheduler: Scheduler) -> tuple[StepPlan, Step]:
    """A plan, and what a worker reads of it."""
    plan = scheduler.schedule("w")
    assert plan is not None
    sampling = {seq_id: SequenceSampling(seed=0) for seq_id in range(100)}
    return plan, step_from_pb(step_to_pb(build_step(plan, 1, sampling)))


def test_a_step_of_beams_alone_asks_for_candidates_and_samples_nothing() -> None:
    scheduler = make_scheduler()
    group = add(scheduler, 0, 2, is_beam=True)
    plan, step = next_step(scheduler)
    assert step.samples == []  # none at all: absent would be every row into its own seat
    assert step.candidates == [0, NUM_CANDIDATES]
    scheduler.apply("w", plan.step_id, [])
    (beam,) = group.live
    scheduler.replace_beams(group, [(beam, 7), (beam, 3)])
    _, step = next_step(scheduler)
    assert step.samples == []
    assert step.candidates == [0, NUM_CANDIDATES, 1, NUM_CANDIDATES]
    assert [state.seat for state in step.whole] == list(step.rows)


class ReadTokens(list[int]):
    """Tokens that count how many of them are read at once."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        ReadTokens.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_beams_with_penalties_read_their_prompt_once_for_all_of_them() -> None:
    """Regression: each of 64 beams made numbers of a long prompt at each step, half a second for the event loop."""
    scheduler = make_scheduler(max_num_batched_tokens=400)
    group = add(scheduler, 0, 4, is_beam=True)
    prompt = ReadTokens(range(1, 101))
    for sequence in group.sequences:
        sequence.token_ids, sequence.num_prompt_tokens = ReadTokens(prompt), len(prompt)
    sampling = {seq_id: SequenceSampling(seed=0, repetition_penalty=1.1) for seq_id in range(100)}
    plan = scheduler.schedule("w")
    assert plan is not None
    build_step(plan, 1, sampling)
    scheduler.apply("w", plan.step_id, [])
    (beam,) = group.live
    scheduler.replace_beams(group, [(beam, token_id) for token_id in (7, 3, 5, 9)])
    for sequence in group.sequences:
        sequence.token_ids = ReadTokens(sequence.token_ids)
    plan = scheduler.schedule("w")
    assert plan is not None
    ReadTokens.num_read = 0
    step = step_from_pb(step_to_pb(build_step(plan, 1, sampling)))
    assert [list(state.history) for state in step.whole] == [list(prompt)] * 4
    assert sorted(state.token_ids[0] for state in step.whole) == [3, 5, 7, 9]
    assert ReadTokens.num_read < 2 * len(prompt)


def test_sampled_rows_and_candidate_rows_stand_in_one_step() -> None:
    scheduler = make_scheduler()
    sampled, beams = add(scheduler, 0, 2, is_beam=False), add(scheduler, 10, 2, is_beam=True)
    _, step = next_step(scheduler)
    seats = [sequence.seat for sequence in sampled.sequences]
    assert step.rows[0] == seats[0]
    assert step.samples == [0, seats[0], 0, seats[1]]
    assert (step.rows[1], list(step.candidates)) == (beams.sequences[0].seat, [1, NUM_CANDIDATES])


def test_a_beam_whose_prompt_is_not_done_is_asked_for_nothing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    add(scheduler, 0, 2, is_beam=True)
    plan, step = next_step(scheduler)
    assert (step.samples, step.candidates, list(step.num_tokens)) == ([], [], [5])
    check_result(plan, StepResult(epoch=1, step_id=plan.step_id), VOCAB_SIZE, {}, {})


def test_without_beams_nothing_is_said_of_candidates() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 1, is_beam=False)
    _, step = next_step(scheduler)
    assert step.samples is None and step.candidates == []


@pytest.fixture
def beam_plan() -> StepPlan:
    scheduler = make_scheduler()
    add(scheduler, 0, 2, is_beam=True)
    return next_step(scheduler)[0]


def asked_by(plan: StepPlan) -> dict[int, SequenceSampling]:
    """Each beam wants two log-probabilities beside its own."""
    return {sequence.seq_id: SequenceSampling(seed=0, num_logprobs=2) for sequence in plan.sequences}


def answer(*candidates: Candidates) -> StepResult:
    """Result as parsed from the wire."""
    return result_from_pb(result_to_pb(StepResult(epoch=1, step_id=1, candidates=list(candidates))))


def rows_of(num_rows: int) -> LogprobRows:
    return LogprobRows(
        logprobs=[-1.0] * num_rows,
        ranks=[1] * num_rows,
        num_top=2,
        top_token_ids=[5] * 2 * num_rows,
        top_logprobs=[-1.0] * 2 * num_rows,
    )


@pytest.mark.parametrize(
    "candidates",
    [
        GOOD,
        replace(GOOD, rows=rows_of(4)),  # asked for
        Candidates(token_ids=[7, 3], logprobs=[-0.5, -1.0]),  # the vocabulary has no more
    ],
)
def test_an_answer_with_candidates_of_every_beam_is_believed(beam_plan: StepPlan, candidates: Candidates) -> None:
    asked = asked_by(beam_plan) if candidates.rows else {}
    check_result(beam_plan, answer(candidates), VOCAB_SIZE, asked, asked)


def test_without_candidates_the_logits_of_a_beam_were_not_finite(beam_plan: StepPlan) -> None:
    with pytest.raises(NotFiniteError) as caught:
        check_result(beam_plan, answer(Candidates(token_ids=[], logprobs=[])), VOCAB_SIZE, {}, {})
    assert caught.value.groups == [beam_plan.sequences[0].group]


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ([], "candidates of 0 rows came for 1"),
        ([GOOD, GOOD], "candidates of 2 rows came for 1"),
        ([Candidates(token_ids=[1] * 5, logprobs=[-1.0] * 5)], "5 candidates of row 0, where 4 were asked"),
        ([replace(GOOD, logprobs=[-1.0])], "without a log-probability each"),
        ([replace(GOOD, token_ids=[])], "without a log-probability each"),
        ([replace(GOOD, logprobs=[-1.0, math.nan, -2.0, -3.0])], "without a log-probability each"),
        ([replace(GOOD, token_ids=[7, 3, -1, 1])], "a candidate of row 0 is beyond the vocabulary of 1000"),
        ([replace(GOOD, token_ids=[7, 3, 1000, 1])], "a candidate of row 0 is beyond the vocabulary of 1000"),
        ([replace(GOOD, logprobs=[math.inf, -1.0, -2.0, -3.0])], "without a log-probability each"),
        ([replace(GOOD, token_ids=[7, 3, 7, 1])], "a candidate of row 0 came twice"),
        ([replace(GOOD, logprobs=[-1.0, -0.5, -2.0, -3.0])], "do not come best first"),
        ([replace(GOOD, rows=rows_of(3))], "rows of log-probabilities are not 4"),
        ([replace(GOOD, rows=replace(rows_of(4), ranks=[1]))], "rows of log-probabilities are not 4"),
        ([replace(GOOD, rows=replace(rows_of(4), ranks=[0, 1, 1, 1]))], "a rank or a likely token"),
        ([replace(GOOD, rows=replace(rows_of(4), ranks=[1001, 1, 1, 1]))], "a rank or a likely token"),
        ([replace(GOOD, rows=replace(rows_of(4), top_token_ids=[1000] * 8))], "a rank or a likely token"),
        ([replace(GOOD, rows=replace(rows_of(4), logprobs=[0.5] * 4))], "not a number up to 0"),
        ([replace(GOOD, rows=replace(rows_of(4), top_logprobs=[math.nan] * 8))], "not a number up to 0"),
        ([replace(GOOD, rows=replace(rows_of(4), top_logprobs=[-2.0, -1.0] * 4))], "do not come best first"),
        ([replace(GOOD, logprobs=[-math.inf] * 4, rows=rows_of(4))], "no candidate of row 0 is possible"),
        ([GOOD], "with log-probabilities that were not asked, or without"),
    ],
)
def test_candidates_that_cannot_be_the_answer_are_refused(
    beam_plan: StepPlan, candidates: list[Candidates], reason: str
) -> None:
    with pytest.raises(ImpossibleAnswerError, match=reason):
        check_result(beam_plan, answer(*candidates), VOCAB_SIZE, asked_by(beam_plan), asked_by(beam_plan))


def test_candidates_for_a_step_without_beams_are_refused() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 1, is_beam=False)
    plan, _ = next_step(scheduler)
    with pytest.raises(ImpossibleAnswerError, match="candidates of 1 rows came for 0"):
        check_result(plan, StepResult(epoch=1, step_id=1, token_ids=[5], candidates=[GOOD]), VOCAB_SIZE, {}, {})
