"""Judge of results in half precision that two devices computed: apart by rounding, and by nothing else.

Results of the same steps are compared with those of references in the same dtype. How far rounding takes them is
measured, by references in float32 with the same weights, for each model and its steps. Tokens are compared up to the
step where a sequence's two best are no further apart than that, if ours is the other of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.step import LogprobRows, Step, StepResult
from kernels.sampling.choice_reference import ChosenTokens, SampleRows
from kernels.sampling.logit_edits import LogitEdits, apply_edits
from kernels.sampling.noise import gumbel, noise_bits
from kernels.sampling.penalty_reference import penalise
from kernels.sampling.sampling import NO_THRESHOLD, model_logprobs, scale
from tests.worker.runners import NUM_SEATS, limits_for, poisoned_pool
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations

MAX_PARTED = 2  # of the four sequences of one run


@dataclass(frozen=True, slots=True)
class StepScores:
    """Logits of a step's samples, and the scores whose largest is chosen, both in units of logits."""

    logits: Tensor  # float32 [S, V], raw
    scores: Tensor  # float64 [S, V], edited, with a draw's noise


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """Results of steps, one after another, and their scores."""

    results: Sequence[StepResult]
    scores: Sequence[StepScores]


def keeping_scores(operations: Operations, kept: list[StepScores]) -> Operations:
    """The operations, which keep the scores of every choice of tokens. No sample may have top-k, top-p or min-p on."""
    choose = operations.sampling.choose_tokens

    def keep(logits: Tensor, rows: SampleRows, edits: LogitEdits | None, token_table: Tensor) -> ChosenTokens:
        assert not len(rows.selecting) and (rows.floors == NO_THRESHOLD).all()
        raw = logits.float().index_select(0, rows.logit_rows)
        edited = raw.clone()
        if edits is not None:
            apply_edits(edited, edits, penalise, token_table)
        token_ids = torch.arange(raw.shape[1], dtype=torch.int32)
        temperatures = rows.temperatures[:, None].double()
        drawn = scale(edited, rows.temperatures) + gumbel(noise_bits(rows.keys[:, None], token_ids))
        kept.append(StepScores(raw, torch.where(temperatures == 0, edited.double(), drawn * temperatures)))
        return choose(logits, rows, edits, token_table)

    return replace(operations, sampling=replace(operations.sampling, choose_tokens=keep))


def scored_run(decoder: Decoder, steps: Sequence[Step], operations: Operations = OPERATIONS) -> ScoredRun:
    """Steps one after another with the references, on a CPU."""
    kept: list[StepScores] = []
    kept_by, sizes = keeping_scores(operations, kept), graph_sizes(NUM_SEATS)
    runner = DeviceRunner(decoder, poisoned_pool(decoder), limits_for(decoder), kept_by, sizes)
    results = [runner.launch(step).wait() for step in steps]
    return ScoredRun(results, kept)


def rounding_of(reference: ScoredRun, exact: ScoredRun) -> tuple[float, float]:
    """Largest errors of the reference's logits and log-probabilities, over all tokens, while it says the same tokens.

    Later logits are of other sequences.
    """
    logits = logprobs = 0.0
    for result, result_exact, scores, scores_exact in zip(
        reference.results, exact.results, reference.scores, exact.scores, strict=True
    ):
        logits = max(logits, float((scores.logits - scores_exact.logits).abs().max()))
        error = model_logprobs(scores.logits) - model_logprobs(scores_exact.logits)
        logprobs = max(logprobs, float(error.abs().max()))
        if list(result.token_ids) != list(result_exact.token_ids):
            break
    return logits, logprobs


def assert_apart_by_rounding(
    steps: Sequence[Step], ours: Sequence[StepResult], reference: ScoredRun, exact: ScoredRun, max_penalty: float
) -> None:
    """Tokens, log-probabilities, ranks and most likely tokens are the reference's, but for its rounding, twice.

    If ours are as exact as the reference's, they are no further from it than both are from the exact ones. So two
    logits may come nearer by four errors, and a repetition penalty multiplies them. `exact` has the same weights.
    """
    logit_error, logprob_error = rounding_of(reference, exact)
    near_tie, tolerance = 4 * logit_error * max_penalty, 2 * logprob_error
    parted: set[int] = set()
    for step, result, expected, scores in zip(steps, ours, reference.results, reference.scores, strict=True):
        seats = sampled_seats(step)
        assert len(result.token_ids) == len(expected.token_ids) == len(seats) == len(scores.logits)
        assert set(result.logprobs) == set(expected.logprobs)
        logprobs = model_logprobs(scores.logits)
        for sample, (seat, token) in enumerate(zip(seats, result.token_ids, strict=True)):
            if seat in parted:
                continue
            if sample in result.logprobs:
                _assert_row_near(result.logprobs[sample], token, logprobs[sample], tolerance)
            if token != expected.token_ids[sample]:
                gap = float(scores.scores[sample].max() - scores.scores[sample, token])
                assert gap <= near_tie, (
                    f"step {step.step_id}, seat {seat}: {gap:.3f} below the best, {near_tie:.3f} off"
                )
                parted.add(seat)
    assert len(parted) <= MAX_PARTED, f"sequences {sorted(parted)} parted, each at a near tie: too many"


def sampled_seats(step: Step) -> list[int]:
    """The seat of each sample of a step."""
    return list(step.rows if step.samples is None else step.samples[1::2])


def _assert_row_near(row: LogprobRows, token: int, logprobs: Tensor, tolerance: float) -> None:
    """One sample's log-probabilities; ranks and places may change among tokens that are as near to each other."""
    own = float(logprobs[token])
    assert abs(row.logprobs[0] - own) <= tolerance
    above, not_below = (int((logprobs > own + far).sum()) for far in (2 * tolerance, -2 * tolerance))
    assert above + 1 <= row.ranks[0] <= not_below + 1
    best = logprobs.sort(descending=True).values
    assert len(set(row.top_token_ids)) == len(row.top_token_ids)
    for place, (other, logprob) in enumerate(zip(row.top_token_ids, row.top_logprobs, strict=True)):
        assert abs(logprob - float(logprobs[other])) <= tolerance
        assert float(logprobs[other]) >= float(best[place]) - 2 * tolerance
