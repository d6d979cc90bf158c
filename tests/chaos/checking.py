"""Compare clients' histories with an undisturbed run of the same requests: lost, duplicated, missing, changed.

Tokens are equal up to the first near tie of the reference, as `tests.equality` defines it; margins are computed by
`transformers`, and only where outputs differ. Knows no process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

import quire
from tests.chaos.asks import ChaosAsk
from tests.chaos.history import Told
from tests.e2e.pressure_load import Margins
from tests.equality import NEAR_TIE
from tests.services import DEMO_MODEL

LOGPROB_TOLERANCE = 1e-4
MAX_REASONS = 20


class MarginSource(Protocol):
    """Source of the model's margins, which tell near ties."""

    def of_sample(self, ask: ChaosAsk, index: int, output: Sequence[int]) -> list[float]: ...

    def of_search(self, ask: ChaosAsk) -> float: ...


class DemoMargins:
    """The demo model in `transformers`, loaded when it is first asked."""

    def __init__(self) -> None:
        self._margins: Margins | None = None

    def of_sample(self, ask: ChaosAsk, index: int, output: Sequence[int]) -> list[float]:
        return self._loaded().of_sample(ask, index, output)

    def of_search(self, ask: ChaosAsk) -> float:
        return self._loaded().of_search(ask)

    def _loaded(self) -> Margins:
        if self._margins is None:
            torch.set_num_threads(1)
            model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
            self._margins = Margins(model)
        return self._margins


@dataclass(slots=True)
class Verdict:
    """Counts over the histories of a scenario. Each but the first two and the cuts should be zero."""

    sent: int = 0
    accepted: int = 0
    lost: int = 0  # accepted, and did not finish for their client
    duplicated: int = 0  # positions that came twice
    missing: int = 0  # positions that never came
    changed: int = 0  # positions with another token or log-probability than in the undisturbed run
    num_tokens: int = 0
    num_cuts: int = 0  # outputs that part from the reference at a near tie
    worst_stall_s: float = 0.0  # between two tokens of a request
    reasons: list[str] = field(default_factory=list)

    def note(self, reason: str) -> None:
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(reason)


@dataclass(frozen=True, slots=True)
class Reference:
    """The outputs of an undisturbed run, by ask."""

    asks: list[ChaosAsk]
    completions: list[quire.Completion]
    margins: MarginSource

    def judge(self, requests: Iterable[Told]) -> Verdict:
        """Judge all requests."""
        verdict = Verdict()
        for told in requests:
            verdict.sent += 1
            verdict.num_tokens += told.num_tokens
            verdict.accepted += told.accepted_s is not None
            if self.asks[told.ask].streams:
                verdict.worst_stall_s = max(verdict.worst_stall_s, _worst_stall(told))
            _check_positions(told, verdict)
            finished = told.state == "finished"
            if not finished and told.accepted_s is not None:
                verdict.lost += 1
                verdict.note(f"{told.request_id} lost: {told.state}: {told.error}")
            self._compare(told, verdict, is_whole=finished)
        return verdict

    def _compare(self, told: Told, verdict: Verdict, *, is_whole: bool) -> None:
        ask, reference = self.asks[told.ask], self.completions[told.ask]
        is_cut = False
        for sample in reference.samples:
            found = told.tokens_of(sample.index)
            length = len(sample.token_ids) if is_whole else len(found)
            differing = _first_difference(sample.token_ids, found, length)
            if differing is not None:
                if is_cut or self._is_near_tie(ask, reference, sample, differing):
                    is_cut = True
                    continue
                wrong = sum(a != b for a, b in zip(sample.token_ids, found, strict=False))
                verdict.changed += wrong
                verdict.missing += max(0, length - len(found))
                verdict.note(f"{told.request_id} sample {sample.index} differs at position {differing}")
            wrong_logprobs = _wrong_logprobs(told, sample, len(found) if differing is None else differing)
            verdict.changed += wrong_logprobs
            if wrong_logprobs:
                verdict.note(f"{told.request_id} sample {sample.index}: {wrong_logprobs} other log-probabilities")
        verdict.num_cuts += is_cut

    def _is_near_tie(self, ask: ChaosAsk, reference: quire.Completion, sample: quire.Sample, position: int) -> bool:
        if ask.beam_width is not None:
            return self.margins.of_search(ask) < NEAR_TIE
        samples = [sample] if ask.best_of is None else reference.samples  # ranks hang on all of them
        for each in samples:
            end = position + 1 if ask.best_of is None else len(each.token_ids)
            margins = self.margins.of_sample(ask, each.sample_index, each.token_ids)[:end]
            if any(abs(margin) < NEAR_TIE for margin in margins):
                return True
        return False


def _check_positions(told: Told, verdict: Verdict) -> None:
    """Check that each position came once, in order."""
    due: dict[int, int] = {}
    for piece in told.pieces:
        expected = due.get(piece.sample, 0)
        twice, gap = max(0, expected - piece.position), max(0, piece.position - expected)
        verdict.duplicated += min(twice, len(piece.tokens))
        verdict.missing += gap
        if twice or gap:
            verdict.note(f"{told.request_id} sample {piece.sample}: position {piece.position} where {expected} was due")
        due[piece.sample] = max(expected, piece.position + len(piece.tokens))


def _first_difference(reference: Sequence[int], found: Sequence[int], length: int) -> int | None:
    for position in range(max(length, len(found))):
        expected = reference[position] if position < len(reference) else None
        if expected is None or position >= len(found) or found[position] != expected:
            return position
    return None


def _wrong_logprobs(told: Told, sample: quire.Sample, length: int) -> int:
    """Count the first `length` tokens whose log-probability differs from the reference."""
    if not sample.logprobs:
        return 0
    found = [each for piece in told.pieces if piece.sample == sample.index for each in piece.logprobs]
    pairs = zip(found[:length], sample.logprobs[:length], strict=False)
    wrong = sum(abs(mine - theirs.logprob) > LOGPROB_TOLERANCE for mine, theirs in pairs)
    return wrong + max(0, length - len(found))


def _worst_stall(told: Told) -> float:
    moments = [piece.at_s for piece in told.pieces if piece.tokens]
    return max((b - a for a, b in pairwise(moments)), default=0.0)
