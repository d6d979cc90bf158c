"""Beam search of `transformers` from one prompt, its margins, and the rule for answers that count as equal.

A search is compared whole: after a near tie its beams may part anywhere. So a difference is allowed only where some
decision of the reference was within `NEAR_TIE`; each such cut is counted, printed, and must be rare.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from scheduler_svc.core.beam_search import BeamSearchParams, Hypothesis
from tests.equality import MAX_CUT_FRACTION, NEAR_TIE


@dataclass(slots=True)
class BeamReference:
    """The reference's best `beam_width`, best first."""

    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    step_logprobs: list[torch.Tensor] = field(default_factory=list)  # of each step, [beam_width, vocab_size]
    margin: float = float("inf")  # the smallest score gap that decided anything

    def note_gap(self, better: torch.Tensor, worse: torch.Tensor) -> None:
        self.margin = min(self.margin, abs(float(better - worse)))


def reference_beams(model: Any, prompt: Sequence[int], params: BeamSearchParams, **options: Any) -> BeamReference:
    """Search with `transformers`, the prompt alone and unpadded; options are further ones of `generate`."""
    reference = BeamReference()
    ids = torch.tensor([list(prompt)])
    with pytest.MonkeyPatch.context() as patch:
        _observe_decisions(model, params, reference, patch)
        patch.setattr(model.generation_config, "eos_token_id", None)
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=sorted(params.eos_token_ids) or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    lengths = (result.beam_indices >= 0).sum(dim=1).tolist()
    outputs = result.sequences[:, len(prompt) :].tolist()
    reference.token_ids = [tuple(output[:length]) for output, length in zip(outputs, lengths, strict=True)]
    reference.scores = result.sequences_scores.tolist()
    reference.step_logprobs = list(result.scores)
    for better, worse in zip(result.sequences_scores, result.sequences_scores[1:], strict=False):
        reference.note_gap(better, worse)
    return reference


def _observe_decisions(
    model: Any, params: BeamSearchParams, reference: BeamReference, patch: pytest.MonkeyPatch
) -> None:
    """Let the reference's own steps tell which score gaps decided."""
    choose, check_stop = model._get_top_k_continuations, model._check_early_stop_heuristic
    width, eos_token_ids = params.beam_width, torch.tensor(sorted(params.eos_token_ids), dtype=torch.int64)

    def choose_and_note(**given: Any) -> Any:
        scores = given["accumulated_log_probs"][0]
        ends = torch.isin(torch.arange(len(scores)) % (len(scores) // width), eos_token_ids)
        best = scores.topk(width + 1)
        is_last = given["cur_len"] + 1 - given["decoder_prompt_len"] == params.max_tokens
        if is_last or ends[best.indices[-2:]].any():  # the last that may finish, and the first that may not
            reference.note_gap(*best.values[-2:])
        if not is_last:  # the last to live on, and the first that does not
            reference.note_gap(*scores[~ends].topk(width + 1).values[-2:])
        return choose(**given)

    def check_and_note(**given: Any) -> Any:
        if given["is_sent_finished"].all():
            grows = params.early_stopping == "never" and params.length_penalty > 0
            length = (given["max_length"] if grows else given["cur_len"]) - given["decoder_prompt_len"]
            best = given["running_beam_scores"][0, 0] / length**params.length_penalty
            if best > -1e8:  # below it, beams at max_length are marked as ended
                reference.note_gap(best, given["beam_scores"].min())
        return check_stop(**given)

    patch.setattr(model, "_get_top_k_continuations", choose_and_note)
    patch.setattr(model, "_check_early_stop_heuristic", check_and_note)


@dataclass(frozen=True, slots=True)
class BeamReport:
    """Report of the searches that were compared."""

    num_searches: int = 0
    num_cuts: int = 0  # searches that differ, after a near tie
    num_hypotheses: int = 0  # equal
    num_ended: int = 0  # of these, by an end-of-sequence token

    def __add__(self, other: "BeamReport") -> "BeamReport":
        return BeamReport(
            self.num_searches + other.num_searches,
            self.num_cuts + other.num_cuts,
            self.num_hypotheses + other.num_hypotheses,
            self.num_ended + other.num_ended,
        )

    def __str__(self) -> str:
        return (
            f"{self.num_hypotheses} hypotheses of {self.num_searches} searches equal, {self.num_ended} of them ended, "
            f"{self.num_cuts} searches cut at a near tie"
        )

    def assert_cuts_are_rare(self) -> None:
        print(self)  # noqa: T201 - each cut is counted and printed
        assert self.num_cuts == 0 or self.num_cuts < MAX_CUT_FRACTION * self.num_searches, str(self)


def compare_beams(reference: BeamReference, ours: Sequence[Hypothesis], near_tie: float = NEAR_TIE) -> BeamReport:
    """The report of this one search; raise AssertionError if it differs without a near tie.

    ours may be fewer: the n best. Scores are to be within 1e-4.
    """
    expected = reference.token_ids[: len(ours)]
    if [each.token_ids for each in ours] != expected:
        assert reference.margin < near_tie, f"margin {reference.margin:.2e}: {expected} expected, {ours} found"
        return BeamReport(num_searches=1, num_cuts=1)
    for each, score in zip(ours, reference.scores, strict=False):
        assert abs(each.score - score) < 1e-4, f"score {each.score}, {score} expected"
    return BeamReport(num_searches=1, num_hypotheses=len(ours), num_ended=sum(each.finish == "eos" for each in ours))
