"""Whether an answer of a worker can be the answer to a step: seen before any of it is believed. Pure."""

from itertools import pairwise
from math import isnan

from common.step import Candidates, LogprobRows, StepResult
from quire.errors import QuireError
from scheduler_svc.core.step_plan import StepPlan


class ImpossibleAnswerError(QuireError):
    """A worker's answer cannot be that to its step: the worker's doing, and nobody else's."""

    reason = "IMPOSSIBLE_ANSWER"


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Raises ImpossibleAnswerError if the result does not fit the plan."""
    num_samples = len(plan.sampled_sequences)
    if len(result.token_ids) != num_samples:
        raise ImpossibleAnswerError(
            f"step {plan.step_id}: {len(result.token_ids)} tokens came for {num_samples} samples"
        )
    if num_samples and min(result.token_ids) < 0:
        raise ImpossibleAnswerError(f"step {plan.step_id}: a token id is negative")
    for sample in (*result.invalid_samples, *result.logprobs):
        if not 0 <= sample < num_samples:
            raise ImpossibleAnswerError(f"step {plan.step_id}: news of sample {sample}, where there are {num_samples}")
    for rows in result.logprobs.values():
        _check_rows(plan, rows, 1)
    for item in result.prompt_logprobs:
        _check_rows(plan, item.rows, len(item.rows.logprobs))
    if len(result.candidates) != len(plan.candidate_rows):
        raise ImpossibleAnswerError(
            f"step {plan.step_id}: candidates of {len(result.candidates)} rows came for {len(plan.candidate_rows)}"
        )
    for row, candidates in zip(plan.candidate_rows, result.candidates, strict=True):
        _check_candidates(plan, row, candidates)


def _check_candidates(plan: StepPlan, row: int, candidates: Candidates) -> None:
    """None at all are an answer: the logits were not finite. So are fewer than asked for: a small vocabulary."""
    num_candidates, num_wanted = len(candidates.token_ids), plan.sequences[row].group.num_candidates
    if num_candidates > num_wanted:
        raise ImpossibleAnswerError(
            f"step {plan.step_id}: {num_candidates} candidates of row {row}, where {num_wanted} were asked"
        )
    if len(candidates.logprobs) != num_candidates or any(isnan(logprob) for logprob in candidates.logprobs):
        raise ImpossibleAnswerError(f"step {plan.step_id}: candidates of row {row} without a log-probability each")
    if num_candidates and min(candidates.token_ids) < 0:
        raise ImpossibleAnswerError(f"step {plan.step_id}: a candidate of row {row} is negative")
    if len(set(candidates.token_ids)) < num_candidates:
        raise ImpossibleAnswerError(f"step {plan.step_id}: a candidate of row {row} came twice")
    if any(better < worse for better, worse in pairwise(candidates.logprobs)):
        raise ImpossibleAnswerError(f"step {plan.step_id}: candidates of row {row} do not come best first")
    if candidates.rows is not None:
        _check_rows(plan, candidates.rows, num_candidates)


def _check_rows(plan: StepPlan, rows: LogprobRows, num_rows: int) -> None:
    lengths = [len(rows.logprobs), len(rows.ranks), len(rows.top_token_ids), len(rows.top_logprobs)]
    if lengths != [num_rows, num_rows, num_rows * rows.num_top, num_rows * rows.num_top]:
        raise ImpossibleAnswerError(f"step {plan.step_id}: rows of log-probabilities are ragged")
