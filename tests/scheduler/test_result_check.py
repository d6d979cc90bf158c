"""Answers of a worker to a step that samples: what an honest worker may say is believed, anything beside it is refused.

Candidates of beams are in test_step_candidates.
"""

import math
from dataclasses import replace

import pytest

from common.sampling_params import SequenceSampling
from common.step import Candidates, LogprobRows, PromptLogprobs, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live.result_check import ImpossibleAnswerError, NotFiniteError, check_result

VOCAB_SIZE = 1000
BUDGET = 12  # tokens of a step
NUM_TOP = 2

PLAIN = SequenceSampling(seed=0)
TOLD = SequenceSampling(seed=0, num_logprobs=NUM_TOP)
TOLD_OF_PROMPT = SequenceSampling(seed=0, num_prompt_logprobs=NUM_TOP)
WITH_GRAMMAR = SequenceSampling(seed=0, grammar="g")
BARE = SequenceSampling(seed=0, num_logprobs=0, num_prompt_logprobs=0)


def rows_of(num_rows: int, num_top: int = NUM_TOP) -> LogprobRows:
    """Rows of an honest worker."""
    return LogprobRows(
        logprobs=[-1.0] * num_rows,
        ranks=[3] * num_rows,
        num_top=num_top,
        top_token_ids=[5, 6][:num_top] * num_rows,
        top_logprobs=[-0.5, -0.7][:num_top] * num_rows,
    )


class Worker:
    """One worker's steps. Each request has one sequence; what it asked for is in `sampling_of`."""

    def __init__(self) -> None:
        config = SchedulerConfig(max_num_batched_tokens=BUDGET, pipeline_depth=1)
        self.scheduler = Scheduler(config)
        self.scheduler.workers.add_worker("w", num_blocks=40, block_size=4, num_seats=16)
        self.sampling_of: dict[int, SequenceSampling] = {}

    def add(self, sampling: SequenceSampling, num_prompt_tokens: int = 4, num_candidates: int = 0) -> SequenceGroup:
        number = len(self.sampling_of)
        prompt = [100 * number + i for i in range(num_prompt_tokens)]
        sequence = Sequence(number, prompt, num_prompt_tokens, 8, frozenset(), use_prefix_cache=False)
        group = SequenceGroup([sequence], arrival=number, awaits_host=num_candidates > 0, num_candidates=num_candidates)
        self.sampling_of[number] = sampling
        self.scheduler.add(group)
        return group

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule("w")
        assert plan is not None
        return plan

    def check(self, plan: StepPlan, result: StepResult) -> None:
        asked = {
            seq_id: each
            for seq_id, each in self.sampling_of.items()
            if each.num_logprobs is not None or each.num_prompt_logprobs is not None
        }
        check_result(plan, result, VOCAB_SIZE, self.sampling_of, asked)

    def refusal(self, plan: StepPlan, result: StepResult) -> str:
        with pytest.raises(ImpossibleAnswerError) as caught:
            self.check(plan, result)
        return str(caught.value)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def answer(token_ids: list[int], **rest: object) -> StepResult:
    return StepResult(epoch=1, step_id=1, token_ids=token_ids, **rest)  # type: ignore[arg-type]


def of_prompt(plan: StepPlan, row: int, position: int, rows: LogprobRows) -> PromptLogprobs:
    return PromptLogprobs(seat=plan.seats[row], position=position, rows=rows)


def test_the_first_and_the_last_token_of_the_vocabulary_are_believed_and_none_beyond(worker: Worker) -> None:
    worker.add(PLAIN)
    worker.add(PLAIN)
    plan = worker.plan()
    worker.check(plan, answer([0, VOCAB_SIZE - 1]))
    assert "a token id is beyond the vocabulary of 1000" in worker.refusal(plan, answer([5, VOCAB_SIZE]))
    assert "a token id is beyond the vocabulary of 1000" in worker.refusal(plan, answer([-1, 5]))


def test_there_is_one_token_for_each_sample(worker: Worker) -> None:
    worker.add(PLAIN)
    worker.add(PLAIN)
    plan = worker.plan()
    for token_ids in ([], [5], [5, 6, 7]):
        assert f"{len(token_ids)} tokens came for 2 samples" in worker.refusal(plan, answer(token_ids))


def test_a_step_that_reaches_no_prompts_end_has_no_token(worker: Worker) -> None:
    worker.add(PLAIN, BUDGET + 1)
    plan = worker.plan()
    worker.check(plan, answer([]))
    assert "1 tokens came for 0 samples" in worker.refusal(plan, answer([5]))


def test_requests_whose_logits_were_not_finite_are_named_once_each_and_no_other(worker: Worker) -> None:
    groups = [worker.add(PLAIN) for _ in range(3)]
    plan = worker.plan()
    for invalid in ([0, 2], [2, 0], [0, 2, 2]):
        with pytest.raises(NotFiniteError, match="check the model's weights") as caught:
            worker.check(plan, answer([0, 5, 0], invalid_samples=invalid))
        assert list(caught.value.groups) == [groups[each] for each in dict.fromkeys(invalid)]


def test_where_only_requests_with_a_grammar_got_no_token_the_grammar_is_named_too(worker: Worker) -> None:
    worker.add(WITH_GRAMMAR)
    worker.add(PLAIN)
    plan = worker.plan()
    for invalid, is_named in (([0], True), ([1], False), ([0, 1], False)):
        with pytest.raises(NotFiniteError, match="logits were not finite") as caught:
            worker.check(plan, answer([5, 5], invalid_samples=invalid))
        assert ("the structured output went beyond a limit" in str(caught.value)) is is_named


def test_a_request_that_has_ended_meanwhile_is_not_named(worker: Worker) -> None:
    ended, other = worker.add(PLAIN), worker.add(PLAIN)
    plan = worker.plan()
    worker.scheduler.finish_group(ended)
    worker.check(plan, answer([0, 5], invalid_samples=[0]))
    with pytest.raises(NotFiniteError) as caught:
        worker.check(plan, answer([0, 0], invalid_samples=[0, 1]))
    assert list(caught.value.groups) == [other]


@pytest.mark.parametrize(
    ("invalid", "reason"),
    [
        ([-1], "news of sample -1, where there are 2"),
        ([2], "news of sample 2, where there are 2"),
        ([0, 1, 1], "3 invalid samples where there are 2"),
    ],
)
def test_samples_that_there_are_not_cannot_be_invalid(worker: Worker, invalid: list[int], reason: str) -> None:
    worker.add(PLAIN)
    worker.add(PLAIN)
    assert reason in worker.refusal(worker.plan(), answer([5, 5], invalid_samples=invalid))


def test_who_asked_for_log_probabilities_must_get_them_and_nobody_else(worker: Worker) -> None:
    worker.add(TOLD)
    worker.add(PLAIN)
    worker.add(TOLD_OF_PROMPT, num_prompt_tokens=1)  # before whose one token there is none to predict it
    plan = worker.plan()
    tokens, good = [5, 6, 7], rows_of(1)
    worker.check(plan, answer(tokens, logprobs={0: good}))
    assert "no log-probabilities of sample 0, which asked" in worker.refusal(plan, answer(tokens))
    for other in (1, 2):
        refusal = worker.refusal(plan, answer(tokens, logprobs={0: good, other: good}))
        assert f"log-probabilities of sample {other}, which did not ask" in refusal
    for beyond in (-1, 3):
        refusal = worker.refusal(plan, answer(tokens, logprobs={0: good, beyond: good}))
        assert f"news of sample {beyond}, where there are 3" in refusal


def test_log_probabilities_that_nobody_asked_for_are_refused(worker: Worker) -> None:
    worker.add(PLAIN)
    plan = worker.plan()
    refusal = worker.refusal(plan, answer([5], logprobs={0: rows_of(1)}))
    assert "log-probabilities of sample 0, which did not ask" in refusal
    refusal = worker.refusal(plan, answer([5], prompt_logprobs=[of_prompt(plan, 0, 1, rows_of(3))]))
    assert "which did not ask for any" in refusal


def test_a_sample_whose_logits_were_not_finite_needs_no_log_probabilities(worker: Worker) -> None:
    group = worker.add(TOLD)
    worker.add(TOLD)
    plan = worker.plan()
    with pytest.raises(NotFiniteError) as caught:
        worker.check(plan, answer([0, 5], invalid_samples=[0], logprobs={1: rows_of(1)}))
    assert list(caught.value.groups) == [group]
    refusal = worker.refusal(plan, answer([0, 5], invalid_samples=[0]))
    assert "no log-probabilities of sample 1, which asked" in refusal


def test_of_a_request_that_has_ended_there_may_be_log_probabilities_or_none(worker: Worker) -> None:
    ended = [worker.add(sampling) for sampling in (TOLD, PLAIN, TOLD_OF_PROMPT)]
    plan = worker.plan()
    for group in ended:
        worker.scheduler.finish_group(group)
    told = {sample: rows_of(1) for sample in range(3)}
    of_prompts = [of_prompt(plan, row, 1, rows_of(3)) for row in range(3)]
    worker.check(plan, answer([5, 6, 7], logprobs={0: told[0]}, prompt_logprobs=of_prompts[2:]))
    worker.check(plan, answer([5, 6, 7], prompt_logprobs=of_prompts[2:]))
    worker.check(plan, answer([5, 6, 7], logprobs=told, prompt_logprobs=of_prompts))
    damaged = {**told, 0: replace(told[0], ranks=[0])}
    assert "a rank or a likely token" in worker.refusal(plan, answer([5, 6, 7], logprobs=damaged))


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(1),
        replace(rows_of(1), ranks=[1], logprobs=[5e-4]),  # as float32 rounds it
        replace(rows_of(1), ranks=[VOCAB_SIZE], logprobs=[-math.inf]),
        replace(rows_of(1), top_token_ids=[0, VOCAB_SIZE - 1]),
        replace(rows_of(1), top_logprobs=[-0.5, -0.5]),
        replace(rows_of(1), top_logprobs=[-0.5, -math.inf]),
    ],
)
def test_log_probabilities_that_can_be_are_believed(worker: Worker, rows: LogprobRows) -> None:
    worker.add(TOLD)
    worker.check(worker.plan(), answer([5], logprobs={0: rows}))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (rows_of(2), "are not 1, with 2 tokens each"),
        (rows_of(1, num_top=1), "are not 1, with 2 tokens each"),
        (replace(rows_of(1), num_top=1), "are not 1, with 2 tokens each"),
        (replace(rows_of(1), logprobs=[]), "are not 1, with 2 tokens each"),
        (replace(rows_of(1), ranks=[1, 1]), "are not 1, with 2 tokens each"),
        (replace(rows_of(1), top_token_ids=[5]), "are not 1, with 2 tokens each"),
        (replace(rows_of(1), top_logprobs=[-1.0] * 3), "are not 1, with 2 tokens each"),
        (replace(rows_of(1), logprobs=[0.01]), "not a number up to 0"),
        (replace(rows_of(1), logprobs=[math.nan]), "not a number up to 0"),
        (replace(rows_of(1), top_logprobs=[0.01, -1.0]), "not a number up to 0"),
        (replace(rows_of(1), top_logprobs=[-1.0, math.nan]), "not a number up to 0"),
        (replace(rows_of(1), ranks=[0]), "a rank or a likely token is beyond"),
        (replace(rows_of(1), ranks=[VOCAB_SIZE + 1]), "a rank or a likely token is beyond"),
        (replace(rows_of(1), top_token_ids=[-1, 5]), "a rank or a likely token is beyond"),
        (replace(rows_of(1), top_token_ids=[5, VOCAB_SIZE]), "a rank or a likely token is beyond"),
        (replace(rows_of(1), top_logprobs=[-0.7, -0.5]), "the most likely tokens do not come best first"),
    ],
)
def test_log_probabilities_that_cannot_be_are_refused(worker: Worker, rows: LogprobRows, reason: str) -> None:
    worker.add(TOLD)
    assert reason in worker.refusal(worker.plan(), answer([5], logprobs={0: rows}))


def test_rows_may_be_without_likely_tokens(worker: Worker) -> None:
    worker.add(BARE)
    plan = worker.plan()
    bare = of_prompt(plan, 0, 1, rows_of(3, num_top=0))
    worker.check(plan, answer([5], logprobs={0: rows_of(1, num_top=0)}, prompt_logprobs=[bare]))
    refusal = worker.refusal(plan, answer([5], logprobs={0: rows_of(1)}, prompt_logprobs=[bare]))
    assert "are not 1, with 0 tokens each" in refusal


def test_each_part_of_a_prompt_has_the_log_probabilities_of_the_tokens_behind_its_positions(worker: Worker) -> None:
    """15 tokens, computed as 12 and 3: the first part predicts tokens 1 to 12, the second 13 and 14, and no more."""
    worker.add(TOLD_OF_PROMPT, BUDGET + 3)
    for token_ids, first, num_rows in (([], 1, BUDGET), ([5], BUDGET + 1, 2)):
        plan = worker.plan()
        worker.check(plan, answer(token_ids, prompt_logprobs=[of_prompt(plan, 0, first, rows_of(num_rows))]))
        assert "no prompt log-probabilities of seat" in worker.refusal(plan, answer(token_ids))
        for at, number in ((first - 1, num_rows), (first + 1, num_rows), (first, num_rows - 1), (first, num_rows + 1)):
            wrong = [of_prompt(plan, 0, at, rows_of(number))]
            refusal = worker.refusal(plan, answer(token_ids, prompt_logprobs=wrong))
            assert f"log-probabilities of {number} prompt tokens from {at}, where {num_rows} from {first}" in refusal
        worker.scheduler.apply("w", plan.step_id, token_ids)
    worker.check(worker.plan(), answer([6]))  # the prompt is done


def test_a_prompt_of_two_tokens_has_the_log_probability_of_the_second(worker: Worker) -> None:
    worker.add(TOLD_OF_PROMPT, 2)
    plan = worker.plan()
    worker.check(plan, answer([5], prompt_logprobs=[of_prompt(plan, 0, 1, rows_of(1))]))
    assert "no prompt log-probabilities of seat" in worker.refusal(plan, answer([5]))


def test_every_row_of_a_prompt_is_checked(worker: Worker) -> None:
    worker.add(TOLD_OF_PROMPT)
    plan = worker.plan()
    damaged = replace(rows_of(3), top_logprobs=[-0.5, -0.7, -0.5, -0.7, -0.7, -0.5])
    refusal = worker.refusal(plan, answer([5], prompt_logprobs=[of_prompt(plan, 0, 1, damaged)]))
    assert "do not come best first" in refusal
    rising = replace(rows_of(3), top_logprobs=[-3.0, -4.0, -2.0, -3.0, -1.0, -2.0])  # each row of its own
    worker.check(plan, answer([5], prompt_logprobs=[of_prompt(plan, 0, 1, rising)]))


def test_prompt_log_probabilities_come_for_seats_of_the_step_that_asked_and_once(worker: Worker) -> None:
    worker.add(TOLD)
    worker.add(TOLD_OF_PROMPT)
    plan = worker.plan()
    told, good = {0: rows_of(1)}, of_prompt(plan, 1, 1, rows_of(3))
    worker.check(plan, answer([5, 6], logprobs=told, prompt_logprobs=[good]))
    refusal = worker.refusal(plan, answer([5, 6], logprobs=told, prompt_logprobs=[good, good]))
    assert f"of seat {plan.seats[1]}, which has no row, or came twice" in refusal
    elsewhere = replace(good, seat=99)
    refusal = worker.refusal(plan, answer([5, 6], logprobs=told, prompt_logprobs=[elsewhere, good]))
    assert "of seat 99, which has no row" in refusal
    unasked = of_prompt(plan, 0, 1, rows_of(3))
    refusal = worker.refusal(plan, answer([5, 6], logprobs=told, prompt_logprobs=[unasked, good]))
    assert f"of seat {plan.seats[0]}, which did not ask for any" in refusal


BARRED = Candidates(token_ids=[7, 3], logprobs=[-math.inf] * 2)


@pytest.mark.parametrize(
    ("sampling", "is_believed"),
    [
        (PLAIN, False),
        (SequenceSampling(seed=0, allowed_token_ids=[7]), True),
        (SequenceSampling(seed=0, logit_bias=((7, -math.inf),)), True),
        (SequenceSampling(seed=0, suppressed_token_ids=tuple(range(VOCAB_SIZE))), True),
        (SequenceSampling(seed=0, suppressed_token_ids=tuple(range(VOCAB_SIZE - 1))), False),
    ],
)
def test_no_candidate_is_possible_only_where_the_request_may_bar_every_token(
    worker: Worker, sampling: SequenceSampling, is_believed: bool
) -> None:
    worker.add(sampling, num_candidates=4)
    plan, result = worker.plan(), answer([], candidates=[BARRED])
    if is_believed:
        worker.check(plan, result)
    else:
        assert "no candidate of row 0 is possible" in worker.refusal(plan, result)


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, -math.inf]])
def test_one_candidate_may_be_the_only_possible_one(worker: Worker, logprobs: list[float]) -> None:
    worker.add(PLAIN, num_candidates=4)
    token_ids = [7, 3][: len(logprobs)]
    worker.check(worker.plan(), answer([], candidates=[Candidates(token_ids=token_ids, logprobs=logprobs)]))


def test_whatever_the_candidates_of_a_request_that_is_forgotten_the_worker_is_believed(worker: Worker) -> None:
    group = worker.add(PLAIN, num_candidates=4)
    plan = worker.plan()
    worker.scheduler.finish_group(group)
    worker.sampling_of.clear()
    worker.check(plan, answer([], candidates=[BARRED]))


def test_candidates_of_the_whole_vocabulary_are_believed_and_may_be_equally_likely(worker: Worker) -> None:
    worker.add(PLAIN, num_candidates=2)
    plan = worker.plan()
    worker.check(plan, answer([], candidates=[Candidates(token_ids=[0, VOCAB_SIZE - 1], logprobs=[-1.0, -1.0])]))


def test_candidates_have_log_probabilities_if_they_were_asked_and_the_request_goes_on(worker: Worker) -> None:
    plain, told = worker.add(PLAIN, num_candidates=2), worker.add(TOLD, num_candidates=2)
    plan = worker.plan()
    bare = Candidates(token_ids=[7, 3], logprobs=[-1.0, -2.0])
    full = replace(bare, rows=rows_of(2))
    worker.check(plan, answer([], candidates=[bare, full]))
    for candidates in ([full, full], [bare, bare]):
        refusal = worker.refusal(plan, answer([], candidates=candidates))
        assert "with log-probabilities that were not asked, or without" in refusal
    worker.scheduler.finish_group(plain)
    worker.check(plan, answer([], candidates=[full, full]))
    worker.scheduler.finish_group(told)
    worker.check(plan, answer([], candidates=[full, bare]))
    none = Candidates(token_ids=[], logprobs=[])
    worker.check(plan, answer([], candidates=[none, none]))  # not finite, of nobody who waits


def test_beams_whose_logits_were_not_finite_are_named(worker: Worker) -> None:
    groups = [worker.add(TOLD, num_candidates=2) for _ in range(2)]
    plan = worker.plan()
    full = Candidates(token_ids=[7, 3], logprobs=[-1.0, -2.0], rows=rows_of(2))
    with pytest.raises(NotFiniteError) as caught:
        worker.check(plan, answer([], candidates=[full, Candidates(token_ids=[], logprobs=[])]))
    assert list(caught.value.groups) == groups[1:]
