"""Check of a worker's answer against its step, before any of it is used. Pure."""

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from math import inf, isnan

from common.sampling_params import SequenceSampling
from common.step import Candidates, Floats, Ints, LogprobRows, PromptLogprobs, StepResult
from quire.errors import QuireError
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step_plan import StepPlan

MAX_VOCAB_SIZE = 1 << 31  # token ids are int32

_ROUNDING = 1e-3  # by which a log-probability of float32 may exceed 0


class ImpossibleAnswerError(QuireError):
    """Answer of a worker that cannot be the answer to its step: it is dropped, and the worker is given up."""

    reason = "IMPOSSIBLE_ANSWER"


class NotFiniteError(QuireError):
    """No token could follow in some requests: the answer is dropped, and the requests are computed elsewhere."""

    reason = "NOT_FINITE"

    def __init__(self, groups: Collection[SequenceGroup], *, have_grammars: bool) -> None:
        """`have_grammars`: all these requests have one, and a grammar that fails leaves no token either."""
        not_finite = "the model's logits were not finite: check the model's weights and dtype, or change the prompt"
        failed = (
            "no token could follow: the structured output went beyond a limit (its text can be read in too many ways, "
            "or its masks took too much processor time), so ask for a simpler one; or"
        )
        super().__init__(f"{failed} {not_finite}" if have_grammars else not_finite)
        self.groups = groups


def check_result(
    plan: StepPlan,
    result: StepResult,
    vocab_size: int,
    sampling_of: Mapping[int, SequenceSampling],
    asked: Mapping[int, SequenceSampling],
) -> None:
    """Raise ImpossibleAnswerError if the result does not fit the plan, NotFiniteError if it reports such logits.

    Args:
        plan: the step that the worker got.
        result: its answer, with the epoch and step of the plan.
        vocab_size: of the model being served.
        sampling_of: by seq_id, of all sequences.
        asked: the same, for sequences that asked for log-probabilities.
    """
    _check_samples(plan, result, vocab_size)
    if asked or result.logprobs or result.prompt_logprobs:
        _check_logprobs(plan, result, vocab_size, asked)
        _check_prompt_logprobs(plan, result, vocab_size, asked)
    if len(result.candidates) != len(plan.candidate_rows):
        raise _impossible(
            plan, f"candidates of {len(result.candidates)} rows came for {len(plan.candidate_rows)} that were asked"
        )
    for row, candidates in zip(plan.candidate_rows, result.candidates, strict=True):
        _check_candidates(plan, row, candidates, vocab_size, sampling_of)
    groups = not_finite(plan, result)
    if groups:
        raise NotFiniteError(groups, have_grammars=all(_has_grammar(group, sampling_of) for group in groups))


def check_forced(
    plan: StepPlan,
    result: StepResult,
    vocab_size: int,
    sampling_of: Mapping[int, SequenceSampling],
    num_forceable: Callable[[StepPlan, int], int],
) -> None:
    """Raise ImpossibleAnswerError if a grammar cannot have forced these tokens in this step.

    Args:
        plan: the step that the worker got.
        result: its answer, checked otherwise.
        vocab_size: of the model being served.
        sampling_of: by seq_id, of all sequences.
        num_forceable: most tokens that the step may have forced before a sample, by its index.
    """
    for sample, forced in result.forced.items():
        if not _are_within(forced, 0, vocab_size - 1):
            raise _impossible(plan, f"a forced token of sample {sample} is beyond the vocabulary of {vocab_size}")
        sequence = plan.sampled_sequences[sample]
        sampling = sampling_of.get(sequence.seq_id)
        if sampling is None or sequence.is_finished:
            continue  # nothing is taken
        if not sampling.forces_text:
            raise _impossible(plan, f"forced tokens of sample {sample}, which has no grammar, or needs each by itself")
        if len(forced) > (most := num_forceable(plan, sample)):
            raise _impossible(plan, f"{len(forced)} forced tokens of sample {sample}, where {most} have room")


def not_finite(plan: StepPlan, result: StepResult) -> list[SequenceGroup]:
    """Groups with a live member whose logits were not finite, each once."""
    rows = zip(plan.candidate_rows, result.candidates, strict=True)
    sequences = [plan.sampled_sequences[sample] for sample in result.invalid_samples]
    sequences += [plan.sequences[row] for row, candidates in rows if not candidates.token_ids]
    return list(dict.fromkeys(sequence.group for sequence in sequences if not sequence.is_finished))


def _has_grammar(group: SequenceGroup, sampling_of: Mapping[int, SequenceSampling]) -> bool:
    samplings = (sampling_of.get(sequence.seq_id) for sequence in group.sequences)
    return any(sampling is not None and sampling.grammar for sampling in samplings)


def _impossible(plan: StepPlan, what: str) -> ImpossibleAnswerError:
    return ImpossibleAnswerError(f"step {plan.step_id}: {what}")


def _check_samples(plan: StepPlan, result: StepResult, vocab_size: int) -> None:
    num_samples, token_ids = len(plan.sampled_sequences), result.token_ids
    if len(token_ids) != num_samples:
        raise _impossible(plan, f"{len(token_ids)} tokens came for {num_samples} samples")
    if num_samples and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise _impossible(plan, f"a token id is beyond the vocabulary of {vocab_size}")
    if len(result.invalid_samples) > num_samples:
        raise _impossible(plan, f"{len(result.invalid_samples)} invalid samples where there are {num_samples}")
    for sample in (*result.invalid_samples, *result.logprobs, *result.forced):
        if not 0 <= sample < num_samples:
            raise _impossible(plan, f"news of sample {sample}, where there are {num_samples}")


def _check_logprobs(plan: StepPlan, result: StepResult, vocab_size: int, asked: Mapping[int, SequenceSampling]) -> None:
    """Require one row for each sample that asked, and none for others; logits that are not finite may have none."""
    invalid = set(result.invalid_samples)
    for sample, sequence in enumerate(plan.sampled_sequences):
        sampling = asked.get(sequence.seq_id)
        rows = result.logprobs.get(sample)
        num_top = sampling.num_logprobs if sampling is not None else None
        if sample in invalid or (sequence.is_finished and rows is None):
            continue
        if rows is not None and num_top is not None:
            _check_rows(plan, rows, 1, num_top, vocab_size)
        elif rows is not None and not sequence.is_finished:
            raise _impossible(plan, f"log-probabilities of sample {sample}, which did not ask for any")
        elif num_top is not None:
            raise _impossible(plan, f"no log-probabilities of sample {sample}, which asked for them")


def _check_prompt_logprobs(
    plan: StepPlan, result: StepResult, vocab_size: int, asked: Mapping[int, SequenceSampling]
) -> None:
    """Require at most one answer for each row within a prompt, for exactly the prompt tokens that it predicts."""
    row_of = {seat: row for row, seat in enumerate(plan.seats)}
    for item in result.prompt_logprobs:
        row = row_of.pop(item.seat, None)
        if row is None:
            raise _impossible(plan, f"prompt log-probabilities of seat {item.seat}, which has no row, or came twice")
        sequence = plan.sequences[row]
        sampling = asked.get(sequence.seq_id)
        if sampling is None or sampling.num_prompt_logprobs is None:
            if not sequence.is_finished:
                raise _impossible(plan, f"prompt log-probabilities of seat {item.seat}, which did not ask for any")
            continue
        _check_prompt_rows(plan, row, item, sampling.num_prompt_logprobs, vocab_size)
    for row in row_of.values():
        sequence = plan.sequences[row]
        sampling = asked.get(sequence.seq_id)
        if sampling is not None and sampling.num_prompt_logprobs is not None and _num_predicted(plan, row) > 0:
            raise _impossible(plan, f"no prompt log-probabilities of seat {plan.seats[row]}, which asked for them")


def _check_prompt_rows(plan: StepPlan, row: int, item: PromptLogprobs, num_top: int, vocab_size: int) -> None:
    first, num_rows = plan.positions[row] + 1, _num_predicted(plan, row)
    if item.position != first or len(item.rows.logprobs) != num_rows:
        said = f"{len(item.rows.logprobs)} prompt tokens from {item.position}"
        raise _impossible(plan, f"log-probabilities of {said}, where {num_rows} from {first} were computed")
    _check_rows(plan, item.rows, num_rows, num_top, vocab_size)


def _num_predicted(plan: StepPlan, row: int) -> int:
    """Prompt tokens behind the row's positions: the last of the prompt is followed by none."""
    position = plan.positions[row]
    return max(0, min(position + plan.num_tokens[row], plan.sequences[row].num_prompt_tokens - 1) - position)


def _check_candidates(
    plan: StepPlan, row: int, candidates: Candidates, vocab_size: int, sampling_of: Mapping[int, SequenceSampling]
) -> None:
    """Check candidates of a row. None: the logits were not finite. Fewer than asked for: a small vocabulary."""
    sequence = plan.sequences[row]
    num_candidates, num_wanted = len(candidates.token_ids), sequence.group.num_candidates
    if num_candidates > num_wanted:
        raise _impossible(plan, f"{num_candidates} candidates of row {row}, where {num_wanted} were asked")
    if len(candidates.logprobs) != num_candidates or any(isnan(each) or each == inf for each in candidates.logprobs):
        raise _impossible(plan, f"candidates of row {row} without a log-probability each")
    if num_candidates and not (min(candidates.token_ids) >= 0 and max(candidates.token_ids) < vocab_size):
        raise _impossible(plan, f"a candidate of row {row} is beyond the vocabulary of {vocab_size}")
    if len(set(candidates.token_ids)) < num_candidates:
        raise _impossible(plan, f"a candidate of row {row} came twice")
    if any(better < worse for better, worse in pairwise(candidates.logprobs)):
        raise _impossible(plan, f"candidates of row {row} do not come best first")
    sampling = sampling_of.get(sequence.seq_id)
    num_top = sampling.num_logprobs if sampling is not None else None
    if num_candidates and candidates.logprobs[0] == -inf and not _may_bar_all(sampling, vocab_size):
        raise _impossible(plan, f"no candidate of row {row} is possible, though not all tokens are barred")
    if candidates.rows is not None and num_top is not None:
        _check_rows(plan, candidates.rows, num_candidates, num_top, vocab_size)
    elif num_candidates and not sequence.is_finished and (candidates.rows is None) != (num_top is None):
        raise _impossible(plan, f"candidates of row {row} with log-probabilities that were not asked, or without")


def _may_bar_all(sampling: SequenceSampling | None, vocab_size: int) -> bool:
    """True if the request's grammar, allowed and suppressed tokens may leave no token at all."""
    if sampling is None:
        return True
    is_edited = sampling.allowed_token_ids is not None or bool(sampling.logit_bias) or bool(sampling.grammar)
    return is_edited or len(sampling.suppressed_token_ids) >= vocab_size


def _check_rows(plan: StepPlan, rows: LogprobRows, num_rows: int, num_top: int, vocab_size: int) -> None:
    lengths = [len(rows.logprobs), len(rows.ranks), len(rows.top_token_ids), len(rows.top_logprobs)]
    if rows.num_top != num_top or lengths != [num_rows, num_rows, num_rows * num_top, num_rows * num_top]:
        raise _impossible(plan, f"rows of log-probabilities are not {num_rows}, with {num_top} tokens each")
    if not (_are_logprobs(rows.logprobs) and _are_logprobs(rows.top_logprobs)):
        raise _impossible(plan, "a log-probability is not a number up to 0")
    if not (_are_within(rows.ranks, 1, vocab_size) and _are_within(rows.top_token_ids, 0, vocab_size - 1)):
        raise _impossible(plan, "a rank or a likely token is beyond the vocabulary")
    for start in range(0, num_rows * num_top, num_top or 1):
        top = rows.top_logprobs[start : start + num_top]
        if any(better < worse for better, worse in pairwise(top)):
            raise _impossible(plan, "the most likely tokens do not come best first")


def _are_logprobs(values: Floats) -> bool:
    return all(value <= _ROUNDING for value in values)  # not so for NaN


def _are_within(values: Ints, least: int, most: int) -> bool:
    return not values or (least <= min(values) and max(values) <= most)
